"""Recorded-style outputs, each read in every way it can be cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from service.parsers import (
    ContentDelta,
    Piece,
    ReasoningDelta,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    fold,
    merge,
)

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
        },
    ),
    Tool("get", {"type": "object", "properties": {"url": {"type": "string"}}}),
    Tool("now", {"type": "object", "properties": {}}),
    Tool(
        "write_file",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "append": {"type": "boolean"},
                "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "lines": {"type": "array"},
                "ratio": {"type": "number"},
                "place": {"$ref": "#/$defs/Place"},
                "either": {"type": ["string", "integer"]},
                "level": {"enum": [1, 2, 3]},
            },
            "$defs": {"Place": {"type": "object"}},
        },
    ),
)


@dataclass(frozen=True)
class Call:
    """complete: whether the arguments are JSON to their end."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Recorded:
    """expected: in order; a string is content."""

    name: str
    text: str
    expected: Sequence[str | Call | Thought]

    def __str__(self) -> str:
        return self.name

    @property
    def pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        num_calls = 0
        for item in self.expected:
            if isinstance(item, str):
                pieces.append(ContentDelta(item))
            elif isinstance(item, Thought):
                pieces.append(ReasoningDelta(item.text))
            else:
                pieces.append(ToolCallStart(num_calls, f"call_{num_calls}", item.name))
                if item.arguments:
                    pieces.append(ToolCallArguments(num_calls, item.arguments))
                num_calls += 1
        return pieces


class Parser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


def counting_ids() -> Callable[[], str]:
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


def read(parser: Parser, cuts: Iterable[str]) -> list[Piece]:
    pieces = [piece for text in cuts for piece in parser.feed(text)]
    return merge(pieces + parser.finish())


def every_cut(text: str, num_random: int = 12) -> Iterable[list[str]]:
    """The whole, two pieces at every place, single characters, and `num_random` ways in between."""
    yield [text]
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))
    yield list(text)
    yield from random_cuts(text, num_random, random.Random(text))


def random_cuts(text: str, count: int, draw: random.Random) -> Iterable[list[str]]:
    for _ in range(count):
        places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(1, 12))))
        yield [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def check(make: Callable[[], Parser], recorded: Recorded) -> None:
    for cuts in every_cut(recorded.text):
        assert read(make(), cuts) == recorded.pieces, cuts
    message = fold(recorded.pieces)
    calls = [item for item in recorded.expected if isinstance(item, Call)]
    for call, expected in zip(message.tool_calls, calls, strict=True):
        assert is_json_object(call.arguments) == expected.complete


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=lambda word: None), dict)
    except ValueError:
        return False
