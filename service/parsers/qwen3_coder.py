"""Qwen 3 Coder: <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>.

A value is the text between one newline and another. By the tool's schema it becomes JSON: whether `5` is a number
depends on what the parameter may be. One that may be nothing but a string, or that the schema does not know, is sent
as it comes; others when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable

from service.parsers.base import WHITESPACE, Malformed, Steps
from service.parsers.json_text import json_type, json_value, to_json
from service.parsers.schema_types import parameter_types
from service.parsers.tool_parser import ToolParser

_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # templates show the model Python's spelling


class Qwen3CoderParser(ToolParser):
    openers = ("<tool_call>", "<function=")  # some outputs lack the first
    markers = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")

    def _call(self, opener: str) -> Steps[None]:
        if opener == "<tool_call>":
            yield from self._space()
            yield from self._literal("<function=")
        name = yield from self._name(">")
        yield from self._literal(">")
        before = "{"
        while (tag := (yield from self._tag())) == "<parameter=":
            yield from self._parameter(name, before)
            before = ", "
        self._send(name, before, "{}" if before == "{" else "}")
        if tag == "</function>":
            yield from self._closing("</tool_call>")

    def _tag(self) -> Steps[str]:
        if not self._rejected:
            self._hold()
        yield from self._space()
        tag = yield from self._match("<parameter=", "</function>", "</tool_call>")
        if not tag:
            raise Malformed
        return tag

    def _parameter(self, name: str, before: str) -> Steps[None]:
        key = yield from self._key()
        if (yield from self._peek()) == "\n":
            self._take(1)
        types: frozenset[str] = frozenset() if self._rejected else parameter_types(self._tools[name].parameters, key)
        if types <= {"string"}:
            self._send(name, before, f'{before}{to_json(key)}: "')
            yield from self._value(lambda text: self._send(name, ", ", to_json(text)[1:-1]))
            self._send(name, ", ", '"')
        else:
            parts: list[str] = []
            yield from self._value(parts.append)
            self._send(name, before, f"{before}{to_json(key)}: {_typed(''.join(parts), types)}")

    def _send(self, name: str, before: str, fragment: str) -> None:
        """before: "{" with the first fragment of a call, which begins it."""
        if self._rejected:
            return
        if before == "{":
            self._start(name)
        self._belongs()
        self._arguments(fragment)

    def _key(self) -> Steps[str]:
        key = ""
        while (character := (yield from self._next())) != ">":
            if character in "<\n":
                raise Malformed
            key += character
        return key

    def _value(self, sink: Callable[[str], None]) -> Steps[None]:
        def pass_on(text: str) -> None:
            self._consumed(text)
            sink(text)

        end = yield from self._upto(_VALUE_ENDS, pass_on)
        if not end:
            raise Malformed
        self._consumed(end)


def _typed(text: str, types: frozenset[str]) -> str:
    """The text as JSON of one of the types; as a string where it is none of them."""
    word = text.strip(WHITESPACE)
    value = json_value(_PYTHON_WORDS.get(word, word))
    return value if value and json_type(value) in types else to_json(text)
