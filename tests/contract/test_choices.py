"""What a choice says depends on its prompt, its parameters and its seed, on nothing else."""

from __future__ import annotations

import random

import anyio
import pytest

from engine.api import Capability, EndReason, Request
from tests.contract.harness import FAILING_SEED, LONG, EngineCase, answers, read_all, request, running, take

pytestmark = pytest.mark.anyio


async def test_choice_i_of_n_is_the_single_answer_of_seed_plus_i(case: EngineCase) -> None:
    async with running(case) as engine:
        together = await answers(engine, request(6, seed=40))
        alone = [(await answers(engine, request(1, seed=40 + k)))[0] for k in range(6)]
        assert together == alone
        assert len({tuple(tokens) for tokens in together}) > 1


async def test_choices_of_a_list_stand_at_prompt_times_n_plus_choice(case: EngineCase) -> None:
    async with running(case) as engine:
        prompts = [(21,), (22, 23), tuple(range(30, 80))]
        together = await answers(engine, *(request(2, prompt=prompt) for prompt in prompts))
        apart = [tokens for prompt in prompts for tokens in await answers(engine, request(2, prompt=prompt))]
        assert together == apart


async def test_prompt_facts_are_those_of_each_request(case: EngineCase) -> None:
    async with running(case) as engine, engine.submit([request(2), request(2, prompt=[11] * 50)]) as submission:
        await read_all(submission.choices)
        assert [prompt.num_tokens for prompt in submission.prompts] == [3, 50]
        assert all(0 <= prompt.num_cached_tokens < 50 for prompt in submission.prompts)


async def test_more_choices_than_places_run_in_waves(case: EngineCase) -> None:
    async with running(case, max_num_seqs=2) as engine:
        waves = await answers(engine, request(7))
    async with running(case, max_num_seqs=7) as engine:
        assert await answers(engine, request(7)) == waves


async def test_company_changes_no_answer(case: EngineCase) -> None:
    requests = [request(1 + k % 3, seed=100 * k, prompt=[11 + k] * (1 + 7 * k), max_tokens=5 + k) for k in range(5)]
    async with running(case, max_num_seqs=16) as engine:
        alone = [await answers(engine, one) for one in requests]
        results: dict[int, list[list[int]]] = {}

        async def ask(index: int) -> None:
            results[index] = await answers(engine, requests[index])

        async with anyio.create_task_group() as group:
            for index in range(len(requests)):
                group.start_soon(ask, index)
        assert [results[index] for index in range(len(requests))] == alone


async def test_survivors_of_random_cancellations_are_undisturbed(case: EngineCase) -> None:
    # a cancelled request once took another client's with it
    chance = random.Random(3)
    requests = [request(1, seed=k, prompt=[11 + k % 9] * (1 + k), max_tokens=12) for k in range(12)]
    leavers = {index: chance.randint(0, 6) for index in chance.sample(range(12), 6)}
    async with running(case, max_num_seqs=4) as engine:
        alone = [(await answers(engine, one))[0] for one in requests]
        results: dict[int, list[int]] = {}

        async def ask(index: int) -> None:
            async with engine.submit([requests[index]]) as submission:
                if index in leavers:
                    await take(submission.choices[0], leavers[index])
                else:
                    ((tokens, _),) = await read_all(submission.choices)
                    results[index] = tokens

        async with anyio.create_task_group() as group:
            for index in range(len(requests)):
                group.start_soon(ask, index)
        assert results == {index: alone[index] for index in range(12) if index not in leavers}


async def test_greedy_choices_are_alike_whatever_their_seeds(case: EngineCase) -> None:
    async with running(case) as engine:
        first, *others = await answers(engine, request(4, temperature=0.0))
        assert others == [first] * 3


async def test_choices_of_one_request_may_be_drawn_differently(case: EngineCase) -> None:
    async with running(case) as engine:
        short, long = request(1, seed=1, max_tokens=2), request(1, seed=2, max_tokens=9, temperature=0.0)
        both = Request("m", short.prompt, short.choices + long.choices)
        assert await answers(engine, both) == await answers(engine, short) + await answers(engine, long)


async def test_length_ends_a_choice_with_its_last_token(case: EngineCase) -> None:
    async with running(case) as engine, engine.submit([request(2, max_tokens=5)]) as submission:
        for tokens, last in await read_all(submission.choices):
            assert len(tokens) == 5
            assert (last.end_reason, last.stop_reason) == (EndReason.LENGTH, None)
            assert last.token_ids or Capability.TOKENS_OUT not in engine.info.capabilities


async def test_stop_token_is_the_last_one_and_the_reason(case: EngineCase) -> None:
    async with running(case) as engine:
        (tokens,) = await answers(engine, request(seed=5, max_tokens=20))
        stop = tokens[9]
        async with engine.submit([request(seed=5, max_tokens=20, stop_token_ids=(stop,))]) as submission:
            ((stopped, last),) = await read_all(submission.choices)
        is_told = Capability.TOKENS_OUT in engine.info.capabilities  # it is no text
        assert stopped == tokens[: tokens.index(stop) + is_told]
        assert (last.end_reason, last.stop_reason) == (EndReason.STOP, stop)


async def test_no_stop_token_comes_before_min_tokens(case: EngineCase) -> None:
    async with running(case) as engine:
        (tokens,) = await answers(engine, request(seed=5, max_tokens=20))
        stops = tuple(set(tokens[:3]))
        (held,) = await answers(engine, request(seed=5, max_tokens=20, min_tokens=6, stop_token_ids=stops))
        assert not set(held[:6]) & set(stops)


async def test_end_of_sequence_has_no_stop_reason(case: EngineCase) -> None:
    first = eos = None
    async with running(case) as engine:
        if engine.info.eos_token_ids:
            (eos, *_) = engine.info.eos_token_ids
            eager = request(max_tokens=LONG, logit_bias=((eos, 100.0),), temperature=0.0, ignore_eos=False)
            async with engine.submit([eager]) as submission:
                (stream,) = submission.choices
                (first,) = await take(stream, 1)
    # not within the engine's task group, which would make another error of it
    if first is None:
        pytest.skip("nobody knows which token it is")
    if first.end_reason is None:
        pytest.skip("this engine never ends by itself")
    assert (first.token_ids, first.end_reason, first.stop_reason) == ((eos,), EndReason.STOP, None)


async def test_failing_choice_says_so_and_leaves_its_siblings_unharmed(case: EngineCase) -> None:
    if not case.has_failing_seed:
        pytest.skip("cannot be made to fail")
    async with running(case) as engine:
        siblings = [await answers(engine, request(1, seed=FAILING_SEED + k, max_tokens=20)) for k in (-1, 1)]
        async with engine.submit([request(3, seed=FAILING_SEED - 1, max_tokens=20)]) as submission:
            before, (tokens, last), after = await read_all(submission.choices)
        assert (last.end_reason, len(tokens)) == (EndReason.ERROR, 2)
        assert last.error
        assert [[before[0]], [after[0]]] == siblings
