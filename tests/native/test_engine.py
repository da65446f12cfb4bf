"""The native step under the real scheduler: the same tokens whatever the engine does with the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.api import ChoiceUpdate, SamplingParams, TokenLogprobs
from engine.core import EngineCore
from engine.native.runner import NativeRunner
from engine.sequence import Prefill
from tests.engine.support import core_with, generate, prefill_of, run_to_end
from tests.native.bits import logits_alone
from tests.native.models import poison, runner_of, tokens

PROMPT = tokens(300, seed=3)
CHOICES = [SamplingParams(seed=40 + i, temperature=1.5, max_tokens=40, ignore_eos=True) for i in range(6)]
COMPANY = [tokens(length, seed=length) for length in (9, 70, 333)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    answers = [generate(_core(runner_of("llama")), [PROMPT], [params])[0][0] for params in CHOICES]
    assert len({tuple(answer) for answer in answers}) == len(CHOICES)
    return answers


def _core(runner: NativeRunner, **options: Any) -> EngineCore:
    poison(runner)
    return core_with(runner, **options)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (160, {}),
        (160, {"max_num_seqs": 2}),
        (160, {"max_num_batched_tokens": 16}),
        (160, {"enable_prefix_caching": False}),
        (17, {}),
    ],
    ids=["together", "waves", "small chunks", "no cache", "preemption"],
)
def test_choice_i_of_n_is_the_answer_of_its_own_seed(
    alone: list[list[int]], num_pages: int, options: dict[str, Any], num_threads: int
) -> None:
    core = _core(runner_of("llama", num_pages=num_pages, num_threads=num_threads), **options)
    assert generate(core, [PROMPT], CHOICES)[0] == alone
    if num_pages == 17:
        assert core.num_prompt_tokens > len(PROMPT), "nothing was preempted and computed again"


@pytest.mark.parametrize("num_neighbours", [1, 7, 31, 63])
def test_company_changes_nothing(num_neighbours: int) -> None:
    """Tokens and log probabilities of a request among others that come, go and are prefilled while it runs."""
    choices = [replace(params, logprobs=3) for params in CHOICES]
    alone = _updates(_core(runner_of("llama", num_pages=600)), choices, [])
    neighbours = [
        prefill_of(tokens(9 + 7 * (i % 50), seed=i), [replace(CHOICES[0], seed=i, max_tokens=3 + i)])
        for i in range(num_neighbours)
    ]
    core = _core(runner_of("llama", num_pages=600), max_num_seqs=80, max_num_batched_tokens=200)
    assert _updates(core, choices, neighbours) == alone


def _updates(core: EngineCore, choices: list[SamplingParams], neighbours: list[Prefill]) -> list[list[ChoiceUpdate]]:
    """What each choice of PROMPT is told, one neighbour coming before it and two with every step thereafter."""
    prefill = prefill_of(PROMPT, choices)
    told: dict[int, list[ChoiceUpdate]] = {sequence.id: [] for sequence in prefill.sequences}
    arrivals = [*neighbours[:1], prefill, *neighbours[1:]]
    while core.has_work or arrivals:
        core.add(arrivals[:2])
        del arrivals[:2]
        for sequence, update in core.step() or ():
            if sequence.id in told:
                told[sequence.id].append(update)
    assert all(told.values())
    return list(told.values())


def test_a_warm_cache_changes_nothing(alone: list[list[int]]) -> None:
    core = _core(runner_of("llama", num_pages=400))
    for _ in range(2):
        prefill = prefill_of(PROMPT, CHOICES)
        sequences = list(prefill.sequences)
        core.add([prefill])
        run_to_end(core)
        assert [sequence.output_ids for sequence in sequences] == alone
    assert prefill.prompt.info.num_cached_tokens >= 256


def _scored(core: EngineCore, k: int = 3) -> list[TokenLogprobs | None]:
    prefill = prefill_of(PROMPT, CHOICES, prompt_logprobs=k)
    core.add([prefill])
    run_to_end(core)
    return prefill.prompt.info.logprobs


def test_logprobs_of_a_prompt_are_those_of_its_logits() -> None:
    runner = runner_of("llama")
    told = _scored(_core(runner))
    logits = logits_alone(runner, PROMPT).view(np.float32).astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert len(told) == len(PROMPT) - 1
    for place, entry in enumerate(told):
        assert entry is not None and entry.token_id == PROMPT[place + 1]
        assert entry.logprob == pytest.approx(expected[place, entry.token_id], abs=1e-5)
        best = np.argsort(-expected[place], kind="stable")[:3]
        assert [token_id for token_id, _ in entry.top] == best.tolist()


@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (160, {"max_num_seqs": 2}),
        (160, {"max_num_batched_tokens": 16}),
        (160, {"max_num_batched_tokens": 255}),
        (17, {}),
    ],
    ids=["waves", "small chunks", "uneven chunks", "preemption"],
)
def test_logprobs_of_a_prompt_are_the_same_bits_however_it_is_computed(num_pages: int, options: dict[str, Any]) -> None:
    once = _scored(_core(runner_of("llama")))
    core = _core(runner_of("llama", num_pages=num_pages), **options)
    generate(core, [PROMPT, *COMPANY[:1]], CHOICES[:2])
    for _ in range(2):  # with the cache warm too
        assert _scored(core) == once


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.02, "logprobs": 2},
        {"temperature": 0.05, "frequency_penalty": 0.01, "min_tokens": 90},
    ],
    ids=["greedy", "logprobs", "penalties"],
)
def test_guessed_tokens_change_no_bit(options: dict[str, Any]) -> None:
    """A tiny model soon repeats itself, so many guesses are right and many are not."""
    prompt = tokens(60, seed=8) * 4
    params = SamplingParams(seed=3, max_tokens=180, ignore_eos=True, **options)

    def answer(num_speculative_tokens: int) -> tuple[list[object], EngineCore]:
        core = _core(runner_of("llama"), num_speculative_tokens=num_speculative_tokens)
        core.add([prefill_of(prompt, [params])])
        return [update for _ in range(200) if core.has_work for _, update in core.step() or ()], core

    plain, _ = answer(0)
    guessed, core = answer(7)
    assert guessed == plain
    assert 0 < core.num_accepted_tokens < core.num_draft_tokens
