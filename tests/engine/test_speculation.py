"""Guessed tokens: what is guessed, and that an answer is the one that single steps give, whatever was guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from engine.api import EndReason, SamplingParams
from engine.core import EngineCore
from engine.plan import SampledToken, StepPlan
from engine.sequence import Prefill
from engine.speculation import Drafter
from tests.engine.support import CheckingRunner, core_with, greedy, next_token, prefill_of, run_to_end

PROMPT = list(range(10, 110))


@dataclass
class CopyingRunner(CheckingRunner):
    """Continues a text as it went on after the same token before, but for every `period`-th position."""

    period: int = 9

    def _draw(self, plan: StepPlan, logits_row: int, position: int) -> SampledToken:
        context = self.context(plan.segments, plan.logit_rows[logits_row], position - 1)
        last = context[-1]
        before = [i for i, token in enumerate(context[:-1]) if token == last]
        if position % self.period == 0 or not before:
            return SampledToken(next_token(context))
        return SampledToken(context[before[-1] + 1])


def _run(num_speculative_tokens: int, choices: list[SamplingParams], **options: Any) -> tuple[EngineCore, Prefill, Any]:
    core = core_with(CopyingRunner(**options), num_speculative_tokens=num_speculative_tokens)
    prefill = prefill_of(PROMPT, choices)
    sequences = list(prefill.sequences)
    core.add([prefill])
    run_to_end(core)
    return core, prefill, sequences


def test_the_latest_earlier_place_is_copied_from() -> None:
    assert Drafter().draft([1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9, 10], [1, 2, 3], 7) == (7, 8, 9)
    assert Drafter().draft([1, 2, 3, 4, 5], [1, 2, 3], 2) == (4, 5)
    assert Drafter().draft([1, 2, 3, 4], [2, 3], 7) == ()
    assert Drafter().draft([1], [2], 7) == ()
    assert Drafter().draft([5, 5, 5], [5], 7) == (5,), "a run of one token suggests itself"


def test_what_grows_meanwhile_is_known_too() -> None:
    drafter, output = Drafter(), [1, 2, 3, 4]
    assert drafter.draft([9], output, 7) == ()
    output += [1, 2, 3]
    assert drafter.draft([9], output, 7) == (4, 1, 2)


def test_right_guesses_grow_and_wrong_ones_rest_ever_longer() -> None:
    drafter, text = Drafter(), list(range(50)) * 3
    assert len(drafter.draft(text, [], 7)) == 3
    drafter.learn(3, 3, 7)
    assert len(drafter.draft(text, [], 7)) == 7
    for pause in (1, 2, 4, 8, 16, 32, 64, 64):
        drafter.learn(7, 0, 7)
        rested = 0
        while not drafter.draft(text, [], 7):
            rested += 1
        assert rested == pause
    drafter.learn(3, 1, 7)
    drafter.learn(3, 0, 7)
    assert (drafter.draft(text, [], 7), len(drafter.draft(text, [], 7))) == ((), 3)


def test_a_step_of_guesses_counts_as_one_of_one_choice() -> None:
    core, _, (sequence,) = _run(7, [greedy(60)], period=1000)
    assert core.num_accepted_tokens > 0 and core.num_steps < len(sequence.output_ids)
    batches = core.stats.batch_size.cumulative()
    assert batches[0][1] == batches[-1][1] == core.num_steps
    assert core.stats.inter_token_seconds.cumulative()[-1][1] == core.num_steps - 1


@pytest.mark.parametrize("period", [2, 3, 9, 1000])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 150])
def test_an_answer_is_the_one_of_single_steps(max_tokens: int, period: int) -> None:
    choices = [greedy(max_tokens)]
    plain, _, [want] = _run(0, choices, period=period)
    core, _, [got] = _run(7, choices, period=period)
    assert got.output_ids == want.output_ids and len(got.output_ids) == max_tokens
    assert core.num_steps + core.num_accepted_tokens == plain.num_steps
    assert core.num_generation_tokens == max_tokens
    if max_tokens == 150 and period == 9:
        assert core.num_steps < 0.8 * plain.num_steps and core.num_accepted_tokens < core.num_draft_tokens


def test_several_choices_are_not_guessed_for() -> None:
    core, _, sequences = _run(7, [greedy(60), greedy(60)])
    assert core.num_draft_tokens == 0
    assert [s.output_ids for s in sequences] == [s.output_ids for s in _run(0, [greedy(60), greedy(60)])[2]]


def test_a_stop_token_ends_an_answer_amid_right_guesses() -> None:
    _, _, [plain] = _run(0, [greedy(100)])
    stop = plain.output_ids[70]
    length = plain.output_ids.index(stop, 60) + 1
    choices = [SamplingParams(seed=0, temperature=0.0, max_tokens=100, stop_token_ids=(stop,), min_tokens=61)]
    core = core_with(CopyingRunner(), num_speculative_tokens=7)
    core.add([prefill_of(PROMPT, choices)])
    updates = [update for _ in range(100) if core.has_work for _, update in core.step() or ()]
    assert len(updates) == length and updates[-1].end_reason is EndReason.STOP
    assert [u.token_ids[0] for u in updates] == plain.output_ids[:length]
    assert core.num_accepted_tokens > 0


def test_what_an_answer_leaves_in_the_cache_is_what_it_said() -> None:
    core, _, [first] = _run(7, [greedy(120)])
    assert core.num_accepted_tokens > 0
    prefill = prefill_of([*PROMPT, *first.output_ids, 5, 6, 7], [greedy(40)])
    [second] = prefill.sequences
    core.add([prefill])
    run_to_end(core)
    assert prefill.prompt.info.num_cached_tokens >= 192
    cold = core_with(CopyingRunner(), num_speculative_tokens=0)
    again = prefill_of([*PROMPT, *first.output_ids, 5, 6, 7], [greedy(40)])
    [want] = again.sequences
    cold.add([again])
    run_to_end(cold)
    assert second.output_ids == want.output_ids


@pytest.mark.parametrize("num_pages", [5, 6, 7, 8])
def test_guesses_take_no_page_that_somebody_needs(num_pages: int) -> None:
    """The pool holds the answer itself, with hardly a page or none to spare."""
    choices = [greedy(num_pages * 32 - 100)]
    _, _, [want] = _run(0, choices, num_pages=num_pages)
    _, _, [got] = _run(7, choices, num_pages=num_pages)
    assert got.output_ids == want.output_ids


def test_only_a_bitwise_runner_guesses() -> None:
    core, _, _ = _run(7, [greedy(60)], bitwise=False)
    assert core.num_draft_tokens == 0
