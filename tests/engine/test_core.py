"""Scheduling, forks, preemption and the end of choices, on a runner that checks every plan against what its slots
hold.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import EndReason, SamplingParams
from engine.core import EngineCore
from engine.plan import PAGE_SIZE, SampledToken, StepPlan
from tests.engine.support import (
    CheckingRunner,
    Sink,
    core_with,
    expected,
    generate,
    greedy,
    prefill_of,
    run_to_end,
)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(990) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 300, 600])
@pytest.mark.parametrize("n", [1, 3])
def test_forks_continue_their_own_prompt(length: int, n: int) -> None:
    core = core_with(CheckingRunner())
    prompt = prompt_of(length)
    assert generate(core, [prompt], [greedy(40)] * n) == [[expected(prompt, 40)] * n]


def test_a_prompt_is_computed_once_for_all_its_choices() -> None:
    runner = CheckingRunner()
    core = core_with(runner)
    generate(core, [prompt_of(300)], [greedy(5)] * 8)
    assert runner.num_rows == 300 + 8 * 4
    assert core.num_prompt_tokens == 300


def test_a_fork_copies_one_page_at_most_per_choice() -> None:
    runner = CheckingRunner()
    core = core_with(runner)
    generate(core, [prompt_of(300), prompt_of(320)], [greedy(5)] * 8)
    assert sum(len(plan.copies) for plan in runner.plans) == 7  # 300 leaves a partly filled page, 320 does not


def test_choices_beyond_max_num_seqs_run_in_waves() -> None:
    runner = CheckingRunner()
    core = core_with(runner, max_num_seqs=3)
    prompt = prompt_of(100)
    assert generate(core, [prompt], [greedy(20)] * 8) == [[expected(prompt, 20)] * 8]
    assert max(len(plan.sampling_rows) for plan in runner.plans) == 3


def test_a_long_prompt_is_computed_in_chunks_beside_running_choices() -> None:
    runner = CheckingRunner(max_model_len=2048, num_pages=200)
    core = core_with(runner, max_num_batched_tokens=64, max_num_seqs=4)
    first = prefill_of(prompt_of(20), [greedy(40)])
    core.add([first])
    [one] = first.sequences
    core.step()
    late = prefill_of(prompt_of(1000), [greedy(4)])
    core.add([late])
    before = len(one.output_ids)
    for _ in range(10):
        core.step()
    assert len(one.output_ids) == before + 10, "a prefill held up a running choice"
    assert runner.max_rows <= 64
    run_to_end(core)


def test_preempted_choices_resume_as_if_nothing_had_happened() -> None:
    runner = CheckingRunner(num_pages=14)
    core = core_with(runner)
    prompts = [prompt_of(40, seed) for seed in range(4)]
    # 4 choices of 40 + 100 tokens want 20 pages
    assert generate(core, prompts, [greedy(100)]) == [[expected(prompt, 100)] for prompt in prompts]
    assert core.num_prompt_tokens > 160, "nothing was preempted and computed again"


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    core = core_with(CheckingRunner(num_pages=8))
    prompt = prompt_of(8 * PAGE_SIZE - 10)
    assert generate(core, [prompt], [greedy(10)] * 3) == [[expected(prompt, 10)] * 3]


def test_an_earlier_prompt_is_found_in_the_cache() -> None:
    core = core_with(CheckingRunner())
    prompt = prompt_of(200)
    generate(core, [prompt], [greedy(1)])
    again = prefill_of(prompt, [greedy(3)] * 2)
    core.add([again])
    run_to_end(core)
    assert again.prompt.info.num_cached_tokens == 192
    assert core.num_prompt_tokens == 208


def test_the_next_turn_finds_the_answer_in_the_cache() -> None:
    core = core_with(CheckingRunner())
    prompt = prompt_of(100)
    [[answer]] = generate(core, [prompt], [greedy(100)])
    following = prefill_of(prompt + answer + [5], [greedy(1)])
    core.add([following])
    run_to_end(core)
    assert following.prompt.info.num_cached_tokens == 192  # 199 tokens were computed


def test_siblings_are_not_counted_as_cached() -> None:
    core = core_with(CheckingRunner(), max_num_seqs=1)
    prefill = prefill_of(prompt_of(200), [greedy(2)] * 3)
    core.add([prefill])
    run_to_end(core)
    assert prefill.prompt.info.num_cached_tokens == 0


def test_an_aborted_prefill_stops_at_the_next_chunk() -> None:
    runner = CheckingRunner(max_model_len=4096, num_pages=200)
    core = core_with(runner, max_num_batched_tokens=64)
    prefill = prefill_of(prompt_of(2000), [greedy(4)] * 2)
    sequences = list(prefill.sequences)
    core.add([prefill])
    core.step()
    for sequence in sequences:
        core.abort(sequence, EndReason.CANCELLED)
    assert not core.has_work and core.cache.num_held == 0
    assert runner.num_rows == 64


def test_an_aborted_choice_leaves_its_siblings_alone() -> None:
    core = core_with(CheckingRunner())
    prompt = prompt_of(70)
    prefill = prefill_of(prompt, [greedy(30)] * 4)
    sequences = list(prefill.sequences)
    core.add([prefill])
    core.step()
    update = core.abort(sequences[0], EndReason.CANCELLED)
    assert update is not None and update[1].end_reason is EndReason.CANCELLED
    assert core.abort(sequences[0], EndReason.CANCELLED) is None
    run_to_end(core)
    assert [s.output_ids for s in sequences[1:]] == [expected(prompt, 30)] * 3


def test_a_choice_that_ends_early_frees_its_tail_at_once() -> None:
    core = core_with(CheckingRunner(num_pages=64), enable_prefix_caching=False)
    prefill = prefill_of(prompt_of(64), [greedy(2), greedy(50), greedy(50)])
    core.add([prefill])
    core.step()
    core.step()
    held = core.cache.num_held
    assert held == 2 + 2, "two shared pages, a private one for each of the two that go on"
    run_to_end(core)


def test_a_reader_that_is_behind_is_passed_over() -> None:
    core = core_with(CheckingRunner(), stream_credit=4)
    sinks = [Sink(0), Sink()]
    prefill = prefill_of(prompt_of(10), [greedy(30)] * 2, sinks)
    slow, fast = prefill.sequences
    core.add([prefill])
    while not fast.ended:
        core.step()
    assert len(slow.output_ids) == 4
    assert core.step() is None, "nothing can run while the only reader is behind"
    sinks[0].num_taken = 2
    core.step()
    core.step()
    assert (len(slow.output_ids), core.step()) == (6, None)
    sinks[0].num_taken = 1000
    run_to_end(core)
    assert slow.output_ids == fast.output_ids


def test_a_stalled_reader_gives_way_when_slots_or_pages_run_out() -> None:
    core = core_with(CheckingRunner(num_pages=8), stream_credit=2, max_num_seqs=1)
    sink = Sink(0)
    stalled = prefill_of(prompt_of(100), [greedy(30)], [sink])
    [sequence] = stalled.sequences
    core.add([stalled])
    while core.step() is not None:
        pass
    prompt = prompt_of(200)
    assert generate_beside(core, prompt) == expected(prompt, 5)
    sink.num_taken = 1000
    run_to_end(core)
    assert sequence.output_ids == expected(list(stalled.prompt.token_ids), 30)


def generate_beside(core: EngineCore, prompt: list[int]) -> list[int]:
    prefill = prefill_of(prompt, [greedy(5)])
    [sequence] = prefill.sequences
    core.add([prefill])
    for _ in range(50):
        core.step()
        if sequence.ended:
            return sequence.output_ids
    raise AssertionError("a stalled reader blocks the engine")


def test_an_owner_that_fills_the_engine_does_not_make_others_wait() -> None:
    core = core_with(CheckingRunner(num_pages=200), max_num_seqs=4)
    wide = [prefill_of(prompt_of(40), [greedy(10)] * 32, owner="greedy") for _ in range(3)]
    core.add(wide)
    core.step()
    late = prefill_of(prompt_of(40, 2), [greedy(3)], owner="modest")
    [sequence] = late.sequences
    core.add([late])
    while not any(s.ended for s in core.scheduler.running) and len(core.scheduler.running) == 4:
        core.step()
    core.step()
    assert sequence.output_ids, "the first free slot went to the owner that had all the others"
    run_to_end(core)


def test_a_wide_request_is_not_overtaken_for_ever() -> None:
    core = core_with(CheckingRunner(num_pages=200), max_num_seqs=2)
    wide = prefill_of(prompt_of(40), [greedy(20)] * 6, owner="wide")
    sequences = list(wide.sequences)
    core.add([wide])
    for number in range(60):  # every newcomer is an owner that has nothing yet
        core.add([prefill_of(prompt_of(10, number), [greedy(2)], owner=f"newcomer {number}")])
        core.step()
    assert sum(sequence.ended for sequence in sequences) >= 2
    run_to_end(core)


def test_a_better_priority_goes_first() -> None:
    core = core_with(CheckingRunner(), max_num_seqs=1)
    slow = [prefill_of(prompt_of(40, seed), [greedy(3)], priority=1) for seed in range(3)]
    core.add(slow)
    core.step()
    urgent = prefill_of(prompt_of(40, 9), [greedy(3)], priority=0)
    [sequence] = urgent.sequences
    last = slow[-1].sequences[0]
    core.add([urgent])
    while not sequence.ended:
        core.step()
    assert not last.output_ids
    run_to_end(core)


class FullRunner(CheckingRunner):
    """Has no memory for more than 100 rows a step."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if len(plan.token_ids) > 100:
            raise MemoryError("no room")
        return super().execute(plan)


