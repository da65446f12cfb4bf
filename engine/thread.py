"""Engines that run in this process: one thread steps a `StepCore` and posts what it makes to the event loop.

The thread never waits for the loop and the loop never for the thread: requests and aborts go into an inbox, a step's
updates come back in one callback. Admission is decided on the loop, where nothing can come between its check and its
booking.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint, current_token

from engine.admission import Admission, token_limits
from engine.api import (
    Capability,
    Constraint,
    Embedding,
    EmbeddingInfo,
    EmbedRequest,
    EndReason,
    EngineDead,
    EngineHealth,
    EngineInfo,
    EngineNotReady,
    EngineState,
    PromptInfo,
    Request,
    SamplingParams,
    StepRecord,
    Submission,
    UnsupportedByEngine,
)
from engine.config import EngineConfig, ModelLoadError
from engine.core import EngineCore, StepCore
from engine.embedding import DropEmbedding, Embedded, Embedder, EmbeddingDesk, EmbeddingJob, EmbeddingSteps
from engine.grammar import GrammarCompiler, load_compiler
from engine.matchers import Matcher
from engine.plan import PAGE_SIZE, ModelRunner
from engine.sequence import Prefill, PromptState, Update
from engine.sequence import Sequence as EngineSequence
from engine.streams import BufferedChoiceStream

logger = logging.getLogger("chorus.engine")

_CAPABILITIES = frozenset(
    {
        Capability.TOKENS_IN,
        Capability.TOKENS_OUT,
        Capability.PAUSE,
        Capability.ATOMIC_ADMISSION,
        Capability.RELEASE_CONFIRMED,
        Capability.PROMPT_LOGPROBS,
        Capability.SHARED_PROMPT,
    }
)


@dataclass(frozen=True, slots=True)
class _Submit:
    prefills: list[Prefill]


@dataclass(frozen=True, slots=True)
class _Abort:
    sequences: list[EngineSequence]
    reason: EndReason


_NUM_COMPILERS = 2
"""Constraints that are compiled at a time; the worst take seconds of a core."""

_WAKE = object()
_STOP = object()


LoadEmbedder = Callable[[EngineConfig], Embedder | None]


class SteppedEngine(ABC):
    """Everything but what is stepped: see `_start`. capabilities: before the model is loaded. load_embedder: called
    where an embedding model is configured.
    """

    def __init__(
        self, config: EngineConfig, capabilities: frozenset[Capability], load_embedder: LoadEmbedder | None = None
    ) -> None:
        self._config = config
        self._admission = Admission(config)
        self._desk = EmbeddingDesk(config.max_queued_tokens)
        self._core: StepCore | None = None
        self._load_embedder = None if config.embedding_model is None else load_embedder
        self._embeddings: EmbeddingSteps | None = None
        self._compiler: GrammarCompiler | None = None
        self._compile_limiter = anyio.CapacityLimiter(_NUM_COMPILERS)
        self._info = EngineInfo(config.served_model_name, "loading", capabilities, max_num_seqs=config.max_num_seqs)
        if self._load_embedder is not None:
            self._info = _with_embeddings(self._info, EmbeddingInfo(config.served_embedding_model_name))
        self._health = EngineHealth(EngineState.LOADING, "the model is being loaded")
        self._state = EngineState.LOADING
        self._reason: str | None = "the model is being loaded"
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._post: Callable[..., object]
        self._streams: dict[int, BufferedChoiceStream] = {}  # by sequence id: admitted and not ended
        self._arrivals = itertools.count()
        self._loaded: anyio.Event
        self._finished: anyio.Event
        self._hosted = False
        self._progress: float | None = None  # time.monotonic() of the last progress, None while idle
        self._is_stalled = False  # the thread sleeps although there is work: every reader is behind

    @property
    def info(self) -> EngineInfo:
        return self._info

    # -- on the event loop

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        if self._hosted:
            raise RuntimeError("an engine is hosted once")
        self._hosted = True
        native: Any = current_token().native_token
        self._post = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe
        self._loaded, self._finished = anyio.Event(), anyio.Event()
        threading.Thread(target=self._main, name="chorus-engine", daemon=True).start()
        task_status.started()
        try:
            await self._finished.wait()
        finally:
            self.stop()
            with anyio.move_on_after(self._config.release_timeout, shield=True):
                await self._finished.wait()
        if self._state is EngineState.DEAD:
            raise EngineDead(self._reason or "the engine has died")

    def _tell(self, message: object) -> None:
        self._inbox.put(message)

    async def wait_ready(self) -> None:
        await self._loaded.wait()
        self._raise_if_dead()

    def drain(self) -> None:
        if self._state is not EngineState.DEAD:
            self._state, self._reason = EngineState.DRAINING, "the server is shutting down"

    def stop(self) -> None:
        self.drain()
        self._tell(_STOP)

    @asynccontextmanager
    async def submit(self, batch: Sequence[Request]) -> AsyncIterator[Submission]:
        streams, prefills = self._admit(batch, await self._compile(batch))
        released = anyio.Event()
        live = len(streams)

        def count_down() -> None:
            nonlocal live
            live -= 1
            self._admission.end_choice()
            if live == 0:
                self._admission.end_batch(sum(len(prefill.token_ids) for prefill in prefills))
                released.set()

        for stream in streams.values():
            stream.on_end = count_down
        self._tell(_Submit(prefills))
        try:
            yield Submission([prefill.prompt.info for prefill in prefills], list(streams.values()))
        finally:
            left = [sequence for sequence, stream in streams.items() if not stream.ended]
            for stream in streams.values():
                stream.discard()
            if left:
                self._tell(_Abort(left, EndReason.CANCELLED))
                with anyio.move_on_after(self._config.release_timeout, shield=True):
                    await released.wait()

    async def embed(self, batch: Sequence[EmbedRequest]) -> list[Embedding]:
        await checkpoint()
        self._raise_unless_ready()
        if self._info.embedding is None:
            raise UnsupportedByEngine(Capability.EMBEDDINGS)
        return await self._desk.embed(batch, self._info.embedding, self._tell)

    def health(self) -> EngineHealth:
        progress = self._progress
        age = None if progress is None else max(0.0, time.monotonic() - progress)
        waiting = max(0, len(self._streams) - self._health.num_running)
        return replace(
            self._health,
            state=self._state,
            reason=self._reason,
            last_step_age=age,
            num_waiting=waiting,
            num_embedding_inputs=self._desk.num_inputs,
        )

    def last_steps(self) -> Sequence[StepRecord]:
        return [] if self._core is None else list(self._core.steps)

    async def _compile(self, batch: Sequence[Request]) -> dict[Constraint, Matcher]:
        """A matcher at its start for each constraint of the batch; without any, nothing is awaited."""
        choices = (params for request in batch for params in request.choices)
        enforced = [params.constraint for params in choices if params.constraint is not None]
        constraints = list(dict.fromkeys([*enforced, *(one for request in batch for one in request.checked)]))
        if not constraints:
            return {}
        self._raise_unless_ready()
        compiler = self._compiler
        if compiler is None:
            if not enforced:
                return {}
            raise UnsupportedByEngine(Capability.CONSTRAINTS)
        return await anyio.to_thread.run_sync(compiler.compile_all, constraints, limiter=self._compile_limiter)

    def _admit(
        self, batch: Sequence[Request], matchers: dict[Constraint, Matcher]
    ) -> tuple[dict[EngineSequence, BufferedChoiceStream], list[Prefill]]:
        """Check and book the whole batch, or raise with nothing booked. matchers: of constraints that are kept here."""
        self._raise_unless_ready()
        limits = [token_limits(request, self._info) for request in batch]
        self._admission.book(sum(len(max_tokens) for _, max_tokens in limits), sum(len(ids) for ids, _ in limits))
        batch_id = next(self._arrivals)
        streams: dict[EngineSequence, BufferedChoiceStream] = {}
        prefills = []
        for request, (token_ids, max_tokens) in zip(batch, limits, strict=True):
            order = (request.priority, next(self._arrivals))
            info = PromptInfo(len(token_ids))
            prompt = PromptState(
                token_ids,
                request.owner,
                request.cache_namespace,
                order,
                batch_id,
                info,
                request.prompt_logprobs,
                request.kv_transfer_params,
            )
            sequences = []
            for params, limit in zip(request.choices, max_tokens, strict=True):
                at_start = None if params.constraint is None else matchers.get(params.constraint)
                matcher = None if at_start is None else at_start.fork()
                sequence, stream = self._open_stream(prompt, params, limit, matcher)
                sequences.append(sequence)
                streams[sequence] = stream
            prefills.append(Prefill(prompt, token_ids, sequences))
        return streams, prefills

    def _open_stream(
        self, prompt: PromptState, params: SamplingParams, max_tokens: int, matcher: Matcher | None
    ) -> tuple[EngineSequence, BufferedChoiceStream]:
        stream = BufferedChoiceStream(lambda reason: self._tell(_Abort([sequence], reason)), self._on_taken)
        sequence = EngineSequence(prompt, params, stream, max_tokens, matcher)
        self._streams[sequence.id] = stream
        return sequence, stream

    def _on_taken(self) -> None:
        if self._is_stalled:
            self._tell(_WAKE)

    def _raise_if_dead(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDead(self._reason or "the engine has died")

    def _raise_unless_ready(self) -> None:
        self._raise_if_dead()
        if self._state is not EngineState.READY:
            raise EngineNotReady(self._reason or "the engine is not ready", retry_after=5.0)

    def _deliver(self, updates: list[Update], embedded: list[Embedded]) -> None:
        self._desk.deliver(embedded)
        for sequence, update in updates:
            stream = self._streams.get(sequence.id)
            if stream is not None:
                if update.end_reason is not None:
                    del self._streams[sequence.id]
                stream.deliver(update)

    def _on_loaded(self, info: EngineInfo) -> None:
        self._info = info
        if self._state is EngineState.LOADING:
            self._state, self._reason = EngineState.READY, None
        self._loaded.set()

    def _on_finished(self, reason: str | None) -> None:
        """The thread is about to end; reason: what it died of, None when it was told to stop."""
        if reason is not None:
            self._state, self._reason = EngineState.DEAD, reason
        streams, self._streams = list(self._streams.values()), {}
        error = EngineNotReady("the server is shutting down") if reason is None else EngineDead(reason)
        for stream in streams:
            stream.finish(error)
        self._desk.fail(error)
        self._loaded.set()
        self._finished.set()

    # -- on the engine's thread

    def _main(self) -> None:
        reason: str | None = None
        try:
            core, info = self._start()
            self._core = core
            try:
                if self._load_embedder is not None and (embedder := self._load_embedder(self._config)) is not None:
                    info = _with_embeddings(info, embedder.info)
                    sizes = core.health().stats.embedding_batch_size
                    self._embeddings = EmbeddingSteps(embedder, self._config.max_num_batched_tokens, sizes)
                self._publish(core)
                self._call_loop(self._on_loaded, info)
                self._loop(core)
            finally:
                core.close()
        except ModelLoadError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("the engine has died")
            reason = f"the engine has died: {type(error).__name__}"
        self._progress = None
        self._call_loop(self._on_finished, reason)

    @abstractmethod
    def _start(self) -> tuple[StepCore, EngineInfo]:
        """Load the model, and `_compiler` if constraints can be kept. Raises ModelLoadError."""

    def _loop(self, core: StepCore) -> None:
        runnable = False
        while True:
            messages = self._receive_all(wait=not runnable)
            updates: list[Update] = []
            stopping = self._handle(core, messages, updates)
            self._progress = time.monotonic() if self._has_work(core) else None
            made = None if stopping else self._step(core)
            updates += made or []
            embedded = None if stopping else self._embed(beside_generation=made is not None)
            runnable = made is not None or embedded is not None
            self._progress = time.monotonic() if runnable and self._has_work(core) else None
            self._publish(core)
            if updates or embedded:
                self._call_loop(self._deliver, updates, embedded or [])
            if stopping:
                return

    def _has_work(self, core: StepCore) -> bool:
        return core.has_work or (self._embeddings is not None and self._embeddings.has_work)

    def _embed(self, *, beside_generation: bool) -> list[Embedded] | None:
        return None if self._embeddings is None else self._embeddings.step(beside_generation=beside_generation)

    def _step(self, core: StepCore) -> list[Update] | None:
        """A step, or None where there is nothing to do; readers that are all behind are asked for a wake-up."""
        self._is_stalled = False
        made = core.step()
        if made is None and core.has_work:
            self._is_stalled = True
            made = core.step()  # a reader may have caught up before the flag was up
        return made

    def _receive_all(self, *, wait: bool) -> list[object]:
        messages = [self._inbox.get()] if wait else []
        with suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def _handle(self, core: StepCore, messages: list[object], updates: list[Update]) -> bool:
        """Do what the loop asks for; True when the engine is to stop."""
        for message in messages:
            if isinstance(message, _Submit):
                updates += core.add(message.prefills)
            elif isinstance(message, _Abort):
                ended = (core.abort(sequence, message.reason) for sequence in message.sequences)
                updates += [update for update in ended if update is not None]
            elif isinstance(message, EmbeddingJob | DropEmbedding):
                assert self._embeddings is not None
                self._embeddings.handle(message)
            elif message is _STOP:
                core.abort_all()
                return True
        return False

    def _publish(self, core: StepCore) -> None:
        num_tokens = 0 if self._embeddings is None else self._embeddings.num_tokens
        self._health = replace(core.health(), embedding_tokens=num_tokens)

    def _call_loop(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # RunFinishedError, closed loop: nobody is left to tell
            self._post(callback, *args)


class EngineThread(SteppedEngine):
    """Hosts the model runner that `load` makes."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[EngineConfig], ModelRunner],
        load_embedder: LoadEmbedder | None = None,
    ) -> None:
        super().__init__(config, _CAPABILITIES, load_embedder)
        self._load = load

    def _start(self) -> tuple[StepCore, EngineInfo]:
        runner = self._load(self._config)
        self._compiler = load_compiler(runner.model_path, runner.vocab_size, runner.eos_token_ids)
        return EngineCore(self._config, runner), self._loaded_info(runner)

    def _loaded_info(self, runner: ModelRunner) -> EngineInfo:
        return replace(
            self._info,
            backend=runner.name,
            capabilities=self._capabilities(runner),
            max_model_len=min(runner.max_model_len, runner.num_pages * PAGE_SIZE),
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            model_path=runner.model_path,
        )

    def _capabilities(self, runner: ModelRunner) -> frozenset[Capability]:
        more = {Capability.BITWISE: runner.bitwise, Capability.CONSTRAINTS: self._compiler is not None}
        return _CAPABILITIES.union(capability for capability, is_there in more.items() if is_there)


def _with_embeddings(info: EngineInfo, embedding: EmbeddingInfo) -> EngineInfo:
    return replace(info, embedding=embedding, capabilities=info.capabilities | {Capability.EMBEDDINGS})
