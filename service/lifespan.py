"""The app's life: hosts the engine, loads the tokenizer when the model is there, and says why it is not ready."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskStatus
from litestar import Litestar

from engine.api import Capability, Engine, EngineDead, EngineNotReady, EngineState
from service.call_forms import COMMON_FORM
from service.finished import Recorder
from service.limits import Quotas
from service.logs import log_event
from service.metrics import Metrics
from service.model_parsers import ModelParsers, parsers_of
from service.response_store import ResponseStore
from service.running import RunningEmbedding, RunningRequests
from service.settings import Settings
from service.template_workers import TemplateWorkers
from service.tokenizer import Encoder, NoTokenizer, Tokenizer, load_encoder, load_tokenizer

logger = logging.getLogger("chorus.lifespan")

OnDeath = Callable[[], Awaitable[None]]

NUM_TOKENIZER_THREADS = 2


def _tokenizer_limiter() -> anyio.CapacityLimiter:
    return anyio.CapacityLimiter(NUM_TOKENIZER_THREADS)


@dataclass(slots=True)
class Services:
    """What handlers need.

    tokenizer: None until the model is loaded. embedding_tokenizer: None where there is no embedding model either.
    failure: why this process can never serve (again). on_death: awaited once when that is so; the app answers 503
    meanwhile. started_at: unix seconds.
    """

    settings: Settings
    engine: Engine
    metrics: Metrics
    tokenizer: Tokenizer | None = None
    embedding_tokenizer: Encoder | None = None
    parsers: ModelParsers = field(default_factory=ModelParsers)
    tokenizer_limiter: anyio.CapacityLimiter = field(default_factory=_tokenizer_limiter)
    templates: TemplateWorkers = field(default_factory=TemplateWorkers)
    running: RunningRequests = field(default_factory=RunningRequests)
    running_embeddings: set[RunningEmbedding] = field(default_factory=set)
    quotas: Quotas = field(default_factory=Quotas)
    responses: ResponseStore | None = None
    tracing: Recorder | None = None
    failure: str | None = None
    on_death: OnDeath | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def keeps_content(self) -> bool:
        """Texts are kept to a request's end, for its span."""
        return self.tracing is not None and self.settings.trace_content

    def death(self) -> str | None:
        """Why the server is dead, None while it lives."""
        health = self.engine.health()
        if health.state is EngineState.DEAD:
            return self.failure or health.reason or "the engine has died"
        return self.failure

    def hang(self) -> str | None:
        """Why the engine counts as hung. A long prefill is many steps, so that it is never the reason."""
        age = self.engine.health().last_step_age
        if age is None or age <= self.settings.step_timeout:
            return None
        return f"the engine has made no progress for {age:.3g} s"

    def check_live(self) -> None:
        """Raises EngineDead, with the reason."""
        if (reason := self.death() or self.hang()) is not None:
            raise EngineDead(reason)

    def check_ready(self) -> None:
        """Raises EngineDead or EngineNotReady, with the reason."""
        self.check_live()
        health = self.engine.health()
        if health.state is not EngineState.READY:
            raise EngineNotReady(health.reason or f"the engine is {health.state.value}")
        if self.tokenizer is None:
            raise EngineNotReady("the tokenizer is loading")

    @property
    def passes_text(self) -> bool:
        """Requests go on to the engine as they come, since it has the tokenizer."""
        return Capability.TEXT_IN in self.engine.info.capabilities

    @property
    def model_name(self) -> str:
        """What requests give as `model`. Raises EngineDead or EngineNotReady while only the engine could know it."""
        name = self.engine.info.model
        if not name:
            self.check_ready()
        return name

    def ready_tokenizer(self) -> Tokenizer:
        """Raises EngineDead or EngineNotReady while requests cannot be served."""
        self.check_ready()
        assert self.tokenizer is not None
        return self.tokenizer


def engine_lifespan(services: Services) -> Callable[[Litestar], AbstractAsyncContextManager[None]]:
    """Runs the engine while the app lives."""

    @asynccontextmanager
    async def host(_: Litestar) -> AsyncIterator[None]:
        async with services.templates, anyio.create_task_group() as group:
            await group.start(_run_engine, services)
            group.start_soon(_load_tokenizer, services)
            group.start_soon(_watch_engine, services)
            if services.tracing is not None:
                group.start_soon(services.tracing.run)
            if services.responses is not None:
                group.start_soon(services.responses.run)
            yield
            services.engine.stop()
            group.cancel_scope.cancel()

    return host


async def _run_engine(services: Services, *, task_status: TaskStatus[None]) -> None:
    try:
        await services.engine.run(task_status=task_status)
    except EngineDead as error:
        await _die(services, str(error))
    except Exception:
        logger.exception("the engine broke its contract")
        await _die(services, "the engine has failed")


async def _load_tokenizer(services: Services) -> None:
    started = time.monotonic()
    try:
        await services.engine.wait_ready()
    except EngineDead:
        return  # _run_engine tells
    info = services.engine.info
    if services.passes_text:
        services.parsers = ModelParsers(COMMON_FORM)  # calls may be had; whose form they have is the engine's affair
        services.tokenizer = NoTokenizer()
        _log_ready(services, started)
        return
    try:
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, info.model_path, limiter=services.tokenizer_limiter)
        if info.embedding is not None:
            services.embedding_tokenizer = await anyio.to_thread.run_sync(
                load_encoder, info.embedding.model_path, limiter=services.tokenizer_limiter
            )
    except Exception as error:
        await _die(services, f"the tokenizer cannot be loaded: {error}")
        return
    settings = services.settings
    services.parsers = parsers_of(tokenizer, settings.tool_parser, settings.reasoning_parser)
    services.tokenizer = tokenizer
    _log_ready(services, started)


def _log_ready(services: Services, started: float) -> None:
    info = services.engine.info
    log_event(
        logger,
        "ready",
        model=info.model,
        backend=info.backend,
        max_model_len=info.max_model_len,
        embedding_model=info.embedding and info.embedding.model,
        tool_parser=services.parsers.tools,
        reasoning_parser=services.parsers.reasoning,
        seconds=round(time.monotonic() - started, 3),
    )


async def _watch_engine(services: Services) -> None:
    """Tell the clients of an engine that hangs: nobody waits for ever. It may come back, and then serves again."""
    interval = min(1.0, services.settings.step_timeout / 4)
    was_hung = False
    while True:
        await anyio.sleep(interval)
        hang = services.hang()
        if hang is not None:
            if not was_hung:
                logger.critical("%s", hang)
            for running in (*services.running, *services.running_embeddings):
                running.fail(EngineDead(hang))
        was_hung = hang is not None


async def _die(services: Services, reason: str) -> None:
    services.failure = reason
    logger.critical("chorus cannot serve: %s", reason)
    if services.on_death is not None:
        await services.on_death()
