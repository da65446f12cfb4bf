"""Embeddings on the wire: one JSON body, and an end when the client goes away."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from engine.api import Embedding, EngineError
from service.errors import ApiError, error_body
from service.event_stream import CLIENT_GONE, cancel_on_disconnect
from service.finished import FinishedEmbedding, Outcome
from service.logs import log_event
from service.running import RunningEmbedding, deadline_passed
from service.schemas.embeddings import EmbeddingList, EmbeddingObject, EmbeddingUsage

if TYPE_CHECKING:
    from service.embedding_request import EmbeddingJob
    from service.lifespan import Services

logger = logging.getLogger("chorus.request")


class EmbeddingResponse(ASGIResponse):
    """Runs one job and answers with it. What goes wrong is raised before the first byte: a plain HTTP error."""

    _should_set_content_length = False

    def __init__(self, job: EmbeddingJob, services: Services) -> None:
        super().__init__(media_type="application/json")
        self._job = job
        self._services = services
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "cancelled"
        has_begun = False
        try:
            with self._services.quotas.running(self._job.caller, self._job.num_tokens):
                watch = anyio.CancelScope()
                async with anyio.create_task_group() as request:
                    request.start_soon(cancel_on_disconnect, receive, request.cancel_scope, watch)
                    try:
                        self.body = await self._compute()
                        has_begun = True
                        # Hypercorn reports the end of an answer as a disconnect too
                        watch.cancel()
                        self.headers["content-length"] = str(len(self.body))
                        await super().__call__(scope, receive, send)
                        outcome = "ok"
                    except Exception as error:
                        outcome, self._failure = "error" if has_begun else _outcome(error), error
                    request.cancel_scope.cancel()
        except ApiError as error:
            outcome, self._failure = "refused", error
        finally:
            self._record(outcome, scope)
        if self._failure is not None and not has_begun:
            # raised here, where no task group wraps it
            raise self._failure

    async def _compute(self) -> bytes:
        """Raises ApiError (503) when the deadline passes first, and what the engine raises."""
        job, services = self._job, self._services
        seconds = max(0.0, job.received_at + job.timeout - time.monotonic())
        with anyio.move_on_after(seconds) as scope:
            running = RunningEmbedding(scope)
            services.running_embeddings.add(running)
            try:
                embeddings = await services.engine.embed(job.batch)
            finally:
                services.running_embeddings.remove(running)
            return await anyio.to_thread.run_sync(_encode, job, embeddings, limiter=services.tokenizer_limiter)
        raise running.failure or deadline_passed("its embeddings were made")

    def _record(self, outcome: Outcome, scope: Scope) -> None:
        """The metrics and the one log line of this request; it has no text."""
        job, services = self._job, self._services
        finished = FinishedEmbedding(job, outcome, time.monotonic(), self._failure)
        services.metrics.embeddings.record(finished)
        if services.tracing is not None:
            services.tracing.record_embedding(finished, scope.get("headers", []))
        failure = self._failure
        log_event(
            logger,
            "request",
            request_id=job.request_id,
            key=job.caller.name,
            model=job.model,
            kind="embedding",
            inputs=len(job.batch),
            outcome=outcome,
            status=200 if outcome == "ok" else CLIENT_GONE if failure is None else error_body(failure).status,
            error=None if failure is None else finished.error_name,
            prompt_tokens=job.num_tokens,
            total_ms=round(1000 * finished.seconds),
        )


def _outcome(error: Exception) -> Outcome:
    """Of what was raised before the first byte: a refusal is the answer to a request that was never begun."""
    return "refused" if isinstance(error, ApiError | EngineError) and error_body(error).status < 500 else "error"


def _encode(job: EmbeddingJob, embeddings: Sequence[Embedding]) -> bytes:
    data = []
    for index, embedding in enumerate(embeddings):
        values = embedding.values
        shown = base64.b64encode(values.tobytes()).decode() if job.as_base64 else values.tolist()
        data.append(EmbeddingObject(index=index, embedding=shown))
    usage = EmbeddingUsage(prompt_tokens=job.num_tokens, total_tokens=job.num_tokens)
    return msgspec.json.encode(EmbeddingList(data=data, model=job.model, usage=usage))
