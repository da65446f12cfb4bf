"""Inputs to be embedded, on their way through an engine: admitted on the event loop, batched where it steps.

Imports no torch.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from engine.api import (
    Embedding,
    EmbeddingFailed,
    EmbeddingInfo,
    EmbedRequest,
    EngineError,
    EngineOverloaded,
    RequestTooLarge,
)
from engine.stats import Histogram

BUSY_SHARE = 4
"""A batch between two steps of generation has a quarter of the tokens that one by itself has."""


class Embedder(Protocol):
    """info: of the loaded model."""

    info: EmbeddingInfo

    def embed(self, batch: Sequence[EmbedRequest]) -> Sequence[array[float] | None]:
        """One vector each, None where its numbers are not finite. Raises MemoryError."""
        ...


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """The inputs of one call. `waiting`, indices longest first, is the engine's; all else the event loop's."""

    batch: Sequence[EmbedRequest]
    waiting: deque[int] = field(init=False)
    vectors: dict[int, Embedding] = field(default_factory=dict)
    failure: EngineError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        # neighbours are padded to the longest of them
        self.waiting = deque(sorted(range(len(self.batch)), key=lambda index: -len(self.batch[index].token_ids)))

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.batch)


@dataclass(frozen=True, slots=True)
class DropEmbedding:
    """A message: nobody waits for this job any more."""

    job: EmbeddingJob


Embedded = tuple[EmbeddingJob, int, Embedding | EmbeddingFailed]
"""What became of an input: job, index."""


class EmbeddingDesk:
    """On the event loop: who gets in, and who waits for what."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._jobs: dict[EmbeddingJob, int] = {}  # with its tokens

    @property
    def num_inputs(self) -> int:
        return sum(len(job.batch) - len(job.vectors) for job in self._jobs)

    async def embed(
        self, batch: Sequence[EmbedRequest], info: EmbeddingInfo, post: Callable[[EmbeddingJob | DropEmbedding], None]
    ) -> list[Embedding]:
        """Admitted before anything is awaited. post: hands a message to the engine."""
        if not batch:
            await checkpoint()
            return []
        job = self._admit(batch, info)
        try:
            post(job)
            await job.ended.wait()
        finally:
            del self._jobs[job]
            if len(job.vectors) < len(batch):
                post(DropEmbedding(job))
        if job.failure is not None:
            raise job.failure
        return [job.vectors[index] for index in range(len(batch))]

    def deliver(self, made: Sequence[Embedded]) -> None:
        for job, index, result in made:
            if job not in self._jobs:
                continue
            if isinstance(result, EmbeddingFailed):
                job.failure = result
            else:
                job.vectors[index] = result
            if job.failure is not None or len(job.vectors) == len(job.batch):
                job.ended.set()

    def fail(self, error: EngineError) -> None:
        """End all jobs with it."""
        for job in self._jobs:
            if not job.ended.is_set():
                job.failure = error
                job.ended.set()

    def _admit(self, batch: Sequence[EmbedRequest], info: EmbeddingInfo) -> EmbeddingJob:
        for request in batch:
            _check(request, info)
        job = EmbeddingJob(batch)
        num_tokens = job.num_tokens
        if num_tokens > self._max_tokens:
            message = f"{num_tokens} tokens were sent at once; this server admits at most {self._max_tokens}"
            raise RequestTooLarge(message, "input")
        if num_tokens + sum(self._jobs.values()) > self._max_tokens:
            raise EngineOverloaded("the queue of inputs to be embedded is full, try again later")
        self._jobs[job] = num_tokens
        return job


def _check(request: EmbedRequest, info: EmbeddingInfo) -> None:
    token_ids, dimensions = request.token_ids, request.dimensions
    if not token_ids:
        raise RequestTooLarge("an input has no tokens", "input")
    if len(token_ids) > info.max_model_len:
        raise RequestTooLarge(f"an input has {len(token_ids)} tokens, the model takes {info.max_model_len}", "input")
    if min(token_ids) < 0 or max(token_ids) >= info.vocab_size:
        raise RequestTooLarge(f"token ids must lie in [0, {info.vocab_size})", "input")
    if dimensions not in (None, info.dimensions) and dimensions not in info.smaller_dimensions:
        raise RequestTooLarge(f"the model has no vectors of {dimensions} dimensions", "dimensions")


class EmbeddingSteps:
    """Where the engine steps: one batch at a time, from several callers at once, owners in turn.

    Beside generation a batch is small, and takes no more of the time than the steps since the last one.
    """

    def __init__(self, embedder: Embedder, max_num_batched_tokens: int, batch_sizes: Histogram) -> None:
        self._embedder = embedder
        self._max_tokens = max_num_batched_tokens
        self._batch_sizes = batch_sizes
        self._owners: dict[str, list[EmbeddingJob]] = {}
        self._resume_at = 0.0  # of time.monotonic()
        self.num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._owners)

    def handle(self, message: EmbeddingJob | DropEmbedding) -> None:
        if isinstance(message, EmbeddingJob):
            self._owners.setdefault(message.batch[0].owner, []).append(message)
        else:
            self._forget(message.job)

    def step(self, *, beside_generation: bool) -> list[Embedded] | None:
        """One batch; None when there was none to do, or it is not its turn."""
        started = time.monotonic()
        if not self._owners or (beside_generation and started < self._resume_at):
            return None
        taken = list(self._take(self._max_tokens // BUSY_SHARE if beside_generation else self._max_tokens))
        batch = [job.batch[index] for job, index in taken]
        try:
            vectors = self._embedder.embed(batch)
        except MemoryError:
            failed = EmbeddingFailed("the server ran out of memory for this input")
            return [(job, index, failed) for job, index in taken]
        self.num_tokens += sum(len(request.token_ids) for request in batch)
        self._batch_sizes.observe(len(batch))
        now = time.monotonic()
        self._resume_at = now + (now - started)
        return [(job, index, _result(vector)) for (job, index), vector in zip(taken, vectors, strict=True)]

    def _take(self, max_tokens: int) -> Iterator[tuple[EmbeddingJob, int]]:
        """At least one input, and more while they fit when padded alike and not more than half of it is padding."""
        num_taken, num_tokens, longest = 0, 0, 0
        first, *_ = self._owners
        served = self._owners[first][0]
        for owner in list(self._owners):
            for job in list(self._owners[owner]):
                while job.waiting:
                    length = len(job.batch[job.waiting[0]].token_ids)
                    padded = max(longest, length) * (num_taken + 1)
                    if num_taken and (padded > max_tokens or padded > 2 * (num_tokens + length)):
                        break
                    num_taken, num_tokens, longest = num_taken + 1, num_tokens + length, max(longest, length)
                    yield job, job.waiting.popleft()
                if not job.waiting:
                    self._forget(job)
        if first in self._owners:  # it has more, which wait for their next turn
            jobs = self._owners.pop(first)
            self._owners[first] = [*jobs[1:], served] if jobs[0] is served else jobs

    def _forget(self, job: EmbeddingJob) -> None:
        owner = job.batch[0].owner
        jobs = [other for other in self._owners.get(owner, ()) if other is not job]
        if jobs:
            self._owners[owner] = jobs
        else:
            self._owners.pop(owner, None)


def _result(vector: array[float] | None) -> Embedding | EmbeddingFailed:
    if vector is None:
        return EmbeddingFailed("the model produced non-finite numbers for this input")
    return Embedding(vector)
