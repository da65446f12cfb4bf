"""An answer on the wire: SSE while it is made, or one JSON body at its end; and its end when the client goes away."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from engine.api import ChatPrompt, EngineError, Prompt, Submission, TextPrompt, TokenPrompt
from service.choice_text import ChoiceEvent
from service.errors import ApiError, error_body
from service.fan_out import FanOut
from service.finished import FinishedRequest, Outcome
from service.generation import Batch, generate
from service.kept_responses import to_be_kept
from service.logs import log_event
from service.presenter import Presenter
from service.presenters import PRESENTERS
from service.response_presenter import ResponsePresenter
from service.running import RunningRequest
from service.schemas.common import Usage
from service.tokenizer import Tokenizer
from service.transcript import Transcript
from service.writers import BodyWriter, StreamWriter, Writer, encoder

if TYPE_CHECKING:
    from service.job import GenerationJob
    from service.lifespan import Services

BYTES_PER_TOKEN = 4
"""Of text, more or less: limits are held to this until the engine has counted."""

CLIENT_GONE = 499
"""Logged as the status of a request whose client left before the headers; nginx's number."""

logger = logging.getLogger("chorus.request")


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
        self._running = RunningRequest(job, services.settings.write_timeout)
        self._presenter: Presenter | None = None
        self._transcript = Transcript(job.num_choices) if services.keeps_content else None
        self._failure: Exception | None = None
        self._last_batch_at = anyio.current_time()
        self._has_started = False
        self._request_headers: Iterable[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "cancelled"
        services, job = self._services, self._job
        self._request_headers = scope.get("headers", [])
        try:
            with (
                services.quotas.running(job.caller, self._num_prompt_tokens),
                services.running.registered(self._running),
            ):
                watch = anyio.CancelScope()
                async with anyio.create_task_group() as request:
                    request.start_soon(cancel_on_disconnect, receive, request.cancel_scope, watch)
                    self._running.watch(request)
                    try:
                        await self._respond(self._running.timed(send), watch)
                    except Exception as error:
                        self._failure = error
                    outcome = self._outcome()
                    request.cancel_scope.cancel()
        except ApiError as error:
            outcome, self._failure = "refused", error
        finally:
            self._record(outcome)
        if self._failure is not None and not self._has_started:
            # raised here, where no task group wraps it
            raise self._failure

    async def _start(self, send: Send, content_length: int | None) -> None:
        self._has_started = True
        if content_length is not None:
            self.headers["content-length"] = str(content_length)
        await super().start_response(send)

    async def _respond(self, send: Send, watch: anyio.CancelScope) -> None:
        services, job, running = self._services, self._job, self._running
        running.check_time()
        tokenizer = services.ready_tokenizer()
        async with services.engine.submit(job.batch) as submission:
            fan_out = FanOut(job, submission.prompts)
            running.begin(submission, fan_out)
            self._presenter = PRESENTERS[job.kind](job, submission.prompts, fan_out, tokenizer)
            writer: Writer = (
                StreamWriter(self._start, self._presenter, send, job.request_id)
                if job.stream
                else BodyWriter(self._start, self._presenter, send)
            )
            # a batch of each choice may wait for the writer; then its stream stays unread, so that the engine waits
            sender, receiver = anyio.create_memory_object_stream[Batch](len(submission.choices))
            with receiver:
                try:
                    async with anyio.create_task_group() as production:
                        running.produce_within(production.cancel_scope)
                        production.start_soon(self._produce, submission, tokenizer, sender, fan_out)
                        pings = anyio.CancelScope()
                        production.start_soon(self._ping, sender, pings)
                        while (batch := await self._next_batch(receiver)) is not None:
                            if self._transcript is not None:
                                self._transcript.add(batch)
                            await writer.write(batch)
                        pings.cancel()
                except Exception as error:
                    self._failure = error
            self._failure = running.failure or self._failure
            if self._failure is None:
                await self._keep(self._presenter)
            # Hypercorn reports the end of an answer as a disconnect too: it may not cut the last send short.
            watch.cancel()
            await writer.end(self._failure)

    async def _keep(self, presenter: Presenter) -> None:
        """Before the client is told that its response is complete."""
        store, job = self._services.responses, self._job
        if store is None or job.kept_input is None or not isinstance(presenter, ResponsePresenter):
            return
        try:
            await store.save(to_be_kept(job, presenter.body()), job.caller.owner)
        except ApiError as error:
            self._failure = error

    async def _produce(
        self,
        submission: Submission,
        tokenizer: Tokenizer,
        events: MemoryObjectSendStream[Batch],
        fan_out: FanOut,
    ) -> None:
        try:
            await generate(self._job, submission, tokenizer, events, fan_out, self._num_running)
        except Exception as error:
            # the writer learns of it at the events' end: cancelled in the middle of a send it could leave half an event
            self._failure = error

    def _num_running(self) -> int:
        """A body is not sent in pieces, so that its choices need no pace; such as may end by text are to have none."""
        is_paced = self._job.stream and not self._job.ends_by_text
        return self._services.running.num_choices if is_paced else 0

    async def _next_batch(self, events: MemoryObjectReceiveStream[Batch]) -> list[ChoiceEvent] | None:
        """All events that wait; none if it is time for a ping; None at their end.

        Always a checkpoint, for `send` is none once the client has gone, and a loop without any would wedge the server.
        """
        try:
            batch = await events.receive()
        except anyio.EndOfStream:
            return None
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                batch += events.receive_nowait()
        self._last_batch_at = anyio.current_time()
        return batch

    async def _ping(self, events: MemoryObjectSendStream[Batch], scope: anyio.CancelScope) -> None:
        """An empty batch whenever there was none for a while. A task of its own: batches are too many for a timer each.

        The writer may be gone, or busy with what it cannot send.
        """
        silence = self._services.settings.ping_seconds
        with scope:
            while True:
                await anyio.sleep_until(self._last_batch_at + silence)
                if anyio.current_time() >= self._last_batch_at + silence:
                    self._last_batch_at = anyio.current_time()
                    with suppress(anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
                        events.send_nowait([])

    @property
    def _num_prompt_tokens(self) -> int:
        """Of all prompts; a guess where the engine has the tokenizer."""
        return sum(map(_num_tokens, (request.prompt for request in self._job.batch)))

    def _outcome(self) -> Outcome:
        if self._failure is None:
            return "cancelled" if self._running.was_cancelled else "ok"
        return "refused" if self._presenter is None and isinstance(self._failure, EngineError) else "error"

    def _record(self, outcome: Outcome) -> None:
        """The metrics and the one log line of this request; it has no text of prompt or answer."""
        job = self._job
        usage = None if self._presenter is None else self._presenter.usage()
        finished = self._finished(outcome, usage)
        self._count(finished)
        if usage is not None:
            unforeseen = max(0, usage.prompt_tokens - self._num_prompt_tokens)
            self._services.quotas.spend(job.caller, usage.completion_tokens + unforeseen)
        log_event(
            logger,
            "request",
            response_id=job.response_id,
            request_id=job.request_id,
            key=job.caller.name,
            model=job.model,
            kind=job.kind,
            n=job.n,
            prompts=len(job.batch),
            stream=job.stream,
            seed=job.batch[0].choices[0].seed,
            outcome=outcome,
            status=self._logged_status(),
            error=self._error_name(),
            prompt_tokens=usage and usage.prompt_tokens,
            completion_tokens=usage and usage.completion_tokens,
            cached_tokens=usage and usage.prompt_tokens_details.cached_tokens,
            # until the engine began with the first prompt; until the first token of any choice; all from the arrival
            queue_ms=_milliseconds(min(finished.queue_seconds, default=None)),
            first_token_ms=_milliseconds(finished.first_token_seconds),
            total_ms=_milliseconds(finished.seconds),
        )

    def _finished(self, outcome: Outcome, usage: Usage | None) -> FinishedRequest:
        finished = FinishedRequest(self._job, outcome, time.monotonic(), usage, failure=self._failure)
        if (fan_out := self._running.fan_out) is None:
            return finished
        answered = () if self._transcript is None else self._transcript.choices()
        return replace(finished, prompts=fan_out.prompts, choices=fan_out.choices, answered=answered)

    def _count(self, finished: FinishedRequest) -> None:
        if finished.outcome == "refused":
            assert finished.failure is not None
            self._services.metrics.refuse(finished.failure)
        else:
            self._services.metrics.record(finished)
        if self._services.tracing is not None:
            self._services.tracing.record(finished, self._request_headers)

    def _error_name(self) -> str | None:
        failure = self._failure or self._running.failure
        if isinstance(failure, ApiError):
            return failure.info.code
        return None if failure is None else type(failure).__name__

    def _logged_status(self) -> int:
        if self._has_started:
            return self.status_code
        return CLIENT_GONE if self._failure is None else error_body(self._failure).status


def _num_tokens(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return len(text.encode()) // BYTES_PER_TOKEN
        case ChatPrompt(messages):
            return len(encoder.encode(messages)) // BYTES_PER_TOKEN


async def cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope, watch: anyio.CancelScope) -> None:
    with watch:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)
