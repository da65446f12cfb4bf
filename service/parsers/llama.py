"""Llama 3 and 4: {"name": ..., "parameters": {...}}, with `<|python_tag|>` before it or not; several separated by `;`.

Without the tag an object is a call only at the start of the text or a line, and with no other keys than a call's.
"""

from __future__ import annotations

from service.parsers.base import Steps
from service.parsers.json_calls import JsonToolParser


class LlamaJsonParser(JsonToolParser):
    openers = ("{", "<|python_tag|>", "<|python_start|>")
    markers = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

    def _may_begin(self, opener: str) -> bool:
        return opener != "{" or self._at_line_start

    def _call(self, opener: str) -> Steps[None]:
        announced = opener != "{"
        if announced:
            yield from self._space()
            yield from self._literal("{")
        while True:
            yield from self._call_object(announced=announced)
            if self._rejected:
                return
            self._hold()
            yield from self._space()
            separator = yield from self._match(";", "<|python_end|>")
            if separator != ";":
                break
            yield from self._space()
            yield from self._literal("{")
        if separator:
            self._held.clear()
