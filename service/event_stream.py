"""An answer on the wire: SSE while it is made, or one JSON body at its end; and its end when the client goes away."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from engine.api import EngineError, Submission
from service.errors import error_body
from service.generation import ChoiceEvent, generate
from service.logs import log_event
from service.metrics import Outcome
from service.presenters import PRESENTERS, Presenter
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.lifespan import Services
    from service.requests import GenerationJob

EVENTS_PER_CHOICE = 4
"""Events that may wait for the writer, per choice; beyond them its stream stays unread, so that the engine waits."""

CLIENT_GONE = 499
"""Logged as the status of a request whose client left before the headers; nginx's number."""

logger = logging.getLogger("chorus.request")
encoder = msgspec.json.Encoder()


class GenerationResponse(ASGIResponse):
    """Runs one job and answers with it.

    The batch is admitted before the first byte: what goes wrong before it is raised, and becomes a plain HTTP error;
    what goes wrong later ends the stream with an error event. A disconnect cancels the scope that all of this runs in,
    `engine.submit` included.
    """

    _should_set_content_length = False

    def __init__(self, job: GenerationJob, services: Services) -> None:
        headers = {"X-Chorus-Response-Id": job.response_id}
        if job.request_id is not None:
            headers["X-Request-Id"] = job.request_id
        if job.stream:
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream" if job.stream else "application/json", headers=headers)
        self._job = job
        self._services = services
        self._presenter: Presenter | None = None
        self._failure: Exception | None = None
        self._first_event_at: float | None = None
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = anyio.current_time()
        outcome: Outcome = "cancelled"
        try:
            watch = anyio.CancelScope()
            async with anyio.create_task_group() as request:
                request.start_soon(_cancel_on_disconnect, receive, request.cancel_scope, watch)
                try:
                    await self._respond(send, watch)
                except Exception as error:
                    self._failure = error
                outcome = self._outcome()
                request.cancel_scope.cancel()
        finally:
            self._record(outcome, started_at)
        if self._failure is not None and not self._has_started:
            # raised here, where no task group wraps it
            raise self._failure

    async def start_response(self, send: Send) -> None:
        self._has_started = True
        await super().start_response(send)

    async def _respond(self, send: Send, watch: anyio.CancelScope) -> None:
        tokenizer, ping_seconds = self._services.ready_tokenizer(), self._services.settings.ping_seconds
        async with self._services.engine.submit(self._job.batch) as submission:
            self._presenter = PRESENTERS[self._job.kind](self._job, submission.prompts)
            writer: Writer = (StreamWriter if self._job.stream else BodyWriter)(self, self._presenter, send)
            await writer.begin()
            sender, receiver = anyio.create_memory_object_stream[ChoiceEvent](
                EVENTS_PER_CHOICE * len(submission.choices)
            )
            with receiver:
                try:
                    async with anyio.create_task_group() as production:
                        production.start_soon(self._produce, submission, tokenizer, sender)
                        while (batch := await self._next_batch(receiver, ping_seconds)) is not None:
                            await writer.write(batch)
                except Exception as error:
                    self._failure = error
            # Hypercorn reports the end of an answer as a disconnect too: it may not cut the last send short.
            watch.cancel()
            await writer.end(self._failure)

    async def _produce(
        self, submission: Submission, tokenizer: Tokenizer, events: MemoryObjectSendStream[ChoiceEvent]
    ) -> None:
        try:
            await generate(self._job, submission, tokenizer, events)
        except Exception as error:
            # the writer learns of it at the events' end: cancelled in the middle of a send it could leave half an event
            self._failure = error

    async def _next_batch(
        self, events: MemoryObjectReceiveStream[ChoiceEvent], silence: float
    ) -> list[ChoiceEvent] | None:
        """All events that wait; none after `silence` seconds without any; None at their end.

        Always a checkpoint, for `send` is none once the client has gone, and a loop without any would wedge the server.
        """
        with anyio.move_on_after(silence):
            try:
                batch = [await events.receive()]
            except anyio.EndOfStream:
                return None
            if self._first_event_at is None:
                self._first_event_at = anyio.current_time()
            with suppress(anyio.WouldBlock, anyio.EndOfStream):
                while True:
                    batch.append(events.receive_nowait())
            return batch
        return []

    def _outcome(self) -> Outcome:
        if self._failure is None:
            return "ok"
        return "refused" if self._presenter is None and isinstance(self._failure, EngineError) else "error"

    def _record(self, outcome: Outcome, started_at: float) -> None:
        """The metrics and the one log line of this request; it has no text of prompt or answer."""
        job, now = self._job, anyio.current_time()
        usage = None if self._presenter is None else self._presenter.usage()
        self._services.metrics.record(outcome, 0 if usage is None else len(job.batch) * job.n, usage)
        first_event_at = now if self._first_event_at is None else self._first_event_at
        log_event(
            logger,
            "request",
            response_id=job.response_id,
            request_id=job.request_id,
            model=job.model,
            kind=job.kind,
            n=job.n,
            prompts=len(job.batch),
            stream=job.stream,
            seed=job.batch[0].choices[0].seed,
            outcome=outcome,
            status=self._logged_status(),
            error=None if self._failure is None else type(self._failure).__name__,
            prompt_tokens=usage and usage.prompt_tokens,
            completion_tokens=usage and usage.completion_tokens,
            cached_tokens=usage and usage.prompt_tokens_details.cached_tokens,
            # until the engine's first update: waiting and prefill
            queue_ms=round((first_event_at - started_at) * 1000),
            total_ms=round((now - started_at) * 1000),
        )

    def _logged_status(self) -> int:
        if self._has_started:
            return self.status_code
        return CLIENT_GONE if self._failure is None else error_body(self._failure).status


