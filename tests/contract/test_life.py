"""An engine's end: drained, stopped, cancelled, dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from anyio.abc import TaskStatus

from engine.api import Capability, ChoiceStream, EngineDead, EngineNotReady, EngineState
from engine.stats import Histogram
from tests.contract.harness import (
    CONFIG,
    LONG,
    PATIENT,
    EngineCase,
    answers,
    assert_idle,
    read_all,
    request,
    running,
    take,
    until,
)

pytestmark = pytest.mark.anyio


async def test_drain_refuses_the_new_and_finishes_the_old(case: EngineCase) -> None:
    async with running(case, max_num_seqs=1) as engine, engine.submit([request(2, max_tokens=20)]) as submission:
        engine.drain()
        engine.drain()
        assert engine.health().state is EngineState.DRAINING
        assert engine.health().reason
        with pytest.raises(EngineNotReady):
            async with engine.submit([request()]):
                pass
        # the one that waits is admitted, so it runs as well
        assert [len(tokens) for tokens, _ in await read_all(submission.choices)] == [20, 20]


async def assert_shut_down(streams: Sequence[ChoiceStream]) -> None:
    """An answer that the server's end cut short is an error, not one that ended as asked."""
    for stream in streams:
        with pytest.raises(EngineNotReady, match="shutting down"):
            async for update in stream:
                assert update.end_reason is None


async def test_stop_ends_open_streams_as_incomplete_and_then_run_returns(case: EngineCase) -> None:
    engine = case.make(replace(CONFIG, max_num_seqs=1))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            await group.start(lambda task_status: engine.run(task_status=task_status))
            await engine.wait_ready()
            async with engine.submit([request(2, max_tokens=LONG)]) as submission:
                await take(submission.choices[0], 1)
                engine.stop()
                await assert_shut_down(submission.choices)
            with pytest.raises(EngineNotReady):
                async with engine.submit([request()]):
                    pass
        assert_idle(engine)


async def test_run_that_is_cancelled_ends_open_streams(case: EngineCase) -> None:
    engine = case.make(CONFIG)
    hosting = anyio.CancelScope()

    async def hosted(*, task_status: TaskStatus[None]) -> None:
        with hosting:
            await engine.run(task_status=task_status)

    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            await group.start(hosted)
            await engine.wait_ready()
            async with engine.submit([request(2, max_tokens=LONG)]) as submission:
                await take(submission.choices[0], 1)
                hosting.cancel()
                await assert_shut_down(submission.choices)
    assert_idle(engine)


async def test_death_fails_every_open_stream_and_all_that_comes_later(case: EngineCase) -> None:
    if case.kill is None:
        pytest.skip("outlives what it depends on")
    engine = case.make(replace(CONFIG, max_num_seqs=4))
    died: list[EngineDead] = []
    failures: list[EngineDead] = []

    async def hosted(*, task_status: TaskStatus[None]) -> None:
        try:
            await engine.run(task_status=task_status)
        except EngineDead as error:
            died.append(error)

    async def ask() -> None:
        async with engine.submit([request(3, max_tokens=LONG)]) as submission, anyio.create_task_group() as group:
            for stream in submission.choices:
                group.start_soon(expect_death, stream)

    async def expect_death(stream: ChoiceStream) -> None:
        try:
            async for _ in stream:
                pass
        except EngineDead as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            await group.start(hosted)
            await engine.wait_ready()
            async with anyio.create_task_group() as clients:
                # four choices run and two wait
                clients.start_soon(ask)
                clients.start_soon(ask)
                await until(lambda: engine.health().generation_tokens > 0)
                assert case.kill is not None
                case.kill(engine)
            assert len(failures) == 6
            await until(lambda: len(died) == 1)
    assert all(str(error) for error in [*failures, *died])
    assert engine.health().state is EngineState.DEAD
    assert engine.health().reason
    assert engine.health().last_step_age is None
    with pytest.raises(EngineDead):
        async with engine.submit([request()]):
            pass
    with pytest.raises(EngineDead):
        await engine.wait_ready()


async def test_health_tells_work_from_idleness(case: EngineCase) -> None:
    async with running(case) as engine:
        before = engine.health()
        assert before.last_step_age is None
        await answers(engine, request(2, prompt=[31] * 40, max_tokens=5))
        after = engine.health()
        assert after.num_steps > before.num_steps or not case.has_steps
        assert after.generation_tokens - before.generation_tokens == 10
        times = 1 if Capability.SHARED_PROMPT in engine.info.capabilities else 2
        assert after.prompt_tokens - before.prompt_tokens == 40 * times
        assert after.prefix_tokens_looked_up == 40 * times and after.prefix_tokens_found == 0
        assert after.num_preemptions == 0
        assert after.last_step_age is None


async def test_stats_tell_steps_batches_and_gaps_between_tokens(case: EngineCase) -> None:
    if not case.has_steps:
        pytest.skip("does not step itself")
    async with running(case, stream_credit=PATIENT) as engine:
        stats, before = engine.health().stats, engine.health().num_steps
        await answers(engine, request(2, prompt=[31] * 40, max_tokens=5))
        num_steps = engine.health().num_steps - before

        def count(histogram: Histogram) -> int:
            return histogram.cumulative()[-1][1]

        assert count(stats.step_seconds) == count(stats.batch_size) == count(stats.step_tokens) == num_steps
        assert stats.batch_size.sum == 10, "each token was drawn by one step"
        times = 1 if Capability.SHARED_PROMPT in engine.info.capabilities else 2
        assert stats.step_tokens.sum == 40 * times + 2 * 4, "the prompt's rows, and one for each token but the first"
        assert count(stats.inter_token_seconds) == 2 * 4
