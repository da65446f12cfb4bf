"""What one engine step computes: the only thing that scheduler and model runners exchange. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams, TokenLogprobs

PAGE_SIZE = 32
"""Tokens a KV page holds; a page starts at an absolute position that is a multiple of it."""

KEY_TILE = 256
"""Partial attention results cover tiles of this many absolute positions and merge in ascending order."""


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Keys that a run of rows attends to.

    Rows first_row .. first_row + num_rows - 1 see the keys at absolute positions base .. base + num_keys - 1, of which
    pages[i] holds base + 32 * i onwards. causal: a row sees no key beyond its own position; else all num_keys keys.
    base is a multiple of KEY_TILE; a segment that several sequences share also has num_keys a multiple of KEY_TILE.
    The segments of one row are disjoint, cover 0 .. its own position, and stand in ascending order of base in the plan.
    """

    first_row: int
    num_rows: int
    base: int
    num_keys: int
    pages: Sequence[int]
    causal: bool


@dataclass(slots=True)
class SamplingRow:
    """One token to draw from logits row `logits_row` (an index into StepPlan.logit_rows; several may share one).

    position: absolute position of the token to be drawn; with params.seed it determines the random number.
    prompt_ids, output_ids: what penalties look at (live lists; the runner only reads them, within the step).
    blocked_ids: tokens whose logits count as -inf now (stop tokens before min_tokens).
    allowed: [ceil(V / 32)] bit mask of the tokens that may be drawn (bit t % 32 of word t // 32), None for all. It does
    not change within the step. Where no bit is set, no token is to be drawn: -1.
    """

    logits_row: int
    position: int
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    blocked_ids: Sequence[int] = ()
    allowed: NDArray[np.uint32] | None = None


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a flat batch of T rows (prefill chunks and decode rows together), then sampling.

    token_ids, positions: T entries. slots: where row t writes its keys and values, page * PAGE_SIZE + offset with
    offset == positions[t] % PAGE_SIZE. copies: (source page, target page), done before anything is written.
    logit_rows: the rows of the batch whose logits are wanted, ascending.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    segments: list[AttentionSegment] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    sampling_rows: list[SamplingRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """token_id is -1 when the row's logits held no finite maximum, or none that is allowed (that choice fails, the
    others go on).
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


class ModelRunner(Protocol):
    """Executes plans on one device. Not thread-safe: one engine thread owns it.

    num_pages: pages in the pool. name: for people, such as "native avx512_bf16" or "torch cpu float32".
    """

    name: str
    bitwise: bool
    num_pages: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    model_path: str | None

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """One token per sampling row, in order. An exception means that nothing of the plan may be relied on."""
        ...
