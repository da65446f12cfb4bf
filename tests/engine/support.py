"""Helpers of the engine tests: driving an EngineCore without a thread, and a runner without a model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from engine.api import PromptInfo, SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.plan import PAGE_SIZE, AttentionSegment, ModelRunner, SampledToken, StepPlan
from engine.sequence import Prefill, PromptState, Sequence

_arrivals = itertools.count()


@dataclass
class Sink:
    """A reader that has always taken everything, unless told otherwise."""

    num_taken: int = 2**60


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def prefill_of(
    prompt: list[int],
    choices: list[SamplingParams],
    sinks: list[Sink] | None = None,
    *,
    owner: str = "",
    priority: int = 0,
    prompt_logprobs: int | None = None,
) -> Prefill:
    order = (priority, next(_arrivals))
    state = PromptState(tuple(prompt), owner, "", order, next(_arrivals), PromptInfo(len(prompt)), prompt_logprobs)
    sinks = sinks or [Sink() for _ in choices]
    sequences = [
        Sequence(state, p, s, 16 if p.max_tokens is None else p.max_tokens) for p, s in zip(choices, sinks, strict=True)
    ]
    return Prefill(state, state.token_ids, sequences)


def run_to_end(core: EngineCore, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not core.has_work:
            return
        core.step()
        core.cache.check()
    raise AssertionError("the engine does not come to an end")


def generate(core: EngineCore, prompts: list[list[int]], choices: list[SamplingParams]) -> list[list[list[int]]]:
    """The output ids of every choice of every prompt, all admitted at once."""
    prefills = [prefill_of(prompt, choices) for prompt in prompts]
    groups = [list(prefill.sequences) for prefill in prefills]
    core.add(prefills)
    run_to_end(core)
    return [[sequence.output_ids for sequence in group] for group in groups]


@dataclass
class CheckingRunner:
    """A runner without a model that checks every plan against a record of what each slot holds.

    The next token is a hash of the whole context, so a wrong page, a lost copy or a wrong segment changes the output.
    """

    num_pages: int = 64
    name: str = "checking"
    bitwise: bool = True
    vocab_size: int = 1000
    max_model_len: int = 1024
    eos_token_ids: frozenset[int] = frozenset({999})
    model_path: str | None = None
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (position, token id)
    num_rows: int = 0
    max_rows: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.plans.append(plan)
        self.num_rows += len(plan.token_ids)
        self.max_rows = max(self.max_rows, len(plan.token_ids))
        for source, target in plan.copies:
            for offset in range(PAGE_SIZE):
                self.slots.pop(target * PAGE_SIZE + offset, None)
                if (source * PAGE_SIZE + offset) in self.slots:
                    self.slots[target * PAGE_SIZE + offset] = self.slots[source * PAGE_SIZE + offset]
        assert len(set(plan.slots)) == len(plan.slots), "two rows write one slot"
        for token_id, position, slot in zip(plan.token_ids, plan.positions, plan.slots, strict=True):
            assert slot % PAGE_SIZE == position % PAGE_SIZE
            self.slots[slot] = (position, token_id)
        return [self._draw(plan, row.logits_row, row.position) for row in plan.sampling_rows]

    def _draw(self, plan: StepPlan, logits_row: int, position: int) -> SampledToken:
        row = plan.logit_rows[logits_row]
        assert plan.positions[row] == position - 1
        context = self.context(plan.segments, row, plan.positions[row])
        return SampledToken(next_token(context))

    def context(self, segments: list[AttentionSegment], row: int, position: int) -> list[int]:
        """The tokens that a row attends to, which must be exactly those of positions 0..position."""
        seen: list[int] = []
        for segment in segments:
            if segment.first_row <= row < segment.first_row + segment.num_rows:
                assert segment.base == len(seen) and segment.base % 256 == 0
                for index in range(segment.num_keys):
                    if segment.causal and segment.base + index > position:
                        break
                    slot = segment.pages[index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
                    held_position, token_id = self.slots[slot]
                    assert held_position == segment.base + index, "a page holds another position"
                    seen.append(token_id)
        assert len(seen) == position + 1
        return seen


def next_token(context: list[int]) -> int:
    value = 7
    for token_id in context:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % 998


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


def core_with(runner: ModelRunner, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(**options), runner)
