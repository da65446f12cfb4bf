"""What only EngineThread promises: faults of its thread, loading, stalls. The rest is in tests/contract."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from engine.api import (
    EndReason,
    EngineDead,
    EngineNotReady,
    EngineOverloaded,
    EngineState,
    Request,
    RequestTooLarge,
    TextPrompt,
    TokenPrompt,
    UnsupportedByEngine,
)
from engine.config import EngineConfig, ModelLoadError
from engine.plan import ModelRunner, SampledToken, StepPlan
from engine.thread import EngineThread
from tests.engine.support import CheckingRunner, expected, greedy

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def hosted(engine: EngineThread) -> AsyncIterator[EngineThread]:
    async with anyio.create_task_group() as group:
        await group.start(_run, engine)
        with anyio.fail_after(30):
            yield engine
        engine.stop()


async def _run(engine: EngineThread, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    await engine.run(task_status=task_status)


def request(n: int = 1, max_tokens: int = 10, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request("m", TokenPrompt(prompt), (greedy(max_tokens),) * n)


class GatedRunner(CheckingRunner):
    """Holds every step until the test lets it go on."""

    gate: threading.Event
    entered: threading.Event

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.entered.set()
        assert self.gate.wait(30)
        return super().execute(plan)


def gated() -> GatedRunner:
    runner = GatedRunner()
    runner.gate, runner.entered = threading.Event(), threading.Event()
    return runner


class FailingRunner(CheckingRunner):
    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if self.num_rows > 20:
            raise RuntimeError("secret detail of the fault")
        return super().execute(plan)


async def test_an_exception_in_a_step_fails_every_open_stream_and_ends_run() -> None:
    engine = EngineThread(EngineConfig(), lambda _: FailingRunner())
    with pytest.raises(BaseExceptionGroup) as caught:
        async with hosted(engine):
            await engine.wait_ready()
            async with engine.submit([request(n=3, max_tokens=500)]) as submission:
                for stream in submission.choices:
                    with pytest.raises(EngineDead, match="RuntimeError") as dead:
                        async for _ in stream:
                            pass
                    assert "secret" not in str(dead.value)
            assert engine.health().state is EngineState.DEAD
            with pytest.raises(EngineDead):
                async with engine.submit([request()]):
                    pass
    assert caught.value.subgroup(EngineDead) is not None


async def test_a_model_that_cannot_be_loaded_ends_run_with_its_reason() -> None:
    def load(_: EngineConfig) -> ModelRunner:
        raise ModelLoadError("no such model: nowhere/nothing")

    engine = EngineThread(EngineConfig(), load)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with hosted(engine):
            with pytest.raises(EngineDead, match="no such model: nowhere/nothing"):
                await engine.wait_ready()
            await anyio.sleep_forever()
    assert caught.value.subgroup(EngineDead) is not None


async def test_requests_are_refused_while_the_model_loads() -> None:
    gate = threading.Event()

    def load(_: EngineConfig) -> ModelRunner:
        assert gate.wait(30)
        return CheckingRunner()

    async with hosted(EngineThread(EngineConfig(), load)) as engine:
        assert engine.health().state is EngineState.LOADING
        with pytest.raises(EngineNotReady, match="loaded"):
            async with engine.submit([request()]):
                pass
        gate.set()
        await engine.wait_ready()
        assert engine.health().state is EngineState.READY


async def test_health_shows_the_age_of_a_step_that_hangs_and_none_when_idle() -> None:
    runner = gated()
    async with hosted(EngineThread(EngineConfig(), lambda _: runner)) as engine:
        await engine.wait_ready()
        assert engine.health().last_step_age is None
        async with engine.submit([request()]) as submission:
            await anyio.to_thread.run_sync(runner.entered.wait)
            first = engine.health().last_step_age
            assert first is not None
            second = engine.health().last_step_age
            assert second is not None and second >= first
            runner.gate.set()
            assert [t async for update in submission.choices[0] for t in update.token_ids] == expected([1, 2, 3], 10)


class SteppedRunner(CheckingRunner):
    """Each step waits for a permit of its own."""

    permits: threading.Semaphore

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        assert self.permits.acquire(timeout=30)
        return super().execute(plan)


async def test_an_abort_while_a_step_runs_counts_from_the_next_step_on() -> None:
    """`within one step`: exactly the step that ran already is made for nothing, and no row of the choice after it."""
    runner = SteppedRunner()
    runner.permits = threading.Semaphore(4)
    async with hosted(EngineThread(EngineConfig(), lambda _: runner)) as engine:
        await engine.wait_ready()
        async with engine.submit([request(n=3, max_tokens=20)]) as submission:
            left, cut, right = submission.choices
            for _ in range(4):
                assert [(await anext(stream)).end_reason for stream in submission.choices] == [None] * 3
            # the thread is in its fifth step now, or about to look into its inbox before it
            cut.abort(EndReason.CANCELLED)
            runner.permits.release(100)
            rest = [update async for update in cut]
            assert rest[-1].end_reason is EndReason.CANCELLED
            assert sum(len(update.token_ids) for update in rest) <= 1
            assert [len([u async for u in stream]) for stream in (left, right)] == [16, 16]
    rows = [len(plan.sampling_rows) for plan in runner.plans]
    assert rows in ([3] * 5 + [2] * 15, [3] * 4 + [2] * 16)


async def test_leaving_while_a_step_runs_waits_until_the_engine_has_let_go() -> None:
    runner = gated()
    async with hosted(EngineThread(EngineConfig(), lambda _: runner)) as engine:
        await engine.wait_ready()
        async with engine.submit([request(n=4, max_tokens=400)]):
            await anyio.to_thread.run_sync(runner.entered.wait)
            runner.gate.set()
        assert engine.health().pages_held == 0
        assert engine.health().num_running == engine.health().num_waiting == 0


async def test_a_hung_step_does_not_hold_the_client_for_ever() -> None:
    runner = gated()
    async with hosted(EngineThread(EngineConfig(release_timeout=0.05), lambda _: runner)) as engine:
        await engine.wait_ready()
        async with engine.submit([request()]):
            await anyio.to_thread.run_sync(runner.entered.wait)
        assert engine.health().num_waiting + engine.health().num_running == 1, "it is still booked"
        runner.gate.set()


async def test_a_stalled_engine_goes_on_when_a_reader_takes_something() -> None:
    async with hosted(EngineThread(EngineConfig(stream_credit=3), lambda _: CheckingRunner())) as engine:
        await engine.wait_ready()
        async with engine.submit([request(max_tokens=200)]) as submission:
            [stream] = submission.choices
            made: list[int] = []
            while len(made) < 200:
                update = await stream.__anext__()
                made += update.token_ids
                if len(made) % 50 == 0:
                    await _until(lambda: engine.health().last_step_age is None)  # the thread sleeps
            assert made == expected([1, 2, 3], 200)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 the thread has no event for it
        await anyio.sleep(0.001)


async def test_what_can_never_fit_is_refused_by_its_field() -> None:
    config = EngineConfig(max_num_seqs=2, max_queued_seqs=2)
    async with hosted(EngineThread(config, lambda _: CheckingRunner(num_pages=4))) as engine:
        await engine.wait_ready()
        assert engine.info.max_model_len == 128
        cases = [
            (request(n=5), "n"),
            (request(max_tokens=126), "max_tokens"),
            (request(prompt=(1,) * 128), "prompt"),
            (request(prompt=()), "prompt"),
            (request(prompt=(1000,)), "prompt"),
        ]
        for bad, param in cases:
            with pytest.raises(RequestTooLarge) as refusal:
                async with engine.submit([request(), bad]):
                    pass
            assert refusal.value.param == param
        with pytest.raises(UnsupportedByEngine):
            async with engine.submit([Request("m", TextPrompt("hi"), (greedy(1),))]):
                pass
        assert engine.health().num_waiting == 0, "a refused batch was booked"


async def test_the_queue_is_bounded_by_prompt_tokens_and_names_a_wait() -> None:
    runner = gated()
    config = EngineConfig(max_queued_tokens=250)
    async with hosted(EngineThread(config, lambda _: runner)) as engine:
        await engine.wait_ready()
        with pytest.raises(RequestTooLarge) as refusal:
            async with engine.submit([request(prompt=(5,) * 251)]):
                pass
        assert refusal.value.param == "prompt"
        async with engine.submit([request(prompt=(5,) * 200)]) as submission:
            with pytest.raises(EngineOverloaded) as full:
                async with engine.submit([request(prompt=(5,) * 51)]):
                    pass
            assert 1 <= full.value.retry_after <= 120
            runner.gate.set()
            async for _ in submission.choices[0]:
                pass
        async with engine.submit([request(prompt=(5,) * 250)]):
            pass


async def test_stop_ends_what_is_open_with_an_error() -> None:
    runner = gated()
    async with hosted(EngineThread(EngineConfig(), lambda _: runner)) as engine:
        await engine.wait_ready()
        async with engine.submit([request(max_tokens=500)]) as submission:
            await anyio.to_thread.run_sync(runner.entered.wait)
            engine.stop()
            runner.gate.set()
            with pytest.raises(EngineNotReady, match="shutting down"):
                async for _ in submission.choices[0]:
                    pass
