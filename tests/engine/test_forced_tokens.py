"""Tokens that a constraint leaves no choice about: taken without a step each, and nobody can tell from the text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.api import Constraint, EndReason, JsonBlock, JsonBlocks, Regex, SamplingParams
from engine.core import EngineCore
from engine.sequence import Prefill
from tests.engine.constrained import RandomRunner, constrained, prefill_for, schema_of, text_of, violations
from tests.engine.support import Sink, core_with, greedy, prefill_of, run_to_end

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "temperature_in_degrees": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_it_raining": {"type": "boolean"},
        "kind": {"enum": ["a" * 70 + "x", "a" * 70 + "y"]},
    },
    "required": ["temperature_in_degrees", "is_it_raining", "kind"],
    "additionalProperties": False,
}
CALL = JsonBlocks(
    (JsonBlock('<tool_call>\n{"name": "weather", "arguments": ', schema_of(SCHEMA), "}\n</tool_call>"),),
    "tools",
    max_blocks=1,
)
PROMPT = [7 + k % 90 for k in range(100)]


@dataclass
class Ran:
    """steps: taken in all. ends: of the choices, in order."""

    texts: list[bytes]
    token_ids: list[list[int]]
    ends: list[Any]
    steps: int


def run(core: EngineCore, constraint: Constraint, n: int = 3, **options: Any) -> Ran:
    prefill: Prefill = prefill_for(PROMPT, [constrained(constraint, seed, **options) for seed in range(n)])
    sequences = list(prefill.sequences)
    core.add([prefill])
    ends: dict[int, Any] = {}
    before = core.num_steps
    while core.has_work:
        for sequence, update in core.step() or ():
            assert sequence.id not in ends and len(update.token_ids) == 1, "each token has an update of its own"
            if update.end_reason is not None:
                ends[sequence.id] = (update.end_reason, update.stop_reason)
        core.cache.check()
    ids = [list(sequence.output_ids) for sequence in sequences]
    return Ran([text_of(s) for s in sequences], ids, [ends[s.id] for s in sequences], core.num_steps - before)


@pytest.mark.parametrize(
    "constraint", [schema_of(SCHEMA), CALL, Regex("[ab]x{150}[cd]", "r")], ids=["json", "call", "long"]
)
@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (256, {}),
        (256, {"max_num_batched_tokens": 8, "max_num_seqs": 8}),
        (256, {"max_num_seqs": 1}),
        (256, {"enable_prefix_caching": False}),
        (16, {}),
        (256, {"stream_credit": 3}),
    ],
    ids=["plain", "small steps", "waves", "no cache", "preemption", "little credit"],
)
def test_the_text_is_the_one_that_single_steps_give(
    constraint: Constraint, num_pages: int, options: dict[str, Any]
) -> None:
    """Log probabilities ask for a step for each token."""
    single = run(core_with(RandomRunner(num_pages=256)), constraint, logprobs=0, max_tokens=300)
    core = core_with(RandomRunner(num_pages=num_pages), **options)
    for _ in range(2):  # the second time on what the first has left in the cache
        forced = run(core, constraint, max_tokens=300)
        assert (forced.token_ids, forced.ends) == (single.token_ids, single.ends)
    if num_pages == 256 and not options:
        assert forced.steps < single.steps / 3, (forced.steps, single.steps)


def test_what_ends_at_a_forced_token_is_cut_there() -> None:
    for max_tokens in range(1, 60):
        single = run(core_with(RandomRunner()), CALL, logprobs=0, n=1, max_tokens=max_tokens)
        forced = run(core_with(RandomRunner()), CALL, n=1, max_tokens=max_tokens)
        assert (forced.token_ids, forced.ends) == (single.token_ids, single.ends)
    stop = single.token_ids[0][12]
    assert run(core_with(RandomRunner()), CALL, n=1, stop_token_ids=(stop,)).ends == [("stop", stop)]


def test_tokens_that_nobody_has_computed_are_not_left_in_the_cache() -> None:
    """The runner refuses a page that does not hold what the prompt says."""
    for length in range(50, 90):
        core = core_with(RandomRunner())
        prefill = prefill_for(PROMPT[:length], [constrained(CALL, 1, max_tokens=25 + length % 9)])
        (sequence,) = prefill.sequences
        core.add([prefill])
        run_to_end(core)
        again = prefill_of([*sequence.token_ids, 5, 6], [greedy(2)])
        core.add([again])
        run_to_end(core)


def test_a_reader_that_is_behind_gets_no_forced_tokens() -> None:
    sink = Sink(num_taken=0)
    core = core_with(RandomRunner(), stream_credit=4)
    prefill = prefill_for(PROMPT, [constrained(CALL, 1)])
    (sequence,) = prefill.sequences
    sequence.sink = sink
    core.add([prefill])
    while core.step() is not None:
        pass
    assert len(sequence.output_ids) <= 5
    sink.num_taken = 2**60
    run_to_end(core)
    assert json.loads(text_of(sequence).removeprefix(b"<tool_call>").removesuffix(b"</tool_call>"))


def test_a_long_prompt_does_not_hold_up_a_forced_run() -> None:
    core = core_with(RandomRunner(num_pages=256), max_num_batched_tokens=32, max_num_seqs=8)
    alone = run(core, CALL, n=1).steps
    call = prefill_for(PROMPT[:64], [constrained(CALL, 0)])
    (sequence,) = call.sequences
    core.add([call])
    while not sequence.output_ids:
        core.step()
    core.add([prefill_of([7 + k % 80 for k in range(2500)], [greedy(1)])])
    for _ in range(2 * alone):
        core.step()
    assert sequence.ended
    run_to_end(core)


def test_company_that_is_not_constrained_goes_on_meanwhile() -> None:
    free = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    alone = prefill_of(PROMPT, [free])
    core = core_with(RandomRunner())
    core.add([alone])
    (expected,) = alone.sequences
    run_to_end(core)
    both = prefill_for(PROMPT, [free, constrained(CALL, 1), replace(free, seed=4)])
    (first, call, _) = both.sequences
    core.add([both])
    for made in range(1, 20):
        core.step()
        assert len(first.output_ids) == made, "a forced run held up another choice"
    run_to_end(core)
    assert first.output_ids == expected.output_ids
    assert violations({}, b'""') == [] and call.ended


def request_of(rng: random.Random, number: int) -> Prefill:
    prompt = [7 + rng.randrange(3) for _ in range(rng.choice([3, 40, 64, 90]))]
    kinds: list[Constraint | None] = [CALL, schema_of(SCHEMA), Regex("[ab]x{90}[cd]", "r"), None]
    constraint = rng.choice(kinds)
    params = [constrained(constraint, 10 * number + k, max_tokens=rng.randint(1, 90)) for k in range(rng.randint(1, 3))]
    prefill = prefill_for(prompt, params)
    state = replace(prefill.prompt, num_logprobs=rng.choice([None, None, 0, 3]))
    for sequence in prefill.sequences:
        sequence.prompt = state
    return replace(prefill, prompt=state)


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_in_little_memory_gives_each_what_it_gives_alone(seed: int) -> None:
    """Forced runs, scored prompts, preemption, waves and aborts at once; the runner checks every page."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    core = core_with(RandomRunner(num_pages=13), **options)
    crowd = [request_of(random.Random(100 * seed + k), k) for k in range(12)]
    members = [list(prefill.sequences) for prefill in crowd]
    rng = random.Random(seed)
    waiting, aborted = list(crowd), set()
    while waiting or core.has_work:
        if waiting and rng.random() < 0.3:
            core.add([waiting.pop()])
        core.step()
        core.cache.check()
        if rng.random() < 0.02:
            victim = rng.choice(members[rng.randrange(12)])
            if victim.output_ids and core.abort(victim, EndReason.CANCELLED) is not None:
                aborted.add(victim.id)
    for number, sequences in enumerate(members):
        alone = request_of(random.Random(100 * seed + number), number)
        expected = list(alone.sequences)
        single = core_with(RandomRunner(num_pages=64))
        single.add([alone])
        run_to_end(single)
        assert crowd[number].prompt.info.logprobs == alone.prompt.info.logprobs
        for ours, theirs in zip(sequences, expected, strict=True):
            if ours.id in aborted:
                assert theirs.output_ids[: len(ours.output_ids)] == ours.output_ids
            else:
                assert ours.output_ids == theirs.output_ids
