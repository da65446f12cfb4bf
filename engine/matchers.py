"""Where one choice stands in its constraint: what every kind of matcher can do, and those that need no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""A set of tokens: bit t % 32 of word t // 32."""

MAX_WORDS_BYTES = 4096


class Matcher(Protocol):
    """It belongs to one thread at a time.

    is_open: its text is never complete, so that the end of sequence is a token like any other to it. error: why nothing
    may follow although the text is not complete; None while something may.
    """

    is_open: bool
    error: str | None

    def fork(self) -> Matcher: ...

    def allowed(self) -> Mask:
        """The tokens that may come next; it stays as it is until `accept`. None is where `error` says why."""
        ...

    def forced(self) -> int | None:
        """The token that comes next whatever the model says, where there is but one and the text comes to an end."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that is not allowed."""
        ...


def only_one(mask: Mask) -> int | None:
    """The single token of a set, None for a set of more or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def has(mask: Mask, token_id: int) -> bool:
    return bool(int(mask[token_id >> 5]) >> (token_id & 31) & 1)


class TokenSetMatcher:
    """The same tokens at every place."""

    is_open = True
    error: str | None = None

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._mask = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in token_ids:
            self._mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def fork(self) -> TokenSetMatcher:
        return self  # it has no place of its own

    def allowed(self) -> Mask:
        return self._mask

    def forced(self) -> None:
        return None

    def accept(self, token_id: int) -> bool:
        return has(self._mask, token_id)


class TokenBytes:
    """The bytes of a vocabulary, laid out for numpy. Special tokens have none: they are no text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.flat = np.frombuffer(b"".join(tokens) + b"\0", np.uint8)
        self.lengths = np.array([len(token) for token in tokens], np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.firsts = np.where(self.lengths > 0, self.flat[self.starts], -1)
        self.size = len(tokens)

    def of(self, token_id: int) -> NDArray[np.uint8]:
        return self.flat[self.starts[token_id] : self.starts[token_id] + self.lengths[token_id]]


class WordAutomaton:
    """Aho and Corasick's, over bytes: which tokens would complete a word, by how much of one the text ends in.

    Shared by the choices of a request. What a state forbids is worked out when it is first met.
    """

    def __init__(self, words: Sequence[bytes], tokens: TokenBytes) -> None:
        self._tokens = tokens
        size = sum(map(len, words)) + 1
        self.next = np.zeros((size, 256), np.int32)
        self.ends = np.zeros(size, bool)
        self._build(words)
        self._root_hits = self._hits(0, np.arange(tokens.size))
        self._masks: dict[int, Mask] = {}

    def _build(self, words: Sequence[bytes]) -> None:
        edges: list[dict[int, int]] = [{}]
        for word in words:
            state = 0
            for byte in word:
                if byte not in edges[state]:
                    edges[state][byte] = len(edges)
                    edges.append({})
                state = edges[state][byte]
            self.ends[state] = True
        queue, fallback = [0], [0] * len(edges)
        for state in queue:  # shorter ones first: what a state falls back to is complete
            for byte, child in edges[state].items():
                fallback[child] = int(self.next[fallback[state], byte]) if state else 0
                queue.append(child)
            self.next[state] = self.next[fallback[state]] if state else 0
            self.ends[state] |= self.ends[fallback[state]]
            for byte, child in edges[state].items():
                self.next[state, byte] = child

    def _hits(self, state: int, token_ids: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of the tokens complete a word when they follow on `state`."""
        tokens = self._tokens
        states = np.full(len(token_ids), state, np.int32)
        hits = np.zeros(len(token_ids), bool)
        active = np.flatnonzero(tokens.lengths[token_ids] > 0)
        place = 0
        while active.size:
            ids = token_ids[active]
            states[active] = self.next[states[active], tokens.flat[tokens.starts[ids] + place]]
            hits[active] |= self.ends[states[active]]
            place += 1
            active = active[tokens.lengths[token_ids[active]] > place]
        return hits

    def allowed(self, state: int) -> Mask:
        if state not in self._masks:
            hits = self._root_hits.copy()
            # only tokens that begin with what the state goes on with can do other than at the root
            going_on = np.flatnonzero(self.next[state] != self.next[0])
            token_ids = np.flatnonzero(np.isin(self._tokens.firsts, going_on))
            hits[token_ids] = self._hits(state, token_ids)
            bits = np.zeros(-(-hits.size // 32) * 32, bool)
            bits[: hits.size] = ~hits
            self._masks[state] = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._masks[state]

    def walk(self, state: int, token_id: int) -> int:
        for byte in self._tokens.of(token_id):
            state = int(self.next[state, byte])
        return state


class WordMatcher:
    """How much of a forbidden word the text ends in."""

    is_open = True
    error: str | None = None

    def __init__(self, automaton: WordAutomaton, state: int = 0) -> None:
        self._automaton = automaton
        self._state = state

    def fork(self) -> WordMatcher:
        return WordMatcher(self._automaton, self._state)

    def allowed(self) -> Mask:
        return self._automaton.allowed(self._state)

    def forced(self) -> None:
        return None

    def accept(self, token_id: int) -> bool:
        if not has(self.allowed(), token_id):
            return False
        self._state = self._automaton.walk(self._state, token_id)
        return True
