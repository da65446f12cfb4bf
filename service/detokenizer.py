"""Tokens of one choice to text, piece by piece: no half characters, and never a character of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The pieces of `feed` concatenate to the decoded whole. Bytes of a character that never comes are not text.

    continues: the text goes on from the prompt's, so that a space at its start is part of it (completions). hides: the
    tokens that are no text, special ones if not said otherwise.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool, hides: Callable[[int], bool] | None = None) -> None:
        self._tokenizer = tokenizer
        self._hides = hides or tokenizer.is_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_leading_space and not continues

    def feed(self, token_id: int) -> str:
        """The text that this token completes; U+FFFD stands for bytes that no continuation makes valid."""
        if self._hides(token_id):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text

    @property
    def is_inside_character(self) -> bool:
        """Whether bytes of a character wait for the rest of it."""
        return bool(self._decoder.getstate()[0])


class StopStrings:
    """The stop strings of a request as one automaton (Aho-Corasick), so that a character costs the same however many
    there are and however long. A state stands for the longest end of the text that begins some stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]
        self.matches: list[str | None] = [None]
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._edges[state]:
            state = self._fallbacks[state]
        return self._edges[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._edges[state]:
                self._edges[state][character] = len(self._edges)
                self._edges.append({})
                self._fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = self._edges[state][character]
        self.matches[state] = stop

    def _link(self) -> None:
        states = deque(self._edges[0].values())
        while states:
            state = states.popleft()
            for character, child in self._edges[state].items():
                fallback = self.step(self._fallbacks[state], character)
                self._fallbacks[child] = fallback
                self.matches[child] = self.matches[child] or self.matches[fallback]
                states.append(child)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """text: what comes before the match and was not emitted yet."""

    text: str
    stop: str


class StopMatcher:
    """Cuts one choice's text at the first stop string to be completed (of several, the one that began earliest).

    Holds back only what may still become a stop string. The result is the same however the text is cut into pieces.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """The text that is safe to emit, or how it ends; nothing may be fed after that."""
        for position, character in enumerate(text, start=1):
            self._state = self._stops.step(self._state, character)
            if (stop := self._stops.matches[self._state]) is not None:
                return StopMatch((self._held + text[:position]).removesuffix(stop), stop)
        text = self._held + text
        end = len(text) - self._stops.depths[self._state]
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
