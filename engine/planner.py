"""Turns a schedule into a `StepPlan`: rows, slots and the segments that their attention runs over."""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
from numpy.typing import NDArray

from engine.api import SamplingParams
from engine.plan import KEY_TILE, PAGE_SIZE, AttentionSegment, SamplingRow, StepPlan
from engine.schedule import Chunk, Schedule
from engine.sequence import PAGES_PER_TILE, KVPath, PromptState, Sequence

_CERTAIN = 1e30
"""A bias that no logit outweighs."""


def build_plan(schedule: Schedule, eos_token_ids: frozenset[int]) -> tuple[StepPlan, list[Sequence], list[PromptState]]:
    """The plan, the sequences that its first sampling rows draw for, and the prompts that the others tell of.

    A draft's rows are drawn for too, each as if what was guessed before it were true.
    """
    plan = StepPlan(copies=schedule.copies)
    drawn: list[Sequence] = []
    scored: list[tuple[PromptState, SamplingRow]] = []
    decodes = sorted(schedule.decodes, key=lambda sequence: (sequence.tiles, sequence.id))
    for row, sequence in enumerate(decodes):
        _add_decode(plan, sequence, schedule.draft)
        for ahead in range(len(schedule.draft) + 1):
            _add_draw(plan, sequence, row + ahead, eos_token_ids, schedule.draft[:ahead])
            drawn.append(sequence)
    if schedule.draft:
        _add_own_rest(plan, decodes[0], 0, 0, len(schedule.draft))
    else:
        _add_shared_segments(plan, decodes, 0, len(decodes), 0)
    for chunk in schedule.chunks:
        scored += _add_chunk(plan, chunk)
        for sequence in chunk.drawing:
            _add_draw(plan, sequence, len(plan.logit_rows) - 1, eos_token_ids)
            drawn.append(sequence)
    plan.sampling_rows += [row for _, row in scored]
    return plan, drawn, [prompt for prompt, _ in scored]


def _slot(kv: KVPath, position: int) -> int:
    return kv.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def _add_decode(plan: StepPlan, sequence: Sequence, draft: tuple[int, ...]) -> None:
    assert sequence.kv is not None
    for position, token_id in enumerate((sequence.output_ids[-1], *draft), sequence.num_tokens - 1):
        plan.logit_rows.append(len(plan.token_ids))
        plan.token_ids.append(token_id)
        plan.positions.append(position)
        plan.slots.append(_slot(sequence.kv, position))


def _add_shared_segments(plan: StepPlan, decodes: List[Sequence], first: int, stop: int, depth: int) -> None:
    """Cover rows first..stop-1, which share their first `depth` key tiles: runs that share more, then each one's own
    rest.
    """
    while first < stop:
        tiles = decodes[first].tiles
        end = first + 1
        if len(tiles) > depth:
            while end < stop and len(decodes[end].tiles) > depth and decodes[end].tiles[depth] == tiles[depth]:
                end += 1
        if end - first == 1:
            _add_own_rest(plan, decodes[first], first, depth)
        else:
            deepest = _common_depth(decodes, first, end, depth)
            kv = decodes[first].kv
            assert kv is not None
            pages = kv.pages[depth * PAGES_PER_TILE : deepest * PAGES_PER_TILE]
            base, num_keys = depth * KEY_TILE, (deepest - depth) * KEY_TILE
            plan.segments.append(AttentionSegment(first, end - first, base, num_keys, pages, causal=False))
            _add_shared_segments(plan, decodes, first, end, deepest)
        first = end


def _common_depth(decodes: List[Sequence], first: int, end: int, depth: int) -> int:
    """The number of leading tiles that rows first..end-1 have in common; tuples are sorted, so the outer two decide."""
    low, high = decodes[first].tiles, decodes[end - 1].tiles
    while depth < min(len(low), len(high)) and low[depth] == high[depth]:
        depth += 1
    return depth


def _add_own_rest(plan: StepPlan, sequence: Sequence, row: int, depth: int, num_drafted: int = 0) -> None:
    assert sequence.kv is not None
    base = depth * KEY_TILE
    num_keys = sequence.num_tokens + num_drafted - base
    pages = sequence.kv.pages[depth * PAGES_PER_TILE :]
    plan.segments.append(AttentionSegment(row, 1 + num_drafted, base, num_keys, pages, causal=num_drafted > 0))


def _add_chunk(plan: StepPlan, chunk: Chunk) -> list[tuple[PromptState, SamplingRow]]:
    """Its rows; returned are those of its prompt whose log probabilities are wanted."""
    prefill, kv = chunk.prefill, chunk.prefill.kv
    assert kv is not None
    start, first_row = prefill.num_computed, len(plan.token_ids)
    stop = start + chunk.num_tokens
    plan.token_ids += prefill.token_ids[start:stop]
    plan.positions += range(start, stop)
    plan.slots += [_slot(kv, position) for position in range(start, stop)]
    pages = kv.pages[: -(-stop // PAGE_SIZE)]
    plan.segments.append(AttentionSegment(first_row, chunk.num_tokens, 0, stop, pages, causal=True))
    scored = _add_scored(plan, chunk, first_row) if prefill.prompt.is_scored else []
    if chunk.drawing:
        plan.logit_rows.append(first_row + chunk.num_tokens - 1)
    return scored


def _add_scored(plan: StepPlan, chunk: Chunk, first_row: int) -> list[tuple[PromptState, SamplingRow]]:
    """A row tells of the token that follows it; whatever was computed before need not be told again.

    That token is drawn for certain, by its bias. Log probabilities are those of the model, before any bias.
    """
    prompt, start = chunk.prefill.prompt, chunk.prefill.num_computed
    rows = []
    for position in range(len(prompt.info.logprobs), min(start + chunk.num_tokens, len(prompt.token_ids) - 1)):
        bias = ((prompt.token_ids[position + 1], _CERTAIN),)
        params = SamplingParams(seed=0, temperature=0.0, logit_bias=bias, logprobs=prompt.num_logprobs)
        rows.append((prompt, SamplingRow(len(plan.logit_rows), position + 1, params, (), ())))
        plan.logit_rows.append(first_row + position - start)
    return rows


def _add_draw(
    plan: StepPlan,
    sequence: Sequence,
    logits_row: int,
    eos_token_ids: frozenset[int],
    guessed: tuple[int, ...] = (),
) -> None:
    """guessed: tokens that are taken to follow the sequence's own."""
    params = sequence.params
    output_ids = [*sequence.output_ids, *guessed] if guessed else sequence.output_ids
    blocked: tuple[int, ...] = ()
    if len(output_ids) < params.min_tokens:
        blocked = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
    allowed = None
    if sequence.matcher is not None:
        allowed, blocked = _without(sequence.matcher.allowed(), blocked), ()
    plan.sampling_rows.append(
        SamplingRow(
            logits_row=logits_row,
            position=sequence.num_tokens + len(guessed),
            params=params,
            prompt_ids=sequence.prompt.token_ids,
            output_ids=output_ids,
            blocked_ids=blocked,
            allowed=allowed,
        )
    )


def _without(allowed: NDArray[np.uint32], blocked: List[int]) -> NDArray[np.uint32]:
    """The mask less the blocked tokens, unless they are all that is left: a text that can only end does."""
    if not blocked:
        return allowed
    left = allowed.copy()
    for token_id in blocked:
        left[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return left if left.any() else allowed
