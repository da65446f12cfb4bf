"""Log probabilities of prompts: one for each token but the first, computed once, with few rows of logits at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.api import ChoiceUpdate, EndReason, TokenLogprobs
from engine.core import EngineCore
from engine.plan import SampledToken, StepPlan
from engine.scheduler import MAX_SCORED_ROWS
from engine.sequence import Prefill
from tests.engine.support import CheckingRunner, core_with, expected, greedy, next_token, prefill_of, run_to_end


@dataclass
class TellingRunner(CheckingRunner):
    """A forced token's log probability is minus the hash of the context before it."""

    max_logit_rows: int = 0

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        drawn = super().execute(plan)
        self.max_logit_rows = max(self.max_logit_rows, len(plan.logit_rows))
        return [
            token if row.params.logprobs is None else self._told(plan, number)
            for number, (token, row) in enumerate(zip(drawn, plan.sampling_rows, strict=True))
        ]

    def _told(self, plan: StepPlan, number: int) -> SampledToken:
        row = plan.sampling_rows[number]
        ((forced, bias),) = row.params.logit_bias
        assert bias > 1e9 and row.params.temperature == 0
        batch_row = plan.logit_rows[row.logits_row]
        context = self.context(plan.segments, batch_row, plan.positions[batch_row])
        return SampledToken(forced, TokenLogprobs(forced, -float(next_token(context))))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(990) for _ in range(length)]


def logprobs_of(prompt: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(prompt[n], -float(next_token(prompt[:n]))) for n in range(1, len(prompt))]


def run(core: EngineCore, prompt: list[int], n: int = 1, max_tokens: int = 3) -> Prefill:
    prefill = prefill_of(prompt, [greedy(max_tokens)] * n, prompt_logprobs=2)
    sequences = list(prefill.sequences)
    core.add([prefill])
    run_to_end(core)
    assert [sequence.output_ids for sequence in sequences] == [expected(prompt, max_tokens)] * n
    return prefill


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 257, 700])
@pytest.mark.parametrize("n", [1, 3])
def test_every_token_but_the_first_has_one_computed_once_for_all_choices(length: int, n: int) -> None:
    runner = TellingRunner()
    prompt = prompt_of(length)
    assert run(core_with(runner), prompt, n).prompt.info.logprobs == logprobs_of(prompt)
    assert runner.num_rows == length + n * 2


def test_a_step_has_few_rows_of_logits_and_goes_on_with_other_work() -> None:
    runner = TellingRunner(num_pages=200, max_model_len=4096)
    core = core_with(runner, max_num_batched_tokens=1024)
    scored = [prefill_of(prompt_of(900, seed), [greedy(2)], prompt_logprobs=0) for seed in (1, 2)]
    plain = prefill_of(prompt_of(600, 3), [greedy(2)])
    (sequence,) = plain.sequences
    core.add([*scored, plain])
    core.step()
    assert len(sequence.output_ids) == 1, "what needs no such rows does not wait for them"
    run_to_end(core)
    assert runner.max_logit_rows <= MAX_SCORED_ROWS + 3
    for prefill in scored:
        assert prefill.prompt.info.logprobs == logprobs_of(list(prefill.prompt.token_ids))


def test_what_is_cached_is_computed_again_for_its_logprobs_only() -> None:
    core = core_with(TellingRunner())
    prompt = prompt_of(300)
    run(core, prompt)
    again = run(core, prompt)
    assert (again.prompt.info.logprobs, again.prompt.info.num_cached_tokens) == (logprobs_of(prompt), 0)
    plain = prefill_of(prompt, [greedy(3)])
    core.add([plain])
    run_to_end(core)
    assert (plain.prompt.info.logprobs, plain.prompt.info.num_cached_tokens) == ([], 288)


def test_a_preempted_prompt_goes_on_where_it_was() -> None:
    """Some of its chunks are cached, others lost when it goes on; each entry comes once."""
    runner = TellingRunner(num_pages=13)
    core = core_with(runner, max_num_batched_tokens=5, max_num_seqs=4)
    first = prefill_of(prompt_of(40, 5), [greedy(200)])
    late = prefill_of(prompt_of(300), [greedy(2)], prompt_logprobs=1)
    core.add([first])
    core.step()
    core.add([late])
    run_to_end(core)
    assert late.prompt.info.logprobs == logprobs_of(prompt_of(300))
    assert runner.num_rows > 40 + 199 + 300 + 1, "nothing was computed twice"


def test_a_choice_of_no_tokens_ends_with_its_prompt() -> None:
    for prompt_logprobs in (None, 1):
        runner = TellingRunner()
        core = core_with(runner)
        prefill = prefill_of(prompt_of(70), [greedy(0), greedy(2), greedy(0)], prompt_logprobs=prompt_logprobs)
        none, two, _ = prefill.sequences
        core.add([prefill])
        updates = core.step() or []
        ends = [update for sequence, update in updates if sequence is not two]
        assert ends == [ChoiceUpdate(end_reason=EndReason.LENGTH)] * 2
        run_to_end(core)
        assert (none.output_ids, two.output_ids) == ([], expected(prompt_of(70), 2))
        assert runner.num_rows == 70 + 1
