"""A plan that reaches outside the model, the pool or the batch raises ValueError, and no memory is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.api import SamplingParams
from engine.native.runner import NativeRunner
from engine.plan import StepPlan
from tests.native.models import VOCAB, runner_of, tokens
from tests.native.plans import Pages, PlanBuilder, Text


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    return runner_of("llama", num_pages=20)


def good_plan() -> StepPlan:
    """A decode row and a chunk of 40 rows with logits, two samples."""
    pages = Pages(20)
    builder = PlanBuilder(pages)
    decoding = Text([*tokens(20), 5], computed=20, pages=pages.take())
    builder.add_decodes([decoding])
    builder.add_chunk(Text(tokens(40)))
    return builder.plan


def segment(plan: StepPlan, index: int, **changes: Any) -> None:
    plan.segments[index] = replace(plan.segments[index], **changes)


def params(plan: StepPlan, **changes: Any) -> None:
    plan.sampling_rows[0].params = SamplingParams(seed=0, **changes)


BAD: dict[str, Callable[[StepPlan], object]] = {
    "no rows": lambda p: (p.token_ids.clear(), p.positions.clear(), p.slots.clear()),
    "unequal lists": lambda p: p.slots.pop(),
    "token": lambda p: p.token_ids.__setitem__(3, VOCAB),
    "negative token": lambda p: p.token_ids.__setitem__(3, -1),
    "huge token": lambda p: p.token_ids.__setitem__(3, 2**40),
    "no number": lambda p: p.token_ids.__setitem__(3, None),  # type: ignore[arg-type]
    "position": lambda p: p.positions.__setitem__(40, 2048),
    "negative position": lambda p: p.positions.__setitem__(1, -1),
    "slot": lambda p: p.slots.__setitem__(5, 20 * 32 + 4),
    "negative slot": lambda p: p.slots.__setitem__(1, -32),
    "huge slot": lambda p: p.slots.__setitem__(1, 2**63),
    "slot of another offset": lambda p: p.slots.__setitem__(5, p.slots[5] + 1),
    "slot twice": lambda p: p.slots.__setitem__(33, p.slots[1]),
    "slot in a page that is not read": lambda p: p.slots.__setitem__(5, 19 * 32 + 4),
    "segment rows": lambda p: segment(p, 1, num_rows=41),
    "segment row count overflows": lambda p: segment(p, 1, num_rows=2**31 - 1),
    "no segment rows": lambda p: segment(p, 1, num_rows=0),
    "negative first row": lambda p: segment(p, 1, first_row=-1),
    "base within a tile": lambda p: segment(p, 1, base=32),
    "base beyond the rows": lambda p: segment(p, 1, base=256),
    "too many keys for the pages": lambda p: segment(p, 1, num_keys=65),
    "key count overflows": lambda p: segment(p, 1, num_keys=2**31 - 1),
    "no keys": lambda p: segment(p, 1, num_keys=0),
    "too few keys": lambda p: segment(p, 1, num_keys=39),
    "keys after the row": lambda p: segment(p, 0, num_keys=22, causal=False),
    "page": lambda p: segment(p, 1, pages=[*p.segments[1].pages[:1], 20]),
    "negative page": lambda p: segment(p, 1, pages=[-1, *p.segments[1].pages[1:]]),
    "rows without keys": lambda p: p.segments.pop(),
    "a segment twice": lambda p: p.segments.append(p.segments[1]),
    "copy source": lambda p: p.copies.append((20, 0)),
    "copy target": lambda p: p.copies.append((0, -1)),
    "logit row": lambda p: p.logit_rows.__setitem__(1, 41),
    "logit rows out of order": lambda p: p.logit_rows.reverse(),
    "sample without logits": lambda p: setattr(p.sampling_rows[0], "logits_row", 2),
    "negative position of a draw": lambda p: setattr(p.sampling_rows[0], "position", -1),
    "negative top_k": lambda p: params(p, top_k=-1),
    "huge biased token": lambda p: params(p, logit_bias=((2**31, 1.0),)),
    "biased token": lambda p: params(p, logit_bias=((VOCAB, 1.0),)),
    "blocked token": lambda p: setattr(p.sampling_rows[0], "blocked_ids", (-1,)),
    "penalised token": lambda p: (
        params(p, frequency_penalty=1.0),
        setattr(p.sampling_rows[0], "output_ids", [VOCAB]),
    ),
    "prompt token": lambda p: (
        params(p, repetition_penalty=1.5),
        setattr(p.sampling_rows[0], "prompt_ids", [2**31 - 1]),
    ),
    "temperature": lambda p: params(p, temperature=float("nan")),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_plan_raises_and_the_next_one_runs(bad: str, runner: NativeRunner) -> None:
    plan = good_plan()
    BAD[bad](plan)
    with pytest.raises(ValueError):
        runner.execute(plan)
    assert len(runner.execute(good_plan())) == 2
