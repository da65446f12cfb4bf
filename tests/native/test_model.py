"""The native step against transformers in float32: every family, prefill, decoding, forks, copies and mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.native.runner import unsupported_reason
from tests.native.models import FAMILIES, VOCAB, error, oracle_logits, poison, runner_of, tiny, tokens
from tests.native.plans import Pages, PlanBuilder, Text

TOLERANCE = 0.02
"""Of the logits' spread, root mean square; transformers' own bfloat16 is off by up to 0.019 on these models."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_of_a_prefill(family: str) -> None:
    assert unsupported_reason(tiny(family).model, torch.bfloat16) is None
    runner = runner_of(family)
    for length in (1, 33, 530):
        poison(runner)
        builder = PlanBuilder(Pages(160))
        builder.add_chunk(Text(tokens(length)))
        builder.want_all_logits()
        (drawn,) = runner.execute(builder.plan)
        want = oracle_logits(family, tokens(length))
        assert runner.last_logits.shape == (length, VOCAB)
        assert error(runner.last_logits, want) < TOLERANCE
        assert drawn.token_id == int(runner.last_logits[-1].argmax())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_prompt", [40, 290, 512])
def test_forks_decode_under_a_shared_prompt(family: str, num_prompt: int) -> None:
    """A lost copy, a wrong page or a wrong border between the shared and the own segment shows in the logits."""
    runner = runner_of(family)
    poison(runner)
    pages = Pages(160)
    prompt = Text(tokens(num_prompt))
    while prompt.computed < num_prompt:
        builder = PlanBuilder(pages)
        builder.add_chunk(prompt, 100)
        runner.execute(builder.plan)
    builder = PlanBuilder(pages)
    forks = builder.fork(prompt, 3)
    for step in range(35):
        for choice, fork in enumerate(forks):
            fork.token_ids.append(tokens(40, seed=choice)[step])
        builder.add_decodes(forks, num_prompt)
        drawn = runner.execute(builder.plan)
        builder = PlanBuilder(pages)
    want = np.stack([oracle_logits(family, fork.token_ids)[-1] for fork in forks])
    assert error(runner.last_logits, want) < TOLERANCE
    assert [token.token_id for token in drawn] == runner.last_logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_decodes_and_chunks(family: str) -> None:
    runner = runner_of(family)
    poison(runner)
    pages = Pages(160)
    texts = [Text(tokens(length, seed=length)) for length in (5, 64, 257, 300, 31)]
    first = PlanBuilder(pages)
    for text in texts[:3]:
        first.add_chunk(text)
    first.add_chunk(texts[3], 270)
    runner.execute(first.plan)
    for text in texts[:3]:
        text.token_ids.append(9)
    mixed = PlanBuilder(pages)
    mixed.add_decodes(texts[:3])
    mixed.add_chunk(texts[3], split_at=256)
    mixed.add_chunk(texts[4])
    runner.execute(mixed.plan)
    want = np.stack([oracle_logits(family, text.token_ids)[-1] for text in texts])
    assert error(runner.last_logits, want) < TOLERANCE


def test_a_step_whose_logits_nobody_wants_still_writes_its_keys() -> None:
    runner = runner_of("llama")
    poison(runner)
    pages = Pages(160)
    text = Text(tokens(80))
    first = PlanBuilder(pages)
    first.add_chunk(text, 50)
    assert first.plan.logit_rows == [] and runner.execute(first.plan) == []
    second = PlanBuilder(pages)
    second.add_chunk(text)
    runner.execute(second.plan)
    assert error(runner.last_logits[0], oracle_logits("llama", text.token_ids)[-1]) < TOLERANCE


def test_a_page_copied_twice_in_one_plan() -> None:
    runner = runner_of("llama")
    text = Text(tokens(40))
    builder = PlanBuilder(Pages(160))
    builder.add_chunk(text)
    runner.execute(builder.plan)
    last = text.pages[1]
    moved = Text([*text.token_ids, 9], 40, [text.pages[0], 101])
    copied = PlanBuilder(Pages(160))
    copied.plan.copies = [(last, 100), (100, 101)]
    copied.add_decodes([moved])
    runner.execute(copied.plan)
    assert error(runner.last_logits[0], oracle_logits("llama", moved.token_ids)[-1]) < TOLERANCE


def test_nan_in_one_text_fails_that_row_alone() -> None:
    runner = runner_of("llama")
    pages = Pages(160)
    texts = [Text(tokens(40, seed=1)), Text(tokens(40, seed=2))]
    builder = PlanBuilder(pages)
    for text in texts:
        builder.add_chunk(text)
    runner.execute(builder.plan)
    pointer, size = runner.engine.pool()
    pool = np.ctypeslib.as_array(pointer, (size,)).reshape(3, 160, -1)
    pool[1, texts[0].pages[0]] = 0x7FC0
    builder = PlanBuilder(pages)
    for text in texts:
        text.token_ids.append(9)
    builder.add_decodes(texts)
    broken, whole = runner.execute(builder.plan)
    assert broken.token_id == -1
    assert whole.token_id == int(oracle_logits("llama", texts[1].token_ids)[-1].argmax())
