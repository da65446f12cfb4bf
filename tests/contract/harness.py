"""What the contract tests need of an engine, and nothing private of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from engine.api import (
    Capability,
    ChoiceStream,
    ChoiceUpdate,
    Engine,
    EngineDead,
    Request,
    SamplingParams,
    TokenPrompt,
)
from engine.config import EngineConfig

CONFIG = EngineConfig(
    max_model_len=4096, max_num_seqs=4, max_queued_seqs=16, max_num_batched_tokens=64, stream_credit=4
)
LONG = 4000
"""Tokens that no test waits for."""
FAILING_SEED = 666
"""A choice with this seed fails at its third token, on engines that can be made to."""
PATIENT = 1000
"""stream_credit for tests in which no reader may count as behind, however busy the machine is."""


@dataclass(frozen=True)
class EngineCase:
    """make: an engine that nobody hosts yet, with a vocabulary of at least 128. kill: makes its next step raise; None
    for one that outlives what it depends on. has_steps: it steps itself, queues for it and counts it all.

    A step that runs in another thread takes at least a millisecond, so that LONG answers outlast a test's few awaits.
    needs: a package that most environments lack. num_spare: places that it needs after a prompt although no answer is
    asked for.
    """

    name: str
    make: Callable[[EngineConfig], Engine]
    kill: Callable[[Any], None] | None
    has_failing_seed: bool = False
    needs: str | None = None
    num_spare: int = 0
    start_seconds: float = 20.0
    has_steps: bool = True


def request(
    n: int = 1,
    *,
    seed: int = 7,
    prompt: Sequence[int] = (11, 12, 13),
    max_tokens: int = 8,
    priority: int = 0,
    **params: Any,
) -> Request:
    """Choices that only their length ends, unless told otherwise."""
    defaults = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
    choices = tuple(replace(defaults, seed=seed + k, **params) for k in range(n))
    return Request("m", TokenPrompt(tuple(prompt)), choices, priority=priority)


async def host(engine: Engine, *, task_status: TaskStatus[None]) -> None:
    with suppress(EngineDead):
        await engine.run(task_status=task_status)


@asynccontextmanager
async def running(case: EngineCase, needs: Capability | None = None, **config: Any) -> AsyncIterator[Engine]:
    """A ready engine. Once the test is done with it, it must be idle and hold nothing.

    needs: without it the test is skipped.
    """
    engine = case.make(replace(CONFIG, **config))
    async with anyio.create_task_group() as group:
        with anyio.fail_after(case.start_seconds):
            await group.start(host, engine)
            await engine.wait_ready()
        has_all = needs is None or needs in engine.info.capabilities
        if has_all:
            with anyio.fail_after(20):
                pages = pool(engine)
                yield engine
                assert_idle(engine)
                assert pool(engine) == pages
        engine.stop()
    if not has_all:
        pytest.skip(f"cannot do this: {needs}")


def pool(engine: Engine) -> int:
    health = engine.health()
    return health.pages_free + health.pages_cached + health.pages_held


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or is held, at once where the engine confirms a release."""
    if Capability.RELEASE_CONFIRMED in engine.info.capabilities:
        health = engine.health()
        assert (health.num_running, health.num_waiting, health.pages_held) == (0, 0, 0)
        assert health.last_step_age is None


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine does by itself; the test's time limit bounds it."""
    while not condition():  # noqa: ASYNC110 the contract has no event for it
        await anyio.sleep(0.001)


async def read(stream: ChoiceStream) -> tuple[list[int], ChoiceUpdate]:
    """All tokens of a choice (see `tokens_of`), and its last update; checks that it is the only one with an end."""
    updates = [update async for update in stream]
    assert [update.end_reason is None for update in updates] == [True] * (len(updates) - 1) + [False]
    return [token_id for update in updates for token_id in tokens_of(update)], updates[-1]


def tokens_of(update: ChoiceUpdate) -> tuple[int, ...]:
    """Of an engine that writes text its bytes, which are the tokens of the fake one behind it."""
    return update.token_ids or tuple(update.text.encode())


async def read_all(streams: Sequence[ChoiceStream]) -> list[tuple[list[int], ChoiceUpdate]]:
    """As `read`, all at once."""
    results: dict[int, tuple[list[int], ChoiceUpdate]] = {}

    async def keep(index: int) -> None:
        results[index] = await read(streams[index])

    async with anyio.create_task_group() as group:
        for index in range(len(streams)):
            group.start_soon(keep, index)
    return [results[index] for index in range(len(streams))]


async def answers(engine: Engine, *batch: Request) -> list[list[int]]:
    """The tokens of every choice of a batch."""
    async with engine.submit(batch) as submission:
        return [tokens for tokens, _ in await read_all(submission.choices)]


async def take(stream: ChoiceStream, num_updates: int) -> list[ChoiceUpdate]:
    return [await stream.__anext__() for _ in range(num_updates)]


@asynccontextmanager
async def occupied(engine: Engine) -> AsyncIterator[None]:
    """Every place is taken by choices that are read and do not end: what comes now waits."""
    num_places = engine.info.max_num_seqs
    async with (
        engine.submit([request(num_places, max_tokens=LONG, seed=1000)]) as submission,
        anyio.create_task_group() as readers,
    ):
        readers.start_soon(read_all, submission.choices)
        await until(lambda: engine.health().num_running == num_places)
        yield
        readers.cancel_scope.cancel()
