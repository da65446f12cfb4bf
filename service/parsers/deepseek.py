# ruff: noqa: RUF001, RUF002 (the bars in these markers are not ASCII)
"""DeepSeek, between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>:

V3 and R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, newline, arguments in a ```json fence<｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

from service.parsers.base import Malformed, Steps
from service.parsers.tool_parser import ToolParser

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekParser(ToolParser):
    openers = (_CALLS_BEGIN, _CALL_BEGIN)
    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

    def _call(self, opener: str) -> Steps[None]:
        """One call, and the end of all of them if that is what follows; the beginning of the next is an opener."""
        if opener == _CALLS_BEGIN:
            yield from self._space()
            yield from self._literal(_CALL_BEGIN)
        head = yield from self._head()
        yield from self._space()
        if (yield from self._peek()) == "{":
            if head not in self._tools:
                self._reject()
            yield from self._json_arguments(head)
        else:
            yield from self._fenced(head)
        yield from self._closing(_CALL_END)
        yield from self._closing(_CALLS_END)

    def _head(self) -> Steps[str]:
        """The name in V3.1, the kind of call (always `function`) before it."""
        head = ""
        words = (*self._tools, "function")
        yield from self._space()
        while not (yield from self._match(_SEPARATOR)):
            head += yield from self._next()
            if not any(word.startswith(head.rstrip()) for word in words):
                self._reject()
            if "\n" in head:
                raise Malformed
        return head.rstrip()

    def _fenced(self, kind: str) -> Steps[None]:
        if kind != "function":
            raise Malformed
        name = yield from self._name("")
        yield from self._space()
        yield from self._literal("```json")
        yield from self._space()
        yield from self._json_arguments(name)
        yield from self._closing("```")
