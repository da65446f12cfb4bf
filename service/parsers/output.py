"""Reasoning first, then calls: one choice's text through both parsers, or one, or none."""

from __future__ import annotations

from service.parsers.pieces import ContentDelta, Piece, merge
from service.parsers.reasoning import ReasoningParser
from service.parsers.tool_parser import ToolParser


class OutputParser:
    """One per choice. What stands in the reasoning is never a call."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        """All text is content, and comes out at once."""
        return self._reasoning is None and self._tools is None

    @property
    def num_held(self) -> int:
        """Characters of the text that have not come out as anything yet, and may."""
        return sum(parser.num_held for parser in (self._reasoning, self._tools) if parser is not None)

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    def feed(self, text: str) -> list[Piece]:
        """See StreamParser.feed."""
        return merge(self._calls(self._reasoning.feed(text) if self._reasoning else _content(text)))

    def finish(self) -> list[Piece]:
        """See StreamParser.finish."""
        pieces = self._calls(self._reasoning.finish() if self._reasoning else [])
        return merge(pieces + (self._tools.finish() if self._tools else []))

    def _calls(self, pieces: list[Piece]) -> list[Piece]:
        if not self._tools:
            return pieces
        parsed: list[Piece] = []
        for piece in pieces:
            parsed += self._tools.feed(piece.text) if isinstance(piece, ContentDelta) else [piece]
        return parsed


def _content(text: str) -> list[Piece]:
    return [ContentDelta(text)] if text else []
