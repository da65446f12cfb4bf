"""Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call."""

from __future__ import annotations

from service.parsers.base import Steps
from service.parsers.json_calls import JsonToolParser


class HermesParser(JsonToolParser):
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def _call(self, opener: str) -> Steps[None]:
        yield from self._space()
        yield from self._literal("{")
        yield from self._call_object(announced=True)
        yield from self._closing("</tool_call>")