class Writer(Protocol):
    """begin, write every batch of events, end. failure: what ended the events early."""

    async def begin(self) -> None: ...

    async def write(self, batch: list[ChoiceEvent]) -> None: ...

    async def end(self, failure: Exception | None) -> None: ...


class StreamWriter:
    """Server-sent events; all that waits goes out in one send. A failure is the last event, without [DONE]."""

    def __init__(self, response: GenerationResponse, presenter: Presenter, send: Send) -> None:
        self._response = response
        self._presenter = presenter
        self._send = send

    async def begin(self) -> None:
        await self._response.start_response(self._send)

    async def write(self, batch: list[ChoiceEvent]) -> None:
        chunks = [_sse(encoder.encode(chunk)) for event in batch for chunk in self._presenter.chunks(event)]
        # a comment in times of silence keeps proxies from cutting the stream, and lets a hidden disconnect show
        body = b"".join(chunks) if batch else b": ping\n\n"
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, failure: Exception | None) -> None:
        if failure is None:
            chunks = [encoder.encode(chunk) for chunk in self._presenter.last_chunks()]
            body = b"".join(map(_sse, [*chunks, b"[DONE]"]))
        else:
            info = error_body(failure)
            if info.unexpected:
                logger.error("unexpected error in a stream", exc_info=failure)
            body = _sse(info.encode())
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class BodyWriter:
    """One JSON body, or the failure raised."""

    def __init__(self, response: GenerationResponse, presenter: Presenter, send: Send) -> None:
        self._response = response
        self._presenter = presenter
        self._send = send

    async def begin(self) -> None:
        """Nothing is sent before the whole is there."""

    async def write(self, batch: list[ChoiceEvent]) -> None:
        for event in batch:
            self._presenter.collect(event)

    async def end(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure
        body = encoder.encode(self._presenter.body())
        self._response.headers["content-length"] = str(len(body))
        await self._response.start_response(self._send)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope, watch: anyio.CancelScope) -> None:
    with watch:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
