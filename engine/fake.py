"""An engine without a model, for tests: every answer can be worked out by hand.

The token of a choice with seed s at output position k, for a prompt of P tokens, is ord("a") + (s + k + P) % 26; at
temperature 0 s counts as 0. A logit_bias of 100 or -100 forces or bans a token. Of the likeliest tokens the drawn one
is the first, and each letter after it is less likely by 1. So it is with the prompt's tokens, of which the one at
position p has a log probability of -p. What a request says of transfers comes back with each choice's seed. Of an
input's vector the number at place d is how many of its tokens have an id that leaves d when divided by 8; then it is
scaled to the length 1.

It is scheduled like a real one: a bounded queue with atomic admission, waves of max_num_seqs, prefill in chunks of
max_num_batched_tokens; a choice whose reader is behind is passed over, and gives its place to one that waits. A running
choice holds the pages of its prompt and max_tokens. There is no thread: it steps inside `run`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from engine.api import (
    Capability,
    ChoiceUpdate,
    Embedding,
    EmbeddingInfo,
    EmbedRequest,
    EndReason,
    EngineDead,
    EngineError,
    EngineHealth,
    EngineInfo,
    EngineNotReady,
    EngineOverloaded,
    EngineState,
    PromptInfo,
    Request,
    RequestTooLarge,
    SamplingParams,
    StepRecord,
    Submission,
    TokenLogprobs,
    TokenPrompt,
    UnsupportedByEngine,
)
from engine.config import EngineConfig
from engine.embedding import DropEmbedding, EmbeddingDesk, EmbeddingJob, EmbeddingSteps
from engine.plan import PAGE_SIZE
from engine.stats import EngineStats
from engine.streams import BufferedChoiceStream

EOS_TOKEN_ID = 256
EOS_TOKEN_IDS = frozenset({EOS_TOKEN_ID})
VOCAB_SIZE = 320
MAX_MODEL_LEN = 4096
MAX_INPUT_TOKENS = 128
DIMENSIONS = 8
CAPABILITIES = frozenset(
    {
        Capability.TOKENS_IN,
        Capability.TOKENS_OUT,
        Capability.PAUSE,
        Capability.ATOMIC_ADMISSION,
        Capability.RELEASE_CONFIRMED,
        Capability.BITWISE,
        Capability.PROMPT_LOGPROBS,
        Capability.SHARED_PROMPT,
        Capability.KV_TRANSFER,
    }
)

TokenRule = Callable[[int, int, int], int]
"""(seed, output position, prompt tokens) -> token id; -1 fails the choice, as logits without a finite maximum do."""


LogprobRule = Callable[[int, int], float]
"""(seed, output position) -> what the drawn token's logprob is said to be."""


def letter_rule(seed: int, position: int, num_prompt_tokens: int) -> int:
    return ord("a") + (seed + position + num_prompt_tokens) % 26


class FakeEmbedder:
    """Its vectors may be cut to any length."""

    def __init__(self, name: str) -> None:
        self.info = EmbeddingInfo(name, MAX_INPUT_TOKENS, DIMENSIONS, range(1, DIMENSIONS), VOCAB_SIZE)

    def embed(self, batch: Sequence[EmbedRequest]) -> list[array[float] | None]:
        return [self._vector(request) for request in batch]

    def _vector(self, request: EmbedRequest) -> array[float]:
        remainders = [token_id % DIMENSIONS for token_id in request.token_ids]
        counts = [remainders.count(place) for place in range(DIMENSIONS)][: request.dimensions]
        return array("f", [count / (math.hypot(*counts) or 1.0) for count in counts])


@dataclass(slots=True, eq=False)
class _Prompt:
    request: Request
    info: PromptInfo
    num_tokens: int
    num_unfilled: int


