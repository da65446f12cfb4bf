"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and since tokenizer 11 once per call
[TOOL_CALLS]name[ARGS]{...}, with [CALL_ID]... in between in some versions.
"""

from __future__ import annotations

from service.parsers.base import Steps
from service.parsers.json_calls import JsonToolParser
from service.parsers.tool_parser import random_name


class MistralParser(JsonToolParser):
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    @staticmethod
    def random_id() -> str:
        """These templates refuse a conversation whose call ids are anything but nine letters and digits."""
        return random_name(9)

    def _call(self, opener: str) -> Steps[None]:
        yield from self._space()
        if (yield from self._match("[")):
            yield from self._array()
        elif (yield from self._match("{")):
            yield from self._call_object(announced=True)
        else:
            yield from self._named()

    def _array(self) -> Steps[None]:
        """A call that is rejected keeps its comma, and the last one the bracket."""
        separator = ","
        while separator == ",":
            yield from self._space()
            yield from self._literal("{")
            yield from self._call_object(announced=True)
            rejected = self._rejected
            self._hold()
            yield from self._space()
            separator = yield from self._match(",", "]")
        if separator and not rejected:
            self._held.clear()

    def _named(self) -> Steps[None]:
        name = yield from self._name("[{")
        yield from self._space()
        if (yield from self._match("[CALL_ID]")):
            while (character := (yield from self._peek())) and character.isalnum():
                self._take(1)
            yield from self._literal("[ARGS]")
        else:
            yield from self._match("[ARGS]")
        yield from self._space()
        yield from self._json_arguments(name)
