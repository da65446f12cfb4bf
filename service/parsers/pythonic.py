"""Llama 3.2, Llama 4, ToolACE, LFM2: [name(key=value, ...), other()] with values as Python literals.

The list stands at the start of the text or a line, or inside a family's own markers. A call is sent when it is complete
and a comma or the closing bracket follows.
"""

from __future__ import annotations

from service.parsers.base import Malformed, Steps
from service.parsers.python_text import arguments_json, escape
from service.parsers.tool_parser import ToolParser

_CLOSERS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}


class PythonicParser(ToolParser):
    openers = ("[", *_CLOSERS)
    markers = (*_CLOSERS, *_CLOSERS.values())

    def _may_begin(self, opener: str) -> bool:
        return opener != "[" or self._at_line_start

    def _call(self, opener: str) -> Steps[None]:
        if opener != "[":
            yield from self._space()
            yield from self._literal("[")
        yield from self._space()
        while not (yield from self._list_item()):
            self._hold()
            yield from self._space()
            if (yield from self._match("]")):
                self._belongs()
                break
        if opener != "[":
            yield from self._closing(_CLOSERS[opener])

    def _list_item(self) -> Steps[bool]:
        """One call and what follows it; whether that was the end of the list. The output may end without a bracket."""
        name = yield from self._name("(")
        if self._rejected:
            raise Malformed
        yield from self._literal("(")
        arguments = arguments_json((yield from self._source()))
        if arguments is None:
            raise Malformed
        yield from self._space()
        separator = yield from self._match(",", "]")
        if not separator and (yield from self._peek()):
            raise Malformed
        self._start(name)
        self._arguments(arguments)
        return separator != ","

    def _source(self) -> Steps[str]:
        """The arguments up to the parenthesis that closes them, which is consumed too."""
        source: list[str] = []
        depth = 1
        while True:
            character = yield from self._next()
            if character in "\"'":
                source.append((yield from self._string(character, raw="".join(source[-1:]) in ("r", "R"))))
                continue
            depth += (character in "([{") - (character in ")]}")
            if not depth:
                return "".join(source)
            if character == "#":
                raise Malformed
            source.append(character)

    def _string(self, quote: str, *, raw: bool) -> Steps[str]:
        """A Python string from behind its first quote on, with unknown escapes made known ones."""
        triple = yield from self._match(quote * 2, quote)
        if triple == quote:
            return quote * 2
        parts = [quote + triple]
        while True:
            character = yield from self._next()
            if character == "\\":
                parts.append(escape((yield from self._next()), raw=raw))
            elif character == quote and (not triple or (yield from self._match(triple))):
                return "".join(parts) + quote + triple
            elif character == "\n" and not triple:
                raise Malformed
            else:
                parts.append(character)