@dataclass(slots=True, eq=False)
class _Choice:
    prompt: _Prompt
    params: SamplingParams
    stream: BufferedChoiceStream
    max_tokens: int
    stops: frozenset[int]
    num_made: int = 0

    @property
    def num_pages(self) -> int:
        return -(-(self.prompt.num_tokens + self.max_tokens) // PAGE_SIZE)

    def make_token(self, rule: TokenRule, logprob_rule: LogprobRule) -> ChoiceUpdate:
        params, position = self.params, self.num_made
        if self.max_tokens == 0:
            return ChoiceUpdate(end_reason=EndReason.LENGTH)
        token_id = rule(params.seed if params.temperature > 0 else 0, position, self.prompt.num_tokens)
        if token_id < 0:
            return ChoiceUpdate(end_reason=EndReason.ERROR, error="the model's output was not finite")
        if params.logit_bias or position < params.min_tokens:
            token_id = self._allowed(token_id, self.stops if position < params.min_tokens else frozenset())
        self.num_made += 1
        end_reason, stop_reason = None, None
        if token_id in self.stops and position >= params.min_tokens:
            is_eos = token_id in EOS_TOKEN_IDS and not params.ignore_eos
            end_reason, stop_reason = EndReason.STOP, None if is_eos else token_id
        elif self.num_made >= self.max_tokens:
            end_reason = EndReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None:
            logprobs = (_logprobs(token_id, logprob_rule(params.seed, position), params.logprobs),)
        return ChoiceUpdate((token_id,), logprobs=logprobs, end_reason=end_reason, stop_reason=stop_reason)

    def _allowed(self, token_id: int, blocked: frozenset[int]) -> int:
        """A token that cannot be drawn gives way to the next letter that can, or to a space."""
        blocked = blocked | {token for token, bias in self.params.logit_bias if bias <= -100}
        forced = [token for token, bias in self.params.logit_bias if bias >= 100]
        return next((token for token in [*forced, *_letters_from(token_id)] if token not in blocked), ord(" "))


def _letters_from(token_id: int) -> list[int]:
    return [token_id, *(ord("a") + (token_id - ord("a") + k) % 26 for k in range(1, 26))]


def _logprobs(token_id: int, logprob: float, num_best: int) -> TokenLogprobs:
    best = zip(_letters_from(token_id), (logprob - k for k in range(num_best)), strict=False)
    return TokenLogprobs(token_id, logprob, tuple(best))


class FakeEngine:
    """step_seconds: pause between steps; pause: awaited instead. rule: what is drawn, logprob_rule: how likely it is
    said to have been. load: awaited before the engine is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        step_seconds: float = 0.0,
        pause: Callable[[], Awaitable[object]] | None = None,
        rule: TokenRule = letter_rule,
        logprob_rule: LogprobRule = lambda seed, position: 0.0,
        load: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._max_model_len = config.max_model_len or MAX_MODEL_LEN
        pages = -(-self._max_model_len // PAGE_SIZE) * config.max_num_seqs
        # one byte a token, so that a test can reckon the pool of a given kv_cache_bytes
        self._num_pages = pages if config.kv_cache_bytes is None else config.kv_cache_bytes // PAGE_SIZE
        self._config = config
        self._pause = pause or (lambda: anyio.sleep(step_seconds))
        self._rule = rule
        self._logprob_rule = logprob_rule
        self._load = load
        self._state = EngineState.LOADING
        self._reason: str | None = "the model is loading"
        self._death: EngineDead | None = None
        self._refusal: EngineError | None = None
        self._stopping = False
        self._loaded = anyio.Event()
        self._work = anyio.Event()
        self._waiting: list[_Choice] = []
        self._running: list[_Choice] = []
        self._last_step = time.monotonic()
        self._is_stalled = False  # every reader is behind, or there is nothing to do
        self._num_steps = 0
        self._step_ended_at = 0.0
        self._num_preemptions = 0
        self._num_looked_up = 0
        self._stats = EngineStats()
        self._desk = EmbeddingDesk(config.max_queued_tokens)
        self._embedding: EmbeddingInfo | None = None
        self._embeddings: EmbeddingSteps | None = None
        if config.embedding_model is not None:
            embedder, sizes = FakeEmbedder(config.served_embedding_model_name), self._stats.embedding_batch_size
            self._embedding = embedder.info
            self._embeddings = EmbeddingSteps(embedder, config.max_num_batched_tokens, sizes)
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def info(self) -> EngineInfo:
        capabilities = CAPABILITIES | ({Capability.EMBEDDINGS} if self._embedding else set())
        base = EngineInfo(self._config.served_model_name, "fake", capabilities, embedding=self._embedding)
        if not self._loaded.is_set():
            return base
        return EngineInfo(
            base.model,
            base.backend,
            base.capabilities,
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS_TOKEN_IDS,
            embedding=self._embedding,
        )

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            if self._load is not None:
                await self._load()
            if self._state is EngineState.LOADING:
                self._state, self._reason = EngineState.READY, None
            self._loaded.set()
            while not self._stopping and self._death is None:
                await self._advance()
        except Exception as error:
            self.fail(str(error))
            raise EngineDead(str(error)) from error
        finally:
            self.stop()
        if self._death is not None:
            raise self._death

    async def wait_ready(self) -> None:
        await self._loaded.wait()
        if self._death is not None:
            raise self._death

    def drain(self) -> None:
        if self._state in (EngineState.LOADING, EngineState.READY):
            self._state, self._reason = EngineState.DRAINING, "the server is shutting down"

    def stop(self) -> None:
        self.drain()
        self._stopping = True
        for choice in [*self._running, *self._waiting]:
            self._forget(choice)
            choice.stream.finish(EngineNotReady("the server is shutting down"))
        self._desk.fail(EngineNotReady("the server is shutting down"))
        self._wake()

    def fail(self, message: str) -> None:
        """Die as an engine whose step raised: every open stream and `run` raise EngineDead(message)."""
        if self._death is not None:
            return
        self._death = EngineDead(message)
        self._state, self._reason = EngineState.DEAD, message
        for choice in [*self._running, *self._waiting]:
            self._forget(choice)
            choice.stream.finish(self._death)
        self._desk.fail(self._death)
        self._loaded.set()
        self._wake()

    def refuse_next(self, error: EngineError) -> None:
        """The next `submit` or `embed` raises this, for errors that the fake never has a reason for."""
        self._refusal = error

    def submit(self, batch: Sequence[Request]) -> AbstractAsyncContextManager[Submission]:
        return self._submit(batch)

    @asynccontextmanager
    async def _submit(self, batch: Sequence[Request]) -> AsyncIterator[Submission]:
        await checkpoint()
        choices = self._admit(batch)
        prompts = {id(choice.prompt): choice.prompt.info for choice in choices}
        try:
            yield Submission(prompts=list(prompts.values()), choices=[choice.stream for choice in choices])
        finally:
            for choice in choices:
                await choice.stream.aclose()

    async def embed(self, batch: Sequence[EmbedRequest]) -> list[Embedding]:
        await checkpoint()
        self._raise_unless_ready()
        if self._embedding is None:
            raise UnsupportedByEngine(Capability.EMBEDDINGS)
        return await self._desk.embed(batch, self._embedding, self._take_message)

    def _take_message(self, message: EmbeddingJob | DropEmbedding) -> None:
        assert self._embeddings is not None
        self._embeddings.handle(message)
        self._wake()

    def last_steps(self) -> Sequence[StepRecord]:
        return []

    def health(self) -> EngineHealth:
        held = sum(choice.num_pages for choice in self._running)
        busy = bool(self._running or self._waiting or self._desk.num_inputs) and not self._is_stalled
        return EngineHealth(
            self._state,
            self._reason,
            last_step_age=time.monotonic() - self._last_step if busy else None,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            pages_free=self._num_pages - held,
            pages_held=held,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_preemptions=self._num_preemptions,
            prefix_tokens_looked_up=self._num_looked_up,
            num_embedding_inputs=self._desk.num_inputs,
            embedding_tokens=self._embeddings.num_tokens if self._embeddings else 0,
            stats=self._stats,
        )

    def _wake(self) -> None:
        self._work.set()

    def _forget(self, choice: _Choice) -> None:
        """Take a choice out of the schedule; its pages are free at once."""
        for place in (self._running, self._waiting):
            if choice in place:
                place.remove(choice)
        self._wake()

    def _end(self, choice: _Choice, update: ChoiceUpdate) -> None:
        self._forget(choice)
        transfer = choice.prompt.request.kv_transfer_params
        if transfer is not None:
            update.kv_transfer_params = {**transfer, "seed": choice.params.seed}
        choice.stream.deliver(update)

    def _admit(self, batch: Sequence[Request]) -> list[_Choice]:
        self._raise_unless_ready()
        for request in batch:
            self._check(request)
        num_choices = sum(len(request.choices) for request in batch)
        capacity = self._config.max_num_seqs + self._config.max_queued_seqs
        if num_choices > capacity:
            raise RequestTooLarge(f"{num_choices} choices exceed the limit of {capacity}", "n")
        if num_choices + len(self._running) + len(self._waiting) > capacity:
            raise EngineOverloaded("too many requests are waiting")
        choices = [choice for request in batch for choice in self._expand(request)]
        self._last_step = self._last_step if self._running or self._waiting else time.monotonic()
        self._enqueue(choices)
        self._wake()
        return choices

    def _raise_unless_ready(self) -> None:
        if self._refusal is not None:
            error, self._refusal = self._refusal, None
            raise error
        if self._death is not None:
            raise self._death
        if self._state is not EngineState.READY:
            raise EngineNotReady(self._reason or "the engine is not ready")

    def _check(self, request: Request) -> None:
        if not isinstance(request.prompt, TokenPrompt):
            raise UnsupportedByEngine(Capability.TEXT_IN)
        if any(params.constraint is not None for params in request.choices):
            raise UnsupportedByEngine(Capability.CONSTRAINTS)
        token_ids = request.prompt.token_ids
        if not token_ids or any(not 0 <= token_id < VOCAB_SIZE for token_id in token_ids):
            raise RequestTooLarge(f"a prompt has at least one token id, all in [0, {VOCAB_SIZE})", "prompt")
        limit = min(self._max_model_len, self._num_pages * PAGE_SIZE)
        max_tokens = max(self._max_tokens(request, params) for params in request.choices)
        if len(token_ids) + min(1, max_tokens) > limit:
            raise RequestTooLarge(f"the prompt has {len(token_ids)} tokens, the context {limit}", "prompt")
        wanted = len(token_ids) + max_tokens
        if wanted > limit:
            raise RequestTooLarge(f"{wanted} tokens exceed the context of {limit}", "max_tokens")

    def _max_tokens(self, request: Request, params: SamplingParams) -> int:
        assert isinstance(request.prompt, TokenPrompt)
        room = max(1, self._max_model_len - len(request.prompt.token_ids))
        return room if params.max_tokens is None else params.max_tokens

    def _expand(self, request: Request) -> list[_Choice]:
        assert isinstance(request.prompt, TokenPrompt)
        token_ids, num_best = request.prompt.token_ids, request.prompt_logprobs
        num_tokens = len(token_ids)
        prompt = _Prompt(request, PromptInfo(num_tokens), num_tokens, num_tokens)
        if num_best is not None:
            scored = (_logprobs(token_ids[place], -float(place), num_best) for place in range(1, num_tokens))
            prompt.info.logprobs.extend(scored)
        return [self._open(prompt, params) for params in request.choices]

    def _open(self, prompt: _Prompt, params: SamplingParams) -> _Choice:
        stream = BufferedChoiceStream(
            lambda reason: self._end(choice, ChoiceUpdate(end_reason=reason)), on_taken=self._wake
        )
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else EOS_TOKEN_IDS)
        choice = _Choice(prompt, params, stream, self._max_tokens(prompt.request, params), stops)
        return choice

    async def _advance(self) -> None:
        started = time.monotonic()
        self._work = anyio.Event()
        num_prefilled, num_drawn, num_decodes = self._prompt_tokens, self._generation_tokens, self._num_decoding
        is_drawn = self._step()
        if is_drawn:
            now, since = time.monotonic(), self._step_ended_at
            self._last_step = self._step_ended_at = now
            self._num_steps += 1
            num_drawn = self._generation_tokens - num_drawn
            num_rows = self._prompt_tokens - num_prefilled + num_decodes
            self._stats.record_step(now - started, num_rows, num_drawn, min(num_decodes, num_drawn), now - since)
        embedded = self._embeddings.step(beside_generation=is_drawn) if self._embeddings else None
        self._desk.deliver(embedded or [])
        if is_drawn or embedded is not None:
            self._last_step = time.monotonic()
            await self._pause()
        else:
            self._is_stalled = True
            await self._work.wait()
            self._is_stalled, self._last_step = False, time.monotonic()

    @property
    def _num_decoding(self) -> int:
        """Choices whose next token is not their first."""
        return sum(choice.num_made > 0 and self._has_credit(choice) for choice in self._running)

    def _step(self) -> bool:
        """Schedule, prefill, draw. False when there was nothing to do: no work, or no reader has credit."""
        while self._start_one():
            pass
        progress = self._prefill()
        for choice in list(self._running):
            if choice.prompt.num_unfilled == 0 and self._has_credit(choice):
                progress = True
                update = choice.make_token(self._rule, self._logprob_rule)
                self._generation_tokens += len(update.token_ids)
                if update.end_reason is None:
                    choice.stream.deliver(update)
                else:
                    self._end(choice, update)
        return progress

    def _start_one(self) -> bool:
        """Give a place to the first choice in the queue that could use it."""
        choice = next(filter(self._has_credit, self._waiting), None)
        if choice is None:
            return False
        held = sum(other.num_pages for other in self._running)
        if len(self._running) < self._config.max_num_seqs and held + choice.num_pages <= self._num_pages:
            self._waiting.remove(choice)
            self._running.append(choice)
            if choice.prompt.info.started_at is None:
                choice.prompt.info.started_at = time.monotonic()
                self._num_looked_up += choice.prompt.num_tokens
            return True
        stalled = next((other for other in reversed(self._running) if not self._has_credit(other)), None)
        if stalled is not None:
            self._running.remove(stalled)
            self._num_preemptions += 1
            self._enqueue([stalled])
        return stalled is not None

    def _has_credit(self, choice: _Choice) -> bool:
        return choice.num_made - choice.stream.num_taken < self._config.stream_credit

    def _enqueue(self, choices: Sequence[_Choice]) -> None:
        self._waiting.extend(choices)
        self._waiting.sort(key=lambda choice: choice.prompt.request.priority)

    def _prefill(self) -> bool:
        budget = self._config.max_num_batched_tokens
        for choice in self._running:
            num_tokens = min(budget, choice.prompt.num_unfilled)
            choice.prompt.num_unfilled -= num_tokens
            self._prompt_tokens += num_tokens
            budget -= num_tokens
        return budget < self._config.max_num_batched_tokens
