"""What an engine counts about its steps. Its own thread writes, anybody reads at any time and without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds for what takes about a step."""

POWERS_OF_TWO = tuple(float(2**k) for k in range(11))


class Histogram:
    """Counts by upper bounds, which are inclusive; the last count is of all that is beyond."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """other: with the same bounds."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, how many were not above it), to infinity; one consistent reading of the counts."""
        counts, total, rows = list(self._counts), 0, []
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms with the same bounds; at least one."""
    first, *others = histograms
    total = Histogram(first.bounds)
    for histogram in (first, *others):
        total.add(histogram)
    return total


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _sizes() -> Histogram:
    return Histogram(POWERS_OF_TWO)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """step_seconds: of each step. step_tokens: rows that it computed. batch_size: choices that it drew a token for.

    inter_token_seconds: from one step to the next, once for each choice that goes on from a token of its own: what a
    reader who keeps pace waits for it. embedding_batch_size: inputs that were embedded at once.
    """

    step_seconds: Histogram = field(default_factory=_seconds)
    inter_token_seconds: Histogram = field(default_factory=_seconds)
    batch_size: Histogram = field(default_factory=_sizes)
    embedding_batch_size: Histogram = field(default_factory=_sizes)
    step_tokens: Histogram = field(default_factory=lambda: Histogram([*POWERS_OF_TWO, 2048.0, 4096.0, 8192.0]))

    def record_step(
        self, seconds: float, num_rows: int, num_drawn: int, num_decodes: int, since_last_step: float
    ) -> None:
        """num_decodes: choices that had a token already. since_last_step: from the last one's end to this one's."""
        self.step_seconds.observe(seconds)
        self.step_tokens.observe(num_rows)
        self.batch_size.observe(num_drawn)
        if num_decodes:
            self.inter_token_seconds.observe(since_last_step, num_decodes)
