"""The machine under every parser: a coroutine that reads characters.

A parser is written as if the whole text were there; where it is not, the coroutine is suspended until more comes. It
never sees where the text was cut, so that pieces of any size give the same result as the whole.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import cache
from typing import ClassVar, TypeVar

from service.parsers.pieces import Piece, merge

T = TypeVar("T")
Steps = Generator[None, None, T]

WHITESPACE = " \t\r\n"


class Malformed(Exception):
    """The text does not go on as the grammar wants; the character at fault has not been consumed."""


class StreamParser(ABC):
    """Text of one choice in, pieces out.

    markers: spellings that mean something to the parser; where the vocabulary has them as special tokens they must
    reach it as text all the same.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._out: list[Piece] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; held back is only what may still become something else."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Piece]:
        """What was held back, now that no more text comes. Once; nothing may be fed after it."""
        self._ended = True
        return self._advance()

    @property
    def num_held(self) -> int:
        """Characters that were fed and may still come out."""
        return len(self._text) - self._at + self._num_consumed_held()

    def _num_consumed_held(self) -> int:
        return 0

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        out, self._out = self._out, []
        return merge(out)

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads to the end of the text."""

    @abstractmethod
    def _consumed(self, text: str) -> None:
        """Called with all that the reading methods below (`_upto` has its sink) move past."""

    def _take(self, count: int) -> None:
        start, self._at = self._at, self._at + count
        self._consumed(self._text[start : self._at])

    def _peek(self) -> Steps[str]:
        """The next character, not consumed; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _next(self) -> Steps[str]:
        """The next character; raises Malformed at the end."""
        character = yield from self._peek()
        if not character:
            raise Malformed
        self._take(1)
        return character

    def _space(self) -> Steps[None]:
        while (character := (yield from self._peek())) and character in WHITESPACE:
            self._take(1)

    def _match(self, *literals: str) -> Steps[str]:
        """Consume the first of `literals` that the text goes on with; "" and nothing consumed if it is none of them."""
        while True:
            for literal in literals:
                ahead = self._text[self._at : self._at + len(literal)]
                if ahead == literal:
                    self._take(len(literal))
                    return literal
                if not self._ended and literal.startswith(ahead) and self._at + len(ahead) == len(self._text):
                    break
            else:
                return ""
            yield

    def _literal(self, literal: str) -> Steps[None]:
        if not (yield from self._match(literal)):
            raise Malformed

    def _upto(self, markers: tuple[str, ...], sink: Callable[[str], None]) -> Steps[str]:
        """Pass text to `sink` up to the first of `markers`, which is consumed and returned; "" at the end.

        No marker may be inside another, but at its end.
        """
        while True:
            found = _pattern(markers).search(self._text, self._at)
            end = found.start() if found else len(self._text) - self._held_length(markers)
            if end > self._at:
                sink(self._text[self._at : end])
            self._at = found.end() if found else end
            if found:
                return found.group()
            if self._ended:
                return ""
            yield

    def _held_length(self, markers: tuple[str, ...]) -> int:
        """Of the text's end, how many characters may begin a marker."""
        if self._ended:
            return 0
        longest = max((len(marker) - 1 for marker in markers), default=0)
        for start in range(max(self._at, len(self._text) - longest), len(self._text)):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return len(self._text) - start
        return 0


@cache
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")