def test_a_step_without_memory_fails_its_requests_and_no_others() -> None:
    core = core_with(FullRunner(), max_num_batched_tokens=90)
    fits = prefill_of(prompt_of(64), [greedy(4)] * 2)
    sequences = list(fits.sequences)
    core.add([fits])
    run_to_end(core)
    assert [s.output_ids for s in sequences] == [expected(prompt_of(64), 4)] * 2
    core = core_with(FullRunner(), max_num_batched_tokens=200)
    core.add([prefill_of(prompt_of(50), [greedy(30)] * 2)])
    core.step()
    too_big = prefill_of(prompt_of(150), [greedy(4)] * 3)
    core.add([too_big])
    updates = core.step()
    assert updates is not None and len(updates) == 5
    assert {update.end_reason for _, update in updates} == {EndReason.ERROR}
    assert not core.has_work and core.cache.num_held == 0
    assert generate(core, [prompt_of(64)], [greedy(4)] * 2) == [[expected(prompt_of(64), 4)] * 2]


def test_steps_are_recorded_with_the_rows_of_each_segment() -> None:
    core = core_with(CheckingRunner())
    generate(core, [prompt_of(300)], [greedy(3)] * 4)
    first, second, third = core.steps
    assert (first.num_prefill_rows, first.num_decode_rows, first.segment_rows) == (300, 0, (300,))
    assert (second.num_prefill_rows, second.num_decode_rows, second.segment_rows) == (0, 4, (4, 1, 1, 1, 1))
    assert (third.number, third.num_running, third.num_waiting) == (3, 4, 0)


