"""Same text, same bits: chunks, company, forks, cached prefixes, page numbers and threads change nothing.

Every pool is full of NaN at the start, so a result that depends on a slot that was never written is NaN.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.api import SamplingParams
from engine.native.runner import NativeRunner
from engine.plan import PAGE_SIZE
from tests.native.bits import NUM_PAGES, Bits, Checker, logits_alone
from tests.native.models import poison, runner_of, tokens
from tests.native.plans import Pages, PlanBuilder, Text

LENGTH = 620


@pytest.fixture(scope="module", params=["llama", "mistral-window", "qwen3-heads128"])
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    return runner_of(request.param, num_pages=NUM_PAGES)


@pytest.fixture(scope="module")
def alone(runner: NativeRunner) -> Bits:
    return logits_alone(runner, tokens(LENGTH))


def checker(runner: NativeRunner, alone: Bits, *, all_rows: bool = True) -> Checker:
    poison(runner)
    return Checker(runner, lambda text: alone, all_rows=all_rows)


def prefill(check: Checker, pages: Pages, text: Text, chunk: int | None = None) -> Text:
    while text.computed < len(text.token_ids):
        builder = PlanBuilder(pages)
        builder.add_chunk(text, chunk)
        check.run(builder)
    return text


def decode(check: Checker, pages: Pages, texts: list[Text], count: int, num_shared: int, builder: PlanBuilder) -> None:
    """Give all texts the next `count` tokens of the one known text, a row each per step."""
    for _ in range(count):
        for text in texts:
            text.token_ids.append(tokens(LENGTH)[len(text.token_ids)])
        builder.add_decodes(texts, num_shared)
        check.run(builder)
        builder = PlanBuilder(pages)


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("chunk", [13, 16, 64, 200])
def test_chunk_size(runner: NativeRunner, alone: Bits, chunk: int, all_rows: bool) -> None:
    check = checker(runner, alone, all_rows=all_rows)
    prefill(check, Pages(NUM_PAGES), Text(tokens(LENGTH)), chunk)
    assert check.same


@pytest.mark.parametrize("num_forks", [1, 3, 8])
@pytest.mark.parametrize("num_prompt", [100, 256, 500])
def test_number_of_choices(runner: NativeRunner, alone: Bits, num_prompt: int, num_forks: int) -> None:
    check, pages = checker(runner, alone), Pages(NUM_PAGES, stride=11)
    prompt = prefill(check, pages, Text(tokens(num_prompt)))
    builder = PlanBuilder(pages)
    decode(check, pages, builder.fork(prompt, num_forks), 40, num_prompt, builder)
    assert check.same


def test_a_token_has_the_same_keys_and_values_as_a_decode_row_and_in_a_prefill(runner: NativeRunner) -> None:
    """So what an answer leaves behind is as good a prefix for the next turn as a prefilled one."""
    pools = []
    for num_prompt in (300, 300 + 45):
        poison(runner)
        pages = Pages(NUM_PAGES)
        text = Text(tokens(num_prompt))
        builder = PlanBuilder(pages)
        builder.add_chunk(text)
        runner.execute(builder.plan)
        while len(text.token_ids) < 345:
            text.token_ids.append(tokens(345)[len(text.token_ids)])
            builder = PlanBuilder(pages)
            builder.add_decodes([text])
            runner.execute(builder.plan)
        pointer, size = runner.engine.pool()
        pools.append(np.ctypeslib.as_array(pointer, (size,)).copy())
    assert np.array_equal(*pools)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_number_of_threads(num_threads: int) -> None:
    two = logits_alone(runner_of("llama"), tokens(LENGTH))
    other = runner_of("llama", num_threads=num_threads)
    check, pages = checker(other, two), Pages(NUM_PAGES)
    prompt = prefill(check, pages, Text(tokens(530)), 300)
    builder = PlanBuilder(pages)
    decode(check, pages, builder.fork(prompt, 5), 40, 530, builder)
    assert check.same


def test_a_cached_prefix_may_end_at_any_page(runner: NativeRunner, alone: Bits) -> None:
    """The rest attends to it through one segment or through a shared one before its own."""
    check, pages = checker(runner, alone), Pages(NUM_PAGES)
    cached = prefill(check, pages, Text(tokens(600)))
    for num_pages in range(1, 600 // PAGE_SIZE + 1):
        for split_at in (0, 256, 512):
            start = num_pages * PAGE_SIZE
            own = Pages(NUM_PAGES)
            own.take(NUM_PAGES - 10)
            text = Text(tokens(start + 70)[:LENGTH], start, cached.pages[:num_pages])
            builder = PlanBuilder(own)
            builder.add_chunk(text, split_at=split_at)
            assert set(text.pages[num_pages:]).isdisjoint(cached.pages)
            check.run(builder)
    assert check.same


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule(runner: NativeRunner, seed: int) -> None:
    """Texts that share prefixes are prefilled in random chunks, forked and decoded beside one another."""
    rng = random.Random(seed)
    full: dict[int, Bits] = {}
    ids: dict[int, list[int]] = {}
    for kind in range(3):
        ids[kind] = [kind + 3, *tokens(rng.randrange(80, 560), seed=kind)]
        full[kind] = logits_alone(runner, ids[kind])
    poison(runner)
    check = Checker(runner, lambda text: full[text.token_ids[0] - 3])
    pages = Pages(NUM_PAGES, stride=rng.choice([1, 3, 7, 13]))
    waiting = [Text(ids[kind][: rng.randrange(1, len(ids[kind]) - 30)]) for kind in range(3)]
    groups: list[tuple[list[Text], int]] = []  # forks and the prompt that they share
    for _ in range(60):
        builder = PlanBuilder(pages)
        for index, (texts, num_shared) in enumerate(groups):
            if rng.random() < 0.2:
                continue
            if texts[0].computed == num_shared == len(texts[0].token_ids) and len(texts) == 1:
                texts = builder.fork(texts[0], rng.choice([1, 2, 5]))
                groups[index] = (texts, num_shared)
            kind = texts[0].token_ids[0] - 3
            if len(texts[0].token_ids) < len(ids[kind]):
                for text in texts:
                    text.token_ids.append(ids[kind][len(text.token_ids)])
                builder.add_decodes(texts, num_shared)
        for text in waiting[:2]:
            builder.add_chunk(text, rng.choice([1, 7, 33, 130, 400]), split_at=rng.choice([0, 256]))
            if text.computed == len(text.token_ids):
                waiting.remove(text)
                groups.append(([text], text.computed))
        if builder.plan.token_ids:
            check.run(builder)
    assert check.num_compared > 200
    assert check.same


def test_draws_and_logprobs_follow(runner: NativeRunner) -> None:
    """Choice i of n is the answer of seed + i alone, whoever else is drawn beside it."""
    params = SamplingParams(seed=11, temperature=1.3, top_p=0.97, min_p=0.001, logprobs=3, frequency_penalty=0.1)

    def answers(seeds: list[int], company: int) -> list[list[object]]:
        poison(runner)
        pages = Pages(NUM_PAGES)
        prompt = Text(tokens(270), params=params)
        others = [Text(tokens(40 + i, seed=i)) for i in range(company)]
        builder = PlanBuilder(pages)
        builder.add_chunk(prompt, draws=0)
        for other in others:
            builder.add_chunk(other)
        runner.execute(builder.plan)
        builder = PlanBuilder(pages)
        forks = builder.fork(prompt, max(seeds) - params.seed + 1)
        forks = [fork for fork in forks if fork.params.seed in seeds]
        results: list[list[object]] = [[] for _ in forks]
        for step in range(20):
            for fork in forks:
                if step == 0:
                    fork.token_ids.append(5)
            for other in others:
                other.token_ids.append(7)
            builder.add_decodes(others)
            builder.add_decodes(forks, 270)
            drawn = runner.execute(builder.plan)[len(others) :]
            for fork, token, result in zip(forks, drawn, results, strict=True):
                fork.token_ids.append(token.token_id)
                result.append(token)
            builder = PlanBuilder(pages)
        return results

    together = answers(list(range(11, 19)), company=7)
    assert len({str(answer) for answer in together}) == 8
    for seed in (11, 14, 18):
        assert answers([seed], company=0) == [together[seed - 11]]
