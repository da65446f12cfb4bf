"""What a benchmark run says, from the times at which tokens arrived. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


class BenchError(Exception):
    """The server refused a request or broke a stream."""


@dataclass(slots=True)
class RequestTimes:
    """One streamed request, in seconds on one clock.

    started, ended: of the whole request. arrivals: choice index -> when each of its chunks with text arrived.
    num_tokens: completion tokens over all choices, as the server counts them.
    """

    started: float
    ended: float = 0.0
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def first_token(self) -> float:
        """Seconds to the first text of any choice; infinite if none came."""
        return min((times[0] for times in self.arrivals.values()), default=float("inf")) - self.started

    @property
    def all_started(self) -> float:
        """Seconds until every choice had begun."""
        return max((times[0] for times in self.arrivals.values()), default=float("inf")) - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks of one choice."""
        return [later - earlier for t in self.arrivals.values() for earlier, later in pairwise(t)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the repeats of a scenario. Times in seconds; gap_p99 over all gaps of all repeats."""

    wall: float
    wall_min: float
    wall_max: float
    tokens_per_second: float
    first_token: float
    all_started: float
    gap_median: float
    gap_p99: float
    prompt_tokens: int


def summarise(repeats: Sequence[Sequence[RequestTimes]]) -> Summary:
    """repeats: one entry per repeat, the requests that ran at the same time in it. Raises ValueError when empty."""
    if not repeats or not all(repeats):
        raise ValueError("nothing was measured")
    walls = [max(r.ended for r in group) - min(r.started for r in group) for group in repeats]
    rates = [sum(r.num_tokens for r in group) / wall for group, wall in zip(repeats, walls, strict=True)]
    requests = [request for group in repeats for request in group]
    gaps = [gap for request in requests for gap in request.gaps]
    return Summary(
        wall=statistics.median(walls),
        wall_min=min(walls),
        wall_max=max(walls),
        tokens_per_second=statistics.median(rates),
        first_token=statistics.median(r.first_token for r in requests),
        all_started=statistics.median(r.all_started for r in requests),
        gap_median=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
        prompt_tokens=requests[0].prompt_tokens,
    )


@dataclass(slots=True)
class StreamTally:
    """One streamed answer as bytes. arrivals: when each read returned some. num_events: server-sent ones."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    num_events: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of answers that ran at the same time, from the first request sent to the last byte read.

    gap_*: seconds between two reads of one answer, over all of them. tokens_per_read: how much comes at once.
    """

    streams: int
    tokens: int
    wall: float
    tokens_per_second: float
    tokens_per_read: float
    gap_median: float
    gap_max: float


def throughput(tallies: Sequence[StreamTally]) -> Throughput:
    """Raises ValueError when empty."""
    if not tallies:
        raise ValueError("nothing was measured")
    wall = max(tally.ended for tally in tallies) - min(tally.started for tally in tallies)
    tokens = sum(tally.num_tokens for tally in tallies)
    gaps = [later - earlier for tally in tallies for earlier, later in pairwise(tally.arrivals)]
    return Throughput(
        streams=len(tallies),
        tokens=tokens,
        wall=wall,
        tokens_per_second=tokens / wall,
        tokens_per_read=tokens / sum(len(tally.arrivals) for tally in tallies),
        gap_median=quantile(gaps, 0.5),
        gap_max=max(gaps, default=0.0),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share q of the values lies (nearest rank); 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def ratios(ours: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, float]]:
    """Per scenario: the best other server, and our seconds over its (below 1 we are faster)."""
    result = {}
    for scenario, seconds in ours.items():
        rivals = {label: figures[scenario] for label, figures in others.items() if scenario in figures}
        if rivals:
            best = min(rivals, key=lambda label: rivals[label])
            result[scenario] = (best, seconds / rivals[best])
    return result
