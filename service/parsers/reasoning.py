"""Reasoning before the answer: <think>...</think>, [THINK]...[/THINK].

The block is the first thing of the text, or none; a tag anywhere else is text. Whitespace next to a tag is dropped.
"""

from __future__ import annotations

from typing import ClassVar

from service.parsers.base import WHITESPACE, Steps, StreamParser
from service.parsers.pieces import ContentDelta, ReasoningDelta


class ReasoningParser(StreamParser):
    """starts_inside: the template has opened the block already (`opened_by` tells). What follows it is content.

    is_inside: whether the text is inside the block now.
    """

    opening: ClassVar[str]
    closing: ClassVar[str]

    def __init__(self, *, starts_inside: bool = False) -> None:
        super().__init__()
        self._starts_inside = starts_inside
        self.is_inside = starts_inside
        self._leading: list[str] = []
        self._pending: list[str] = []  # whitespace that the closing tag may follow

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether the rendered prompt ends inside an empty block."""
        return prompt.rstrip(WHITESPACE).endswith(cls.opening)

    @classmethod
    def left_open_by(cls, answer: str) -> bool:
        """Whether an answer that is to be continued ends inside its block."""
        return answer.lstrip(WHITESPACE).startswith(cls.opening) and cls.closing not in answer

    def _consumed(self, text: str) -> None:
        self._leading.append(text)

    def _num_consumed_held(self) -> int:
        return sum(map(len, (*self._leading, *self._pending)))

    def _run(self) -> Steps[None]:
        yield from self._space()
        opened = yield from self._match(self.opening)
        if not opened and not self._starts_inside:
            self._content("".join(self._leading))
        else:
            self.is_inside = True
            yield from self._space()
            self._leading.clear()
            if (yield from self._upto((self.closing,), self._reasoning)):
                self.is_inside = False
                yield from self._space()
            elif self._pending:
                self._out.append(ReasoningDelta("".join(self._pending)))
            self._pending.clear()
        self._leading.clear()
        yield from self._upto((), self._content)

    def _content(self, text: str) -> None:
        if text:
            self._out.append(ContentDelta(text))

    def _reasoning(self, text: str) -> None:
        body = text.rstrip(WHITESPACE)
        if body:
            self._out.append(ReasoningDelta("".join(self._pending) + body))
            self._pending.clear()
        if len(body) < len(text):
            self._pending.append(text[len(body) :])


class ThinkParser(ReasoningParser):
    """Qwen 3, DeepSeek R1 and most others."""

    opening, closing = "<think>", "</think>"
    markers = (opening, closing)


class MistralThinkParser(ReasoningParser):
    """Magistral."""

    opening, closing = "[THINK]", "[/THINK]"
    markers = (opening, closing)