def test_stop_tokens_and_min_tokens() -> None:
    prompt = prompt_of(50)
    answer = expected(prompt, 12)
    core = core_with(CheckingRunner())
    stop = SamplingParams(seed=0, max_tokens=12, stop_token_ids=(answer[4],))
    late = SamplingParams(seed=0, max_tokens=12, stop_token_ids=(answer[4],), min_tokens=8)
    [[first, second]] = generate(core, [prompt], [stop, late])
    assert first == answer[:5]
    assert second == answer  # it may not end before 8 tokens, and does not meet the token again


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mix_of_requests_aborts_and_slow_readers_is_right(data: st.DataObject) -> None:
    """Whatever happens around it, a choice that runs to its end has made exactly its own tokens."""
    runner = CheckingRunner(num_pages=data.draw(st.integers(12, 40)))
    core = core_with(
        runner,
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 13, 64, 512])),
        stream_credit=3,
    )
    live = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort", "read"]))
        if action == "add":
            prompt = prompt_of(data.draw(st.integers(1, 290)), data.draw(st.integers(0, 1)))
            n = data.draw(st.integers(1, 5))
            sinks = [Sink(data.draw(st.sampled_from([0, 2**60]))) for _ in range(n)]
            prefill = prefill_of(prompt, [greedy(data.draw(st.integers(1, 70)))] * n, sinks)
            live += [(sequence, sink) for sequence, sink in zip(prefill.sequences, sinks, strict=True)]
            core.add([prefill])
        elif action == "step":
            core.step()
        elif live:
            sequence, sink = data.draw(st.sampled_from(live))
            if action == "abort":
                core.abort(sequence, EndReason.CANCELLED)
            else:
                sink.num_taken = 2**60
        core.cache.check()
    for _, sink in live:
        sink.num_taken = 2**60
    run_to_end(core)
    assert core.cache.num_held == 0
    for sequence, _ in live:
        made = sequence.output_ids
        assert made == expected(list(sequence.prompt.token_ids), len(made))
