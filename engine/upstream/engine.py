"""Other servers as the engine: a choice is a request of its own to one of them, and its end closes the connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import httpx
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint

from engine.admission import Admission
from engine.api import (
    Capability,
    Embedding,
    EmbedRequest,
    EngineHealth,
    EngineInfo,
    EngineNotReady,
    EngineState,
    Request,
    StepRecord,
    Submission,
    UnsupportedByEngine,
)
from engine.config import EngineConfig, UpstreamConfig
from engine.upstream.asking import prefix_key
from engine.upstream.call import SHUTTING_DOWN, Call, Prompt, Terms
from engine.upstream.client import new_client
from engine.upstream.fleet import Fleet

CAPABILITIES = frozenset({Capability.TEXT_IN, Capability.TOKENS_IN, Capability.PAUSE})

ANSWER_SECONDS = 1.0
"""How long a batch waits to hear whether all of its choices are accepted. Servers that refuse do so at once; of those
that accept, some say so with the first token only."""

OTHERS_SECONDS = 0.1
"""How long the first token of one choice waits for the others to be accepted."""

FAREWELL_SECONDS = 0.1
"""For the last bytes of answers that have ended, without which their connections could not be used again."""

SWEEP_SECONDS = 1.0


class UpstreamEngine:
    """config: max_num_seqs and max_queued_seqs bound the choices that are open at once; the servers have queues of
    their own. served_model_name: "" for the name that the model has there.
    """

    def __init__(self, config: EngineConfig, upstream: UpstreamConfig) -> None:
        self._config = config
        self._upstream = upstream
        self._fleet = Fleet(upstream.urls, upstream.model)
        self._admission = Admission(config)
        self._calls: dict[Call, None] = {}
        self._group: TaskGroup | None = None
        self._http: httpx.AsyncClient | None = None
        self._stopped = anyio.Event()
        self._is_draining = False
        self._generation_tokens = 0
        self._num_looked_up = 0
        self._num_found = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            self._config.served_model_name or self._fleet.model or "",
            f"upstream {len(self._fleet.upstreams)}",
            CAPABILITIES,
            max_model_len=self._fleet.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        try:
            async with (
                new_client(self._upstream, self._config.max_num_seqs) as http,
                anyio.create_task_group() as group,
            ):
                self._http, self._group = http, group
                for upstream in self._fleet.upstreams:
                    group.start_soon(self._fleet.poll, upstream, http, self._upstream.poll_seconds)
                group.start_soon(self._sweep)
                task_status.started()
                await self._stopped.wait()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            self.stop()

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(min(SWEEP_SECONDS, self._upstream.idle_timeout / 4))
            for call in list(self._calls):
                call.check_silence(self._upstream.idle_timeout)

    async def wait_ready(self) -> None:
        while self._fleet.reason is not None:
            await self._fleet.changed.wait()
        await checkpoint()

    def drain(self) -> None:
        self._is_draining = True

    def stop(self) -> None:
        self.drain()
        self._stopped.set()
        for call in list(self._calls):
            call.stream.finish(EngineNotReady(SHUTTING_DOWN))
            call.cancel()

    def health(self) -> EngineHealth:
        reason = self._fleet.reason
        state = EngineState.READY if reason is None else EngineState.LOADING
        if self._is_draining:
            state, reason = EngineState.DRAINING, SHUTTING_DOWN
        open_calls = [call for call in self._calls if not call.stream.ended]
        num_running = sum(call.has_begun for call in open_calls)
        return EngineHealth(
            state,
            reason,
            num_running=num_running,
            num_waiting=len(open_calls) - num_running,
            prompt_tokens=self._num_looked_up - self._num_found,
            generation_tokens=self._generation_tokens + sum(call.num_tokens for call in self._calls),
            prefix_tokens_looked_up=self._num_looked_up,
            prefix_tokens_found=self._num_found,
            upstreams=tuple(upstream.health() for upstream in self._fleet.upstreams),
        )

    def last_steps(self) -> Sequence[StepRecord]:
        return []

    async def embed(self, batch: Sequence[EmbedRequest]) -> Sequence[Embedding]:
        raise UnsupportedByEngine(Capability.EMBEDDINGS)

    def submit(self, batch: Sequence[Request]) -> AbstractAsyncContextManager[Submission]:
        return self._submit(batch)

    @asynccontextmanager
    async def _submit(self, batch: Sequence[Request]) -> AsyncIterator[Submission]:
        await checkpoint()
        calls, prompts = self._admit(batch)
        try:
            await self._wait_answered(calls)
            yield Submission([prompt.info for prompt in prompts], [call.stream for call in calls])
        finally:
            await self._release(calls)

    def _admit(self, batch: Sequence[Request]) -> tuple[list[Call], list[Prompt]]:
        """Start every choice's request. Raises what `Engine.submit` says, with nothing started."""
        health = self.health()
        if health.state is not EngineState.READY or self._group is None or self._http is None:
            raise EngineNotReady(health.reason or "the engine does not run")
        for request in batch:
            _check(request)
        first = self._fleet.choose(prefix_key(batch[0]))
        if first is None:
            raise EngineNotReady(self._fleet.reason or "every upstream that is up has failed too often just now")
        self._admission.book(sum(len(request.choices) for request in batch), 0)
        terms = Terms(self._http, self._fleet, self._upstream.max_retries, self._config.stream_credit)
        prompts: list[Prompt] = []
        calls: list[Call] = []
        for request in batch:
            key = prefix_key(request)
            # a circuit that lets one try through has room for no other, but a batch is one
            prompts.append(Prompt(request, self._fleet.choose(key) or first, key))
            calls += [Call(prompts[-1], params, terms) for params in request.choices]
        for call in calls:
            call.stream.on_end = self._admission.end_choice
            self._calls[call] = None
            self._group.start_soon(call.run)
        return calls, prompts

    async def _wait_answered(self, calls: Sequence[Call]) -> None:
        """Until all are accepted or one is refused, for a bounded time. Raises the refusal."""
        news = anyio.Event()

        def look() -> None:
            if all(call.is_answered for call in calls) or any(call.refusal for call in calls):
                news.set()
            elif any(call.has_begun for call in calls):
                scope.deadline = min(scope.deadline, anyio.current_time() + OTHERS_SECONDS)

        with anyio.move_on_after(ANSWER_SECONDS) as scope:
            for call in calls:
                call.on_news = look
            look()
            await news.wait()
        for call in calls:
            call.on_news = _no_news
        for call in calls:
            if call.refusal is not None:
                raise call.refusal

    async def _release(self, calls: Sequence[Call]) -> None:
        with anyio.CancelScope(shield=True):
            for call in calls:
                await call.stream.aclose()
            with anyio.move_on_after(FAREWELL_SECONDS):
                await _wait_ended(calls)
            for call in calls:
                call.cancel()
            with anyio.move_on_after(self._config.release_timeout):
                await _wait_ended(calls)
        for call in calls:
            del self._calls[call]
            self._generation_tokens += call.num_tokens
            if call.usage is not None:
                self._num_looked_up += call.usage.prompt_tokens
                self._num_found += call.usage.cached_tokens


def _no_news() -> None:
    pass


async def _wait_ended(calls: Sequence[Call]) -> None:
    for call in calls:
        await call.ended.wait()


def _check(request: Request) -> None:
    if request.prompt_logprobs is not None:
        raise UnsupportedByEngine(Capability.PROMPT_LOGPROBS)
    if request.kv_transfer_params is not None:
        raise UnsupportedByEngine(Capability.KV_TRANSFER)
    if request.checked or any(params.constraint is not None for params in request.choices):
        raise UnsupportedByEngine(Capability.CONSTRAINTS)
