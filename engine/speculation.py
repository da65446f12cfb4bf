"""Prompt look-up: guess a text's next tokens from an earlier place in it that ends in the same few tokens.

Source: A. Saxena, "Prompt Lookup Decoding", 2023. A guess changes no result, only the time: a step computes the guessed
tokens beside the last one, draws from every row, and keeps what it drew up to the first token that was not foreseen.
Each token is drawn from the logits, and by the random number, that it would have had by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

_NGRAM = 3  # tokens that must agree; two agree by chance too often, four miss the start of a copy
_FIRST_LENGTH = 3
_LONGEST_PAUSE = 64


class Drafter:
    """Guesses for one text, which only grows. It guesses more while it is right, and rests, ever longer, when wrong."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after its latest occurrence stands
        self._num_indexed = _NGRAM  # n-grams that end before this many tokens are in it
        self._length = _FIRST_LENGTH
        self._pause = 0  # steps left without a guess
        self._next_pause = 1

    def draft(self, prompt_ids: Sequence[int], output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow; none where nothing suggests any."""
        text = _Text(prompt_ids, output_ids)
        for end in range(self._num_indexed, len(text)):
            self._next[text[end - _NGRAM : end]] = end
        self._num_indexed = max(self._num_indexed, len(text))
        if self._pause > 0:
            self._pause -= 1
            return ()
        start = self._next.get(text[len(text) - _NGRAM : len(text)]) if len(text) >= _NGRAM else None
        return () if start is None else text[start : min(start + min(limit, self._length), len(text))]

    def learn(self, num_drafted: int, num_accepted: int, longest: int) -> None:
        """How many tokens of the last guess came true. longest: of a guess."""
        if num_accepted == 0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            self._length = _FIRST_LENGTH
            return
        self._next_pause = 1
        if num_accepted == num_drafted:
            self._length = min(2 * self._length + 1, longest)


class _Text:
    """Prompt and output as one sequence, without copying them."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._prompt, self._output = prompt_ids, output_ids

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __getitem__(self, span: slice) -> tuple[int, ...]:
        size = len(self._prompt)
        start, stop = span.start, span.stop
        return (*self._prompt[start:stop], *self._output[max(0, start - size) : max(0, stop - size)])
