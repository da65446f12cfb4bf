"""Draws inside the native step against the torch sampler, which states the same definitions, on the same logits."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.native.runner import NativeRunner
from engine.plan import SampledToken, SamplingRow, StepPlan
from engine.sampler import sample
from tests.native.models import VOCAB, runner_of, tokens
from tests.native.plans import Pages, PlanBuilder, Text

PROMPT = tokens(40)


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    return runner_of("qwen2")


def plan_of(*params: SamplingParams, output: list[int] | None = None, blocked: tuple[int, ...] = ()) -> StepPlan:
    """One row of logits, and one token to draw from it for each of the parameters."""
    builder = PlanBuilder(Pages(160))
    builder.add_chunk(Text(list(PROMPT)), draws=0)
    plan = builder.plan
    plan.logit_rows = [len(PROMPT) - 1]
    plan.sampling_rows = [SamplingRow(0, len(PROMPT), p, PROMPT, output or [], blocked) for p in params]
    return plan


def logits_of(runner: NativeRunner) -> NDArray[np.float32]:
    runner.execute(plan_of(SamplingParams(seed=0)))
    row: NDArray[np.float32] = runner.last_logits[0].copy()
    return row


def ids_of(drawn: list[SampledToken]) -> list[int]:
    return [token.token_id for token in drawn]


def agreed(runner: NativeRunner, plan: StepPlan) -> list[SampledToken]:
    """Draw natively and check every token and logprob against the torch sampler."""
    got = runner.execute(plan)
    want = sample(torch.from_numpy(runner.last_logits.copy()), plan.sampling_rows)
    assert ids_of(got) == ids_of(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=2e-6)
            assert [i for i, _ in ours.logprobs.top] == [i for i, _ in theirs.logprobs.top]
            assert [x for _, x in ours.logprobs.top] == pytest.approx([x for _, x in theirs.logprobs.top], abs=2e-6)
    return got


def test_plain_draws_follow_the_probabilities(runner: NativeRunner) -> None:
    drawn = ids_of(agreed(runner, plan_of(*(SamplingParams(seed=seed, temperature=1.5) for seed in range(2000)))))
    p = torch.from_numpy(logits_of(runner)).double().div(1.5).softmax(-1).numpy()
    expected = p * 2000
    often = expected > 5
    counts = np.bincount(drawn, minlength=VOCAB)
    chi_square = float(np.sum((counts[often] - expected[often]) ** 2 / expected[often]))
    assert often.sum() > 10
    assert chi_square < 2 * often.sum()


@pytest.mark.parametrize("seed", range(6))
def test_any_parameters_agree_with_the_torch_sampler(runner: NativeRunner, seed: int) -> None:
    rng = random.Random(seed)
    params = [
        SamplingParams(
            seed=rng.choice([rng.randrange(2**64), 2**64 - 1, rng.randrange(100)]),
            temperature=rng.choice([0.0, 1e-6, 0.3, 1.0, 3.0, 100.0]),
            top_p=rng.choice([0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0]),
            top_k=rng.choice([0, 1, 2, 7, 100, VOCAB - 1, VOCAB, 10**9]),
            min_p=rng.choice([0.0, 0.0, 1e-6, 0.2, 1.0]),
            frequency_penalty=rng.choice([0.0, 0.0, -1.5, 2.0]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 0.5, 1.8]),
            logit_bias=rng.choice([(), ((3, 5.0), (9, -100.0)), ((VOCAB - 1, 100.0),)]),
            logprobs=rng.choice([None, None, 0, 1, 5, VOCAB + 1]),
        )
        for _ in range(300)
    ]
    output = [rng.randrange(VOCAB) for _ in range(30)] * 2
    agreed(runner, plan_of(*params, output=output, blocked=(0, VOCAB - 1, 17)))


def test_greedy_takes_the_lowest_of_equal_logits(runner: NativeRunner) -> None:
    logits = logits_of(runner)
    bias = tuple((i, float(np.float32(50.0) - logits[i])) for i in (300, 41, 180))
    equal = [i for i, b in bias if np.float32(logits[i]) + np.float32(b) == np.float32(50.0)]
    assert len(equal) >= 2
    plan = plan_of(
        SamplingParams(seed=3, temperature=0.0, logit_bias=bias), SamplingParams(seed=3, top_p=0.0, logit_bias=bias)
    )
    assert ids_of(runner.execute(plan)) == [min(equal)] * 2
    plan = plan_of(*(SamplingParams(seed=seed, top_k=1, logit_bias=bias) for seed in range(60)))
    assert set(ids_of(runner.execute(plan))) == set(equal), "ties with the k-th largest are kept"


def test_kept_sets_by_their_definition(runner: NativeRunner) -> None:
    """Draw often from flat distributions: what comes up is exactly what the definition keeps."""
    logits = logits_of(runner).astype(np.float64)
    for top_k, top_p, min_p in ((20, 1.0, 0.0), (0, 0.4, 0.0), (30, 0.5, 0.0), (30, 0.9, 0.6), (0, 1.0, 0.7)):
        weights = np.exp((logits - logits.max()) / 8.0)
        if top_k:
            weights[logits < np.sort(logits)[-top_k]] = 0.0
        descending = np.sort(weights)[::-1]
        needed = int(np.searchsorted(np.cumsum(descending), top_p * weights.sum()))
        weights[weights < descending[min(needed, VOCAB - 1)]] = 0.0
        weights[weights < min_p] = 0.0
        kept = set(np.flatnonzero(weights).tolist())
        params = [
            SamplingParams(seed=seed, temperature=8.0, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(4000)
        ]
        assert set(ids_of(runner.execute(plan_of(*params)))) == kept


def test_a_blocked_vocabulary_gives_no_token(runner: NativeRunner) -> None:
    params = SamplingParams(seed=0, logprobs=2)
    assert runner.execute(plan_of(params, blocked=tuple(range(VOCAB)))) == [SampledToken(-1)]


def test_penalties_count_as_vllm_does(runner: NativeRunner) -> None:
    """Presence and frequency look at the output only, repetition at the prompt too, each id once."""
    logits = logits_of(runner)
    token = int(logits.argmax())

    def raw(**changes: float) -> float:
        """The logit of `token` after penalties, found by how much bias makes it tie or win against a fixed rival."""
        low, high = -200.0, 200.0
        rival = (token + 1) % VOCAB
        for _ in range(60):
            middle = (low + high) / 2
            bias = ((rival, middle - float(logits[rival])),)
            plan = plan_of(SamplingParams(seed=0, temperature=0.0, logit_bias=bias, **changes), output=[token, token])
            others = tuple(i for i in range(VOCAB) if i not in (token, rival))
            plan.sampling_rows[0].blocked_ids = others
            (drawn,) = runner.execute(plan)
            low, high = (middle, high) if drawn.token_id == token else (low, middle)
        return low

    base = float(logits[token])
    assert raw() == pytest.approx(base, abs=1e-3)
    assert raw(frequency_penalty=0.5) == pytest.approx(base - 1.0, abs=1e-3)
    assert raw(presence_penalty=0.5) == pytest.approx(base - 0.5, abs=1e-3)
    assert raw(repetition_penalty=2.0) == pytest.approx(base / 2.0 if base > 0 else base * 2.0, abs=1e-3)


def test_logprobs_are_of_the_unchanged_logits(runner: NativeRunner) -> None:
    logits = logits_of(runner).astype(np.float64)
    params = SamplingParams(seed=1, temperature=0.5, logit_bias=((9, 1000.0),), logprobs=1)
    (drawn,) = runner.execute(plan_of(params))
    assert drawn.token_id == 9 and drawn.logprobs is not None
    log_total = logits.max() + math.log(np.exp(logits - logits.max()).sum())
    assert drawn.logprobs.logprob == pytest.approx(logits[9] - log_total, abs=1e-5)
    assert drawn.logprobs.top[0][0] == int(logits.argmax())


def test_a_mask_leaves_only_what_it_allows(runner: NativeRunner) -> None:
    """Greedy, drawn and penalised alike; a mask that allows nothing fails its row alone."""
    rng = np.random.default_rng(4)
    params = [
        SamplingParams(seed=1, temperature=0.0),
        SamplingParams(seed=2, logprobs=3),
        SamplingParams(seed=3, top_p=0.7, presence_penalty=1.0),
        SamplingParams(seed=4, top_k=3, logit_bias=((5, 9.0),)),
        SamplingParams(seed=5),
    ]
    plan = plan_of(*params, output=[5, 6])
    for row in plan.sampling_rows[:-1]:
        row.allowed = rng.integers(0, 2**32, -(-VOCAB // 32), dtype=np.uint32)
    drawn = ids_of(agreed(runner, plan))
    for row, token_id in zip(plan.sampling_rows[:-1], drawn, strict=False):
        assert row.allowed is not None
        assert row.allowed[token_id // 32] >> np.uint32(token_id % 32) & 1
    plan.sampling_rows[2].allowed = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    assert [token_id < 0 for token_id in ids_of(agreed(runner, plan))] == [False, False, True, False, False]


def test_a_mask_of_another_vocabulary_is_refused(runner: NativeRunner) -> None:
    plan = plan_of(SamplingParams(seed=1))
    plan.sampling_rows[0].allowed = np.full(1, 2**32 - 1, dtype=np.uint32)
    with pytest.raises(ValueError, match="mask"):
        runner.execute(plan)
