"""The batched sampler against plain references, and its independence of batch company."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import SamplingParams
from engine.plan import SamplingRow
from engine.sampler import sample, uniforms


def row_of(params: SamplingParams, position: int = 5, logits_row: int = 0, **fields: object) -> SamplingRow:
    return SamplingRow(
        logits_row, position, params, fields.pop("prompt_ids", ()), fields.pop("output_ids", ()), **fields
    )  # type: ignore[arg-type]


def reference_kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The kept set and its probabilities, written out plainly in float64."""
    values = [value / params.temperature for value in logits]
    best = max(values)
    weights = [math.exp(value - best) for value in values]
    kept = set(range(len(weights)))
    if params.top_k:
        threshold = sorted(weights, reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if weights[i] >= threshold}
    total = sum(weights[i] for i in kept)
    if params.top_p < 1:
        mass = 0.0
        for weight in sorted((weights[i] for i in kept), reverse=True):
            mass += weight
            if mass >= params.top_p * total:
                kept = {i for i in kept if weights[i] >= weight}
                break
    kept = {i for i in kept if weights[i] >= params.min_p}
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def reference_draw(logits: list[float], params: SamplingParams, u: float) -> int:
    mass = 0.0
    kept = reference_kept(logits, params)
    for token, probability in kept.items():
        mass += probability
        if mass > u:
            return token
    return max(kept)


def test_philox_known_answers() -> None:
    """The counter-based generator's published test vectors (Random123's kat_vectors), read through the 53-bit
    construction.
    """

    def of_words(first: int, second: int) -> float:
        return ((first >> 5) * 67108864.0 + (second >> 6)) / 9007199254740992.0

    assert uniforms([0], [0])[0] == of_words(0x6627E8D5, 0xE169C58D)


def test_uniforms_are_uniform_and_distinct() -> None:
    values = uniforms([7] * 20000, list(range(20000)))
    assert len(set(values.tolist())) == 20000
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared, 19 degrees of freedom: 1e-4 lies at 51
    big = 2**64 - 1
    assert uniforms([big], [big])[0] != uniforms([big - 1], [big])[0]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draw_is_the_inverse_cdf_over_the_kept_set(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    values = [value / 8 for value in logits]
    [token] = sample(torch.tensor([values]), [row_of(params)])
    u = float(uniforms([seed], [5])[0])
    kept = reference_kept(values, params)
    edges = np.cumsum(list(kept.values()))
    if np.abs(edges - u).min() > 1e-6:
        assert token.token_id == reference_draw(values, params, u)
    else:
        assert token.token_id in kept


def test_a_wide_nucleus_beyond_the_candidates_is_exact() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5000) * 0.3
    params = SamplingParams(seed=1, top_p=0.8)
    kept = reference_kept(logits[0].tolist(), params)
    assert len(kept) > 1000
    rows = [row_of(SamplingParams(seed=seed, top_p=0.8)) for seed in range(3000)]
    drawn = {token.token_id for token in sample(logits, rows)}
    assert drawn <= set(kept)
    mean = sum(token * p for token, p in kept.items())
    assert abs(np.mean([token.token_id for token in sample(logits, rows)]) - mean) < 5 * 1450 / math.sqrt(3000)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(seed=0, temperature=0.7), SamplingParams(seed=0, top_k=3), SamplingParams(seed=0, top_p=0.6)],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = [0.5, 2.0, -1.0, 1.0, 0.0, 1.5]
    kept = reference_kept(logits, params)
    rows = [
        row_of(SamplingParams(seed=9, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p), p)
        for p in range(20000)
    ]
    counts = Counter(token.token_id for token in sample(torch.tensor([logits]), rows))
    assert set(counts) <= set(kept)
    for token, probability in kept.items():
        deviation = math.sqrt(20000 * probability * (1 - probability)) + 1
        assert abs(counts[token] - 20000 * probability) < 5 * deviation


def test_draws_do_not_depend_on_batch_company() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 300)
    rows = [
        row_of(SamplingParams(seed=5), 9, 0),
        row_of(SamplingParams(seed=5, temperature=0.0), 9, 1),
        row_of(SamplingParams(seed=5, top_k=7, repetition_penalty=1.3), 9, 2, prompt_ids=(1, 2), output_ids=(3, 3)),
        row_of(SamplingParams(seed=6, top_p=0.5, logprobs=3), 9, 3),
        row_of(SamplingParams(seed=7, min_p=0.2, logit_bias=((4, 50.0),)), 9, 4),
        row_of(SamplingParams(seed=8, top_p=0.99, frequency_penalty=1.0), 10, 5, output_ids=(9,)),
    ]
    together = sample(logits, rows)
    alone = [sample(logits, [row])[0] for row in rows]
    backwards = sample(logits, rows[::-1])[::-1]
    assert [t.token_id for t in together] == [t.token_id for t in alone] == [t.token_id for t in backwards]


def test_rows_may_share_logits_and_differ_by_seed() -> None:
    rows = [row_of(SamplingParams(seed=seed)) for seed in range(8)]
    assert len({token.token_id for token in sample(torch.zeros(1, 1000), rows)}) > 5


def test_top_p_zero_and_temperature_zero_are_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9]])
    for seed in range(50):
        hot = SamplingParams(seed=seed, temperature=2.0, top_p=0.0)
        cold = SamplingParams(seed=seed, temperature=0.0)
        assert [token.token_id for token in sample(logits, [row_of(hot), row_of(cold)])] == [1, 1]


def test_penalties_bias_and_blocked_tokens() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.0, -1.0]])

    def greedy(**fields: object) -> int:
        output_ids, blocked_ids = fields.pop("output_ids", ()), fields.pop("blocked_ids", ())
        params = SamplingParams(seed=0, temperature=0.0, **fields)  # type: ignore[arg-type]
        return sample(logits, [row_of(params, output_ids=output_ids, blocked_ids=blocked_ids)])[0].token_id

    assert greedy() == 0
    assert greedy(presence_penalty=0.2, output_ids=(0,)) == 1
    assert greedy(frequency_penalty=0.04, output_ids=(0, 0, 0)) == 1
    assert greedy(frequency_penalty=0.04, output_ids=(0, 0)) == 0
    assert greedy(repetition_penalty=1.1, output_ids=(0,)) == 1
    assert greedy(logit_bias=((3, 100.0),)) == 3
    assert greedy(blocked_ids=(0, 1)) == 2


def test_logprobs_are_the_models_own_and_finite() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf, 0.0]])
    params = SamplingParams(seed=0, temperature=0.0, top_k=1, logprobs=4, logit_bias=((0, 100.0),))
    [token] = sample(logits, [row_of(params)])
    assert token.token_id == 0 and token.logprobs is not None
    reference = torch.log_softmax(logits[0], -1)
    assert token.logprobs.logprob == pytest.approx(float(reference[0]))
    assert [entry[0] for entry in token.logprobs.top] == [1, 0, 3, 2]
    assert token.logprobs.top[-1][1] == -9999.0


def test_non_finite_logits_fail_their_row_alone() -> None:
    logits = torch.tensor([[1.0, math.nan], [0.0, 5.0], [math.inf, 0.0], [-math.inf, -math.inf]])
    rows = [row_of(SamplingParams(seed=0, temperature=0.0), logits_row=i) for i in range(4)]
    assert [token.token_id for token in sample(logits, rows)] == [-1, 1, -1, -1]
