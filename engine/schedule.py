"""What the scheduler decides and the planner turns into rows: the work of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Prefill, Sequence


@dataclass(slots=True)
class Chunk:
    """Part of a prefill. starts: sequences that go on from its last row (empty unless it ends the prefill)."""

    prefill: Prefill
    num_tokens: int
    starts: list[Sequence] = field(default_factory=list)
    fork_pages: list[int] = field(default_factory=list)

    @property
    def drawing(self) -> list[Sequence]:
        """Those of them that draw their next token there."""
        return [sequence for sequence in self.starts if sequence.max_tokens > 0]


@dataclass(slots=True)
class Schedule:
    """One step's work. copies: (source, target) pages of earlier forks, due before the step writes anything.

    draft: tokens guessed for a sequence that is alone, to be computed beside its last one.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    draft: tuple[int, ...] = ()

    @property
    def not_drawing(self) -> list[Sequence]:
        """Those that start but are to draw nothing."""
        return [sequence for chunk in self.chunks for sequence in chunk.starts if sequence.max_tokens == 0]
