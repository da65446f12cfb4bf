"""What vLLM is told of a choice, and what its numbers are taken for. Needs no vllm."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api import Choice, EndReason, InvalidConstraint, OnlyTokens, SamplingParams, TokenLogprobs, WithoutWords
from engine.vllm_params import check_together, end_of, logprobs_of, prompt_logprobs_of, vllm_sampling, vllm_seed
from tests.contract.stub_vllm import install

EOS = frozenset({2, 7})


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def told(params: SamplingParams, max_tokens: int = 9) -> Any:
    return vllm_sampling(params, max_tokens, EOS, lambda _: None)


def test_seeds_are_signed_and_none_is_no_seed() -> None:
    assert [vllm_seed(seed) for seed in (0, 2**63 - 1, 2**63, 2**64 - 2)] == [0, 2**63 - 1, -(2**63), -2]
    assert vllm_seed(2**64 - 1) == -2, "-1 is none to vLLM"


def test_ends_are_stop_tokens_unless_they_are_ignored() -> None:
    assert told(SamplingParams(1, stop_token_ids=(5,))).stop_token_ids == [5, 2, 7]
    ignoring = told(SamplingParams(1, stop_token_ids=(5,), ignore_eos=True))
    assert (ignoring.stop_token_ids, ignoring.ignore_eos) == ([5], True)
    closed = told(SamplingParams(1, ignore_eos=True, constraint=Choice(("a",), "c")))
    assert (closed.stop_token_ids, closed.ignore_eos) == ([2, 7], False), "nothing may follow its text"


def test_top_p_of_nothing_keeps_the_likeliest() -> None:
    params = told(SamplingParams(1, top_p=0.0, top_k=40))
    assert (params.top_p, params.top_k) == (1.0, 1)


def test_least_length_is_no_more_than_the_greatest() -> None:
    assert told(SamplingParams(1, min_tokens=30), max_tokens=4).min_tokens == 4


def test_only_tokens_are_told_and_words_become_a_grammar() -> None:
    only = told(SamplingParams(1, constraint=OnlyTokens((4, 6), "p")))
    assert (only.allowed_token_ids, only.structured_outputs) == ([4, 6], None)
    grammar = told(SamplingParams(1, constraint=WithoutWords(("a/b", "\n"), "p"))).structured_outputs.grammar
    assert r"(\x{61}\x{2f}\x{62}|\x{a})" in grammar


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(1, min_tokens=1, constraint=Choice(("a",), "c")), "min_tokens"),
        (SamplingParams(1, min_tokens=1, constraint=OnlyTokens((2, 5), "allowed"), stop_token_ids=(5,)), "allowed"),
        (SamplingParams(1, ignore_eos=True, constraint=WithoutWords(("a",), "bad_words")), "ignore_eos"),
    ],
)
def test_what_together_would_leave_nothing_to_draw_is_refused(params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        check_together(params, EOS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("finish", "stop", "params", "expected"),
    [
        ("length", None, SamplingParams(1), (EndReason.LENGTH, None, None)),
        ("stop", 2, SamplingParams(1), (EndReason.STOP, None, None)),
        ("stop", None, SamplingParams(1), (EndReason.STOP, None, None)),
        ("stop", 7, SamplingParams(1, stop_token_ids=(7,)), (EndReason.STOP, None, None)),
        ("stop", 7, SamplingParams(1, stop_token_ids=(7,), ignore_eos=True), (EndReason.STOP, 7, None)),
        ("stop", 5, SamplingParams(1, stop_token_ids=(5,)), (EndReason.STOP, 5, None)),
        ("error", None, SamplingParams(1), (EndReason.ERROR, None, "vLLM gave this choice up: error")),
    ],
)
def test_ends_are_told_apart(finish: str, stop: int | None, params: SamplingParams, expected: Any) -> None:
    assert end_of(finish, stop, params, EOS) == expected


def entry(**ranks: float) -> dict[int, Any]:
    return {int(name[1:]): SimpleNamespace(logprob=value, rank=k + 1) for k, (name, value) in enumerate(ranks.items())}


def test_logprobs_have_the_best_in_order_and_the_drawn_one_apart() -> None:
    found = {9: SimpleNamespace(logprob=-7.0, rank=40)} | entry(t4=-0.5, t3=-1.5)
    assert logprobs_of([9], [found], 2) == (TokenLogprobs(9, -7.0, ((4, -0.5), (3, -1.5))),)
    assert logprobs_of([4], [entry(t4=-0.5)], 0) == (TokenLogprobs(4, -0.5),)


def test_a_prompts_first_token_has_no_logprob_and_infinite_ones_are_none() -> None:
    rows = prompt_logprobs_of([8, 4, 3], [None, entry(t4=-0.5), entry(t3=-math.inf)], 1)
    assert rows == [TokenLogprobs(4, -0.5, ((4, -0.5),)), None]
