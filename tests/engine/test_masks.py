"""Masks in the sampler: only what is allowed is drawn, and rows without a mask are drawn as if there were none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.plan import SamplingRow
from engine.sampler import sample

VOCAB_SIZE = 75


def mask_of(*token_ids: int) -> NDArray[np.uint32]:
    words = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def row(seed: int, allowed: NDArray[np.uint32] | None = None, logits_row: int = 0, **options: object) -> SamplingRow:
    params = SamplingParams(seed=seed, **options)  # type: ignore[arg-type]
    return SamplingRow(logits_row, 5, params, [1], [2, 3], allowed=allowed)


def logits(num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.9}])
@pytest.mark.parametrize("allowed", [(0,), (31, 32), (74,), (5, 40, 63, 64)])
def test_only_allowed_tokens_are_drawn(allowed: tuple[int, ...], options: dict[str, float]) -> None:
    rows = [row(seed, mask_of(*allowed), **options) for seed in range(40)]
    drawn = {token.token_id for token in sample(logits(), rows)}
    assert drawn <= set(allowed)
    if options.get("temperature") == 3.0:
        assert drawn == set(allowed)


def test_the_mask_holds_against_bias_and_penalties() -> None:
    options = {"logit_bias": ((7, 100.0), (9, -100.0)), "repetition_penalty": 0.5, "presence_penalty": -2.0}
    assert [t.token_id for t in sample(logits(), [row(seed, mask_of(9), **options) for seed in range(5)])] == [9] * 5


def test_rows_without_a_mask_are_drawn_as_if_there_were_none() -> None:
    plain = [row(seed, logits_row=seed % 3, top_p=0.8) for seed in range(12)]
    mixed = [row(seed, mask_of(3) if seed % 2 else None, seed % 3, top_p=0.8) for seed in range(12)]
    alone, together = sample(logits(3), plain), sample(logits(3), mixed)
    assert together[::2] == alone[::2]
    assert [token.token_id for token in together[1::2]] == [3] * 6


def test_logprobs_are_those_of_the_model_and_finite() -> None:
    [masked] = sample(logits(), [row(1, mask_of(3), logprobs=75)])
    [free] = sample(logits(), [row(1, logprobs=75)])
    assert masked.logprobs is not None and free.logprobs is not None
    assert masked.logprobs.top == free.logprobs.top
    assert all(math.isfinite(logprob) for _, logprob in masked.logprobs.top)
    assert masked.logprobs.logprob == dict(free.logprobs.top)[3]


def test_nothing_allowed_fails_its_row_alone() -> None:
    hopeless = torch.cat([logits(), torch.full((1, VOCAB_SIZE), math.nan)])
    hopeless[0, 4] = -math.inf
    rows = [row(0, mask_of()), row(1, mask_of(6)), row(2, mask_of(4)), row(3), row(4, mask_of(6), logits_row=1)]
    tokens = [token.token_id for token in sample(hopeless, rows)]
    assert tokens[:3] == [-1, 6, -1] and tokens[3] >= 0 and tokens[4] == -1
