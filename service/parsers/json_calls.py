"""Calls written as {"name": ..., "arguments": {...}}, which several families have inside different markers."""

from __future__ import annotations

import json
from dataclasses import dataclass

from service.parsers.base import Malformed, Steps
from service.parsers.json_text import json_value
from service.parsers.tool_parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")
_COMPANIONS = ("type", "id")  # keys that tell nothing, but that models write


@dataclass(slots=True)
class _Call:
    """arguments: read before the name was; None when not read yet."""

    announced: bool
    name: str | None = None
    arguments: str | None = None
    started: bool = False


class JsonToolParser(ToolParser):
    """Sends arguments to the letter and as they come where the name came before them, at once where it comes after."""

    def _call_object(self, *, announced: bool) -> Steps[None]:
        """The object from behind its first brace on.

        announced: a marker said that it is a call. Then the arguments may be missing, and keys beside the known ones
        are passed over; otherwise such an object is an answer in JSON.
        """
        call = _Call(announced)
        yield from self._space()
        separator = "}" if (yield from self._match("}")) else ","
        while separator == ",":
            yield from self._space()
            yield from self._member(call)
            yield from self._space()
            separator = yield from self._match(",", "}")
        if not separator:
            raise Malformed
        if not call.started:
            self._start_late(call, "{}" if announced else None)

    def _member(self, call: _Call) -> Steps[None]:
        key = yield from self._json_string()
        yield from self._space()
        yield from self._literal(":")
        yield from self._space()
        if key == "name" and call.name is None:
            call.name = yield from self._json_string()
            if call.name not in self._tools:
                self._reject()
            elif call.arguments is not None:
                self._start_late(call, None)
        elif key in _ARGUMENTS and not call.started and call.arguments is None:
            yield from self._arguments_member(call)
        else:
            if key not in _COMPANIONS and not call.announced and not call.started:
                self._reject()
            yield from self._json_value()

    def _arguments_member(self, call: _Call) -> Steps[None]:
        if call.name is not None and not self._rejected and (yield from self._peek()) == "{":
            call.started = True
            yield from self._json_arguments(call.name)
            return
        value = yield from self._json_value()
        if value.startswith('"'):
            value = json.loads(value)  # some models write the object as a string
        arguments = "{}" if value == "null" else json_value(value)
        if arguments is None or not arguments.startswith("{"):
            arguments = None
            self._reject()
        call.arguments = arguments
        if call.name is not None:
            self._start_late(call, None)

    def _start_late(self, call: _Call, without_arguments: str | None) -> None:
        arguments = call.arguments if call.arguments is not None else without_arguments
        if call.name is None or arguments is None:
            self._reject()
        if self._rejected or call.name is None or arguments is None:
            return
        call.started = True
        self._start(call.name)
        self._arguments(arguments)

    def _json_string(self) -> Steps[str]:
        if (yield from self._peek()) != '"':
            raise Malformed
        return str(json.loads((yield from self._json_value())))
