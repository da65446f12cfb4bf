"""Spans of OpenTelemetry: one for a request, one for each of its choices. Imported only where they are wanted.

All spans of a request are made at its end, from the times that are kept anyway: nothing is done per token. They leave
in batches, from a task of the app's own. Texts of prompts and answers are in them only where the settings say so.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service import __version__
from service.errors import ApiError
from service.request_stats import EMBEDDINGS, OPERATIONS, PROVIDER
from service.transcript import input_messages, output_messages

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from engine.api import PromptInfo, SamplingParams
    from service.fan_out import SeenChoice
    from service.finished import FinishedEmbedding, FinishedRequest, TurnedAway

logger = logging.getLogger("chorus.tracing")

EXPORT_SECONDS = 2.0
"""From one batch to the next, and for the last one at the end."""

MAX_WAITING = 4096
"""Spans that wait for a collector; beyond it the oldest are lost, rather than memory."""

Headers = Iterable[tuple[bytes, bytes]]


class _Waiting(SpanProcessor):
    """Ended spans, until they are taken."""

    def __init__(self) -> None:
        self.spans: deque[ReadableSpan] = deque(maxlen=MAX_WAITING)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.spans.append(span)


class Tracing:
    """exporter: where spans go. OpenTelemetry's own variables, such as OTEL_TRACES_SAMPLER, say which and as whose."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._waiting = _Waiting()
        ours = Resource({"service.name": "chorus", "service.version": __version__})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(self._waiting)
        self._tracer = provider.get_tracer("chorus", __version__)

    async def run(self) -> None:
        """Export until cancelled, and once more then."""
        try:
            while True:
                await anyio.sleep(EXPORT_SECONDS)
                await self._export()
        finally:
            with anyio.move_on_after(EXPORT_SECONDS, shield=True):
                await self._export()

    async def _export(self) -> None:
        batch = list(self._waiting.spans)
        self._waiting.spans.clear()
        if not batch:
            return
        result = await anyio.to_thread.run_sync(self._exporter.export, batch, abandon_on_cancel=True)
        if result is not SpanExportResult.SUCCESS:
            logger.warning("%d spans were lost: the collector did not take them", len(batch))

    def record(self, finished: FinishedRequest, headers: Headers) -> None:
        """headers: the request's, whose `traceparent` is the parent where there is one."""
        job, to_unix = finished.job, time.time_ns() - time.monotonic_ns()

        def unix(moment: float) -> int:
            return int(moment * 1e9) + to_unix

        span = self._tracer.start_span(
            f"{OPERATIONS[job.kind]} {job.model}",
            context=_parent(headers),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(finished),
            start_time=unix(job.received_at),
        )
        if finished.outcome in ("error", "refused"):
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span)
        for index, choice in enumerate(finished.choices):
            prompt, params = finished.prompts[index // job.n], job.batch[index // job.n].choices[index % job.n]
            child = self._tracer.start_span(
                f"choice {index}",
                context=within,
                attributes=_choice_attributes(index, choice, params),
                start_time=unix(job.received_at),
            )
            for name, moment in _events(job.received_at, prompt, choice):
                child.add_event(name, timestamp=unix(moment))
            child.end(unix(choice.ended_at or finished.ended_at))
        span.end(unix(finished.ended_at))

    def refuse(self, turned: TurnedAway, headers: Headers) -> None:
        """What was asked for may be anything, so that the span has the route's name alone."""
        to_unix = time.time_ns() - time.monotonic_ns()
        attributes: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": turned.route,
            "http.response.status_code": turned.status,
            "error.type": turned.error,
            "chorus.outcome": turned.outcome,
        }
        span = self._tracer.start_span(
            f"POST {turned.route}",
            context=_parent(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int(turned.received_at * 1e9) + to_unix,
        )
        span.set_status(Status(StatusCode.ERROR))
        span.end(int(turned.ended_at * 1e9) + to_unix)

    def record_embedding(self, finished: FinishedEmbedding, headers: Headers) -> None:
        """As `record`."""
        to_unix = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{EMBEDDINGS} {finished.job.model}",
            context=_parent(headers),
            kind=SpanKind.SERVER,
            attributes=_embedding_attributes(finished),
            start_time=int(finished.job.received_at * 1e9) + to_unix,
        )
        if finished.outcome in ("error", "refused"):
            span.set_status(Status(StatusCode.ERROR))
        span.end(int(finished.ended_at * 1e9) + to_unix)


def _embedding_attributes(finished: FinishedEmbedding) -> dict[str, Any]:
    job = finished.job
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": EMBEDDINGS,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": job.model,
        "gen_ai.usage.input_tokens": job.num_tokens,
        "chorus.inputs": len(job.batch),
        "chorus.outcome": finished.outcome,
    }
    if job.batch[0].dimensions is not None:
        attributes["gen_ai.embeddings.dimension.count"] = job.batch[0].dimensions
    if finished.failure is not None:
        attributes["error.type"] = finished.error_name
    return attributes


def tracing_to(endpoint: str) -> Tracing:
    """endpoint: a collector's base URL, for OTLP over HTTP."""
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # we say it ourselves, once a batch
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
    return Tracing(exporter)


def _parent(headers: Headers) -> Context:
    wanted = {b"traceparent", b"tracestate"}
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in wanted}
    return TraceContextTextMapPropagator().extract(carrier)


def _events(received_at: float, prompt: PromptInfo, choice: SeenChoice) -> Sequence[tuple[str, float]]:
    """What a choice went through, as far as it came: the queue, then its prompt, then its own tokens."""
    moments = [("queue", received_at), ("prefill", prompt.started_at), ("decode", choice.first_token_at)]
    return [(name, moment) for name, moment in moments if moment is not None]


def _request_attributes(finished: FinishedRequest) -> dict[str, Any]:
    job, params = finished.job, finished.job.batch[0].choices[0]
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[job.kind],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": job.model,
        "gen_ai.request.choice.count": job.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": str(params.seed),  # up to 64 bits without a sign, which OTLP has no number for
        "gen_ai.response.id": job.response_id,
        "gen_ai.response.model": job.model,
        "chorus.outcome": finished.outcome,
        "chorus.stream": job.stream,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if finished.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = finished.usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = finished.usage.completion_tokens
        attributes["chorus.usage.cached_tokens"] = finished.usage.prompt_tokens_details.cached_tokens
    if finished.choices:
        attributes["gen_ai.response.finish_reasons"] = [reason.value for reason in finished.end_reasons]
    if job.asked:
        attributes["gen_ai.input.messages"] = input_messages(job.asked)
    if finished.answered:
        attributes["gen_ai.output.messages"] = output_messages(finished.answered, finished.end_reasons)
    if (failure := finished.failure) is not None:
        code = failure.info.code if isinstance(failure, ApiError) else None
        attributes["error.type"] = code or type(failure).__name__
    return attributes


def _choice_attributes(index: int, choice: SeenChoice, params: SamplingParams) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "chorus.choice.index": index,
        "gen_ai.request.seed": str(params.seed),
        "gen_ai.usage.output_tokens": choice.num_tokens,
    }
    if choice.end_reason is not None:
        attributes["chorus.end_reason"] = choice.end_reason.value
    return attributes
