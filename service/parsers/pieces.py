"""What parsers make of a choice's text: typed pieces in the order of the text, and the message that they fold into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """index: 0, 1, ... over the calls of one choice."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The fragments of one index concatenate to the JSON text of the call's arguments, an object; to a beginning of it
    where the output ends, or stops being JSON, inside them.
    """

    index: int
    json_fragment: str


Piece = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """content and reasoning: "" where there is none."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbouring deltas of one kind as one: equal lists for equal text, however it was cut."""
    pieces = list(pieces)
    if len(pieces) < 2:
        return pieces
    merged: list[Piece] = []
    for (kind, index), group in groupby(pieces, key=lambda piece: (type(piece), getattr(piece, "index", 0))):
        if kind is ContentDelta:
            merged.append(ContentDelta("".join(piece.text for piece in group if isinstance(piece, ContentDelta))))
        elif kind is ReasoningDelta:
            merged.append(ReasoningDelta("".join(piece.text for piece in group if isinstance(piece, ReasoningDelta))))
        elif kind is ToolCallArguments:
            fragments = (piece.json_fragment for piece in group if isinstance(piece, ToolCallArguments))
            merged.append(ToolCallArguments(index, "".join(fragments)))
        else:
            merged.extend(group)
    return merged


def fold(pieces: Iterable[Piece]) -> Message:
    """The message that is not streamed."""
    content, reasoning = [], []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        match piece:
            case ContentDelta():
                content.append(piece.text)
            case ReasoningDelta():
                reasoning.append(piece.text)
            case ToolCallStart():
                starts.append(piece)
                arguments.append([])
            case ToolCallArguments():
                arguments[piece.index].append(piece.json_fragment)
    calls = (
        ToolCall(start.id, start.name, "".join(fragments)) for start, fragments in zip(starts, arguments, strict=True)
    )
    return Message("".join(content), "".join(reasoning), tuple(calls))
