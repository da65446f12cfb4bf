"""Streams that are aborted, closed, not read, or read too long."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from engine.api import Capability, ChoiceStream, ChoiceUpdate, EndReason, Engine, Request
from tests.contract.harness import (
    CONFIG,
    LONG,
    PATIENT,
    EngineCase,
    answers,
    occupied,
    read,
    read_all,
    request,
    running,
    take,
    tokens_of,
    until,
)

pytestmark = pytest.mark.anyio

STAGES = ["queued", "prefill", "decoding", "some ended"]
WAYS = ["leave", "cancel", "raise", "aclose", "abort"]


async def test_aborted_choice_ends_with_that_reason_and_its_siblings_go_on(case: EngineCase) -> None:
    async with running(case) as engine:
        alone = await answers(engine, request(3, max_tokens=40))
        async with engine.submit([request(3, max_tokens=40)]) as submission:
            first, second, third = submission.choices
            begun = await take(second, 2)
            second.abort(EndReason.STOP)
            rest, last = await read(second)
            assert last.end_reason is EndReason.STOP
            made = [token_id for update in begun for token_id in tokens_of(update)] + rest
            assert made == alone[1][: len(made)]
            # its memory is free while the others still have theirs
            await until(lambda: engine.health().num_running == 2)
            assert [tokens for tokens, _ in await read_all([first, third])] == [alone[0], alone[2]]


async def test_choice_that_ends_early_frees_its_place_while_its_siblings_run(case: EngineCase) -> None:
    async with running(case) as engine:
        short, long = request(1, max_tokens=1), request(1, max_tokens=LONG)
        async with engine.submit([short, long]) as submission:
            await read(submission.choices[0])
            await until(lambda: engine.health().num_running == 1)


async def reach(engine: Engine, stage: str) -> None:
    """Wait until what was just submitted is (very likely, for prefill) in that stage."""
    if stage == "queued":
        await until(lambda: engine.health().num_waiting == 2)
    elif stage == "prefill":
        await until(lambda: engine.health().prompt_tokens > 0)
    elif stage == "decoding":
        await until(lambda: engine.health().generation_tokens > 0)
    else:
        await until(lambda: engine.health().num_running == 1 and engine.health().generation_tokens > 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
async def test_whatever_is_given_up_is_freed_at_once(case: EngineCase, stage: str, way: str) -> None:
    budget = 8 if stage == "prefill" else CONFIG.max_num_batched_tokens
    batch = [request(2, max_tokens=60, prompt=[15] * (400 if stage == "prefill" else 10))]
    if stage == "some ended":
        batch = [request(1, max_tokens=1), request(1, max_tokens=LONG)]
    credit = PATIENT if stage == "queued" else CONFIG.stream_credit
    if stage == "prefill" and not case.has_steps:
        pytest.skip("nobody sees it begin")
    async with running(case, max_num_batched_tokens=budget, stream_credit=credit) as engine:
        with anyio.CancelScope() as given_up:
            if stage == "queued":
                async with occupied(engine):
                    await give_up(engine, batch, stage, way, given_up)
            else:
                await give_up(engine, batch, stage, way, given_up)
    # `running` has checked that nothing is held


async def give_up(engine: Engine, batch: list[Request], stage: str, way: str, scope: anyio.CancelScope) -> None:
    class GivenUp(Exception):
        pass

    try:
        async with engine.submit(batch) as submission:
            await reach(engine, stage)
            if way == "cancel":
                scope.cancel()
                await read_all(submission.choices)
            elif way == "raise":
                raise GivenUp
            elif way == "aclose":
                for stream in submission.choices:
                    await stream.aclose()
                assert await drained(submission.choices) == []
            elif way == "abort":
                for stream in submission.choices:
                    stream.abort(EndReason.CANCELLED)
                ends = [last.end_reason for _, last in await read_all(submission.choices)]
                assert set(ends) <= {EndReason.CANCELLED, EndReason.LENGTH}
    except GivenUp:
        pass


async def drained(streams: Sequence[ChoiceStream]) -> list[ChoiceUpdate]:
    return [update for stream in streams async for update in stream]


async def test_queued_request_that_goes_costs_no_step(case: EngineCase) -> None:
    async with running(case, stream_credit=PATIENT) as engine, occupied(engine):
        computed = engine.health().prompt_tokens
        async with engine.submit([request(2, prompt=[77] * 40)]):
            await until(lambda: engine.health().num_waiting == 2)
        assert engine.health().num_waiting == 0
        assert engine.health().prompt_tokens == computed


async def test_reader_that_is_slow_does_not_hold_up_others_nor_fill_memory(case: EngineCase) -> None:
    async with running(case, needs=Capability.PAUSE) as engine:
        alone = await answers(engine, request(2, max_tokens=200))
        async with engine.submit([request(2, max_tokens=200)]) as submission:
            slow, _ = submission.choices
            for _ in range(3):
                assert len((await answers(engine, request(1, max_tokens=100)))[0]) == 100
            waiting = []
            while (update := slow.receive_nowait()) is not None:
                waiting.append(update)
            # one more may have been under way when the last of them was counted
            assert 0 < len(waiting) <= CONFIG.stream_credit + 1
            # a reader that catches up gets all the rest
            rest, last = await read(slow)
            assert [t for update in waiting for t in tokens_of(update)] + rest == alone[0]
            assert last.end_reason is EndReason.LENGTH


async def test_paused_choices_let_the_engine_rest_and_wake_it_when_they_are_read(case: EngineCase) -> None:
    async with (
        running(case, needs=Capability.PAUSE) as engine,
        engine.submit([request(3, max_tokens=200)]) as submission,
    ):
        await until(lambda: engine.health().generation_tokens >= 3 * CONFIG.stream_credit)
        results = await read_all(submission.choices)
        assert [len(tokens) for tokens, _ in results] == [200] * 3


async def test_readers_that_are_behind_lend_their_places(case: EngineCase) -> None:
    async with running(case, needs=Capability.PAUSE) as engine:
        alone = await answers(engine, request(4, max_tokens=50))
        async with engine.submit([request(4, max_tokens=50)]) as submission:
            await until(lambda: engine.health().generation_tokens >= 4 * 50 + 4 * CONFIG.stream_credit)
            # all places are taken by choices that nobody reads
            assert len((await answers(engine, request(1, seed=99)))[0]) == 8
            assert [tokens for tokens, _ in await read_all(submission.choices)] == alone


async def test_second_abort_and_second_close_do_nothing(case: EngineCase) -> None:
    async with running(case) as engine, engine.submit([request(2, max_tokens=LONG)]) as submission:
        first, second = submission.choices
        first.abort(EndReason.STOP)
        first.abort(EndReason.CANCELLED)
        _, last = await read(first)
        assert last.end_reason is EndReason.STOP
        await second.aclose()
        await second.aclose()
        second.abort(EndReason.STOP)
        assert [update async for update in second] == []


async def test_abort_after_the_end_changes_nothing(case: EngineCase) -> None:
    async with running(case) as engine, engine.submit([request(1, max_tokens=2)]) as submission:
        (stream,) = submission.choices
        await take(stream, 1)
        await until(lambda: engine.health().num_running == 0 and engine.health().num_waiting == 0)
        stream.abort(EndReason.CANCELLED)
        ended = await read(stream)
        assert ended[1].end_reason is EndReason.LENGTH
        stream.abort(EndReason.CANCELLED)


async def test_stream_stays_at_its_end(case: EngineCase) -> None:
    async with running(case) as engine:
        async with engine.submit([request(1)]) as submission:
            (stream,) = submission.choices
            await read(stream)
            for _ in range(2):
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()
                assert stream.receive_nowait() is None
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()


async def test_stream_of_a_request_that_was_left_is_over(case: EngineCase) -> None:
    async with running(case) as engine:
        async with engine.submit([request(1, max_tokens=LONG)]) as submission:
            (stream,) = submission.choices
        stream.abort(EndReason.CANCELLED)
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()


async def test_reader_that_waits_is_woken_when_its_stream_is_closed(case: EngineCase) -> None:
    async with (
        running(case, stream_credit=PATIENT) as engine,
        occupied(engine),
        engine.submit([request(1)]) as submission,
    ):
        (stream,) = submission.choices
        async with anyio.create_task_group() as group:
            group.start_soon(expect_nothing, stream)
            await until(lambda: engine.health().num_waiting == 1)
            stream.abort(EndReason.CANCELLED)


async def expect_nothing(stream: ChoiceStream) -> None:
    updates = [update async for update in stream]
    assert [(update.token_ids, update.end_reason) for update in updates] == [((), EndReason.CANCELLED)]


async def test_cancelled_reader_loses_no_update(case: EngineCase) -> None:
    async with running(case) as engine:
        (alone,) = await answers(engine, request(1, max_tokens=30))
        async with engine.submit([request(1, max_tokens=30)]) as submission:
            (stream,) = submission.choices
            tokens: list[int] = []
            while len(tokens) < 20:
                with anyio.move_on_after(0) as impatient:
                    tokens += tokens_of(await stream.__anext__())
                if impatient.cancelled_caught:
                    tokens += [t for update in await take(stream, 1) for t in tokens_of(update)]
            rest, _ = await read(stream)
            assert tokens + rest == alone
