"""Log probabilities on their way to the client: each waits for the end of its token's text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import TextLogprobs, TokenLogprobs
from service.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""OpenAI's number for "very unlikely"; JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token as the client sees it. token: its exact bytes. logprob: None for a prompt's first token, which nothing
    precedes. top: the likeliest tokens in its place, best first. offset: characters of the text before it.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class TokenEntries:
    """Those of one choice, in order, each handed out once, when as much of the text is out as its token reaches into.

    Tokens without visible text (a stop string's, the end of sequence) have entries like any other, at the text's end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[tuple[int, int, TokenLogprobs | TextLogprobs]] = deque()

    def add(self, entry: TokenLogprobs | TextLogprobs, start: int, end: int) -> None:
        """start, end: where its text begins and ends, in characters; one that is not complete counts."""
        self._waiting.append((start, end, entry))

    def take(self, num_out: int) -> tuple[TokenEntry, ...]:
        """What the first num_out characters of the text complete."""
        taken = []
        while self._waiting and self._waiting[0][1] <= num_out:
            start, _, entry = self._waiting.popleft()
            taken.append(entry_of(entry, start, self._tokenizer))
        return tuple(taken)

    def take_all(self, length: int) -> tuple[TokenEntry, ...]:
        """The rest, now that the text has ended with `length` characters."""
        taken = tuple(entry_of(entry, min(start, length), self._tokenizer) for start, _, entry in self._waiting)
        self._waiting.clear()
        return taken


def prompt_entries(
    token_ids: Sequence[int], told: Sequence[TokenLogprobs | None], offsets: Sequence[int], tokenizer: Tokenizer
) -> list[TokenEntry]:
    """told: of each token but the first; fewer where the prompt was not computed to its end."""
    entries = []
    for number, (token_id, offset) in enumerate(zip(token_ids, offsets, strict=True)):
        known = told[number - 1] if 0 < number <= len(told) else None
        if known is None:
            entries.append(TokenEntry(tokenizer.token_bytes(token_id), None, (), offset))
        else:
            entries.append(entry_of(known, offset, tokenizer))
    return entries


def entry_of(entry: TokenLogprobs | TextLogprobs, offset: int, tokenizer: Tokenizer) -> TokenEntry:
    if isinstance(entry, TextLogprobs):
        best = tuple((token, bounded(logprob)) for token, logprob in entry.top)
        return TokenEntry(entry.token, bounded(entry.logprob), best, offset)
    top = tuple((tokenizer.token_bytes(token_id), bounded(logprob)) for token_id, logprob in entry.top)
    return TokenEntry(tokenizer.token_bytes(entry.token_id), bounded(entry.logprob), top, offset)


def bounded(logprob: float) -> float:
    """Rounding may lift the certain token above 0."""
    return min(0.0, max(LEAST_LOGPROB, logprob))
