"""Prometheus metrics: what requests came to, and the engine's state as it is when scraped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api import Engine
from service import __version__
from service.embedding_stats import EmbeddingStats
from service.finished import FinishedRequest
from service.metric_families import Labels, counters, histogram
from service.metrics_compat import vllm_metrics
from service.request_stats import EMBEDDINGS, ERROR_TYPES, OPERATIONS, PROVIDER, RequestStats


class Metrics(Collector):
    """Label values are fixed, so the number of series does not depend on what clients send.

    compat: also under the names of this other server.
    """

    media_type = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")  # Litestar adds the charset

    def __init__(self, engine: Engine, compat: str | None = None) -> None:
        self._engine = engine
        self._compat = compat
        self._stats = RequestStats()
        self.embeddings = EmbeddingStats()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def refuse(self, error: Exception) -> None:
        """Count a request that ended before anything was made for it."""
        self._stats.refuse(error)

    def record(self, finished: FinishedRequest) -> None:
        """Count a request that was not turned away, once and at its end."""
        self._stats.record(finished)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._request_metrics()
        yield from self._duration_metrics()
        yield from self._engine_metrics()
        yield from self._step_metrics()
        yield from self._upstream_metrics()
        if self._engine.info.embedding is not None:
            yield from self._embedding_metrics()
        if self._compat == "vllm":
            yield from vllm_metrics(self._engine, self._stats)

    def _request_metrics(self) -> Iterator[Metric]:
        stats = self._stats
        yield counters("chorus_requests", "Generation requests that have ended.", "outcome", stats.requests)
        yield counters("chorus_refusals", "Why generation requests were turned away.", "reason", stats.refusals)
        yield CounterMetricFamily("chorus_choices", "Choices of requests that have ended.", value=stats.num_choices)
        yield counters("chorus_choices_ended", "Why choices ended.", "end_reason", stats.ends)
        yield CounterMetricFamily(
            "chorus_aborted_tokens",
            "Tokens of choices that were cancelled or failed, so that they were made for nothing.",
            value=stats.num_wasted_tokens,
        )
        yield histogram("chorus_choices_per_request", "n of the requests that were admitted.", ({}, stats.n))
        text = "Seconds from a request's arrival until the engine began with its prompt."
        yield histogram("chorus_queue_seconds", text, ({}, stats.queue_seconds))
        yield histogram("chorus_request_prompt_tokens", "Prompt tokens of a request.", ({}, stats.prompt_tokens))
        text = "Tokens generated for all choices of a request."
        yield histogram("chorus_request_generation_tokens", text, ({}, stats.generation_tokens))

    def _duration_metrics(self) -> Iterator[Metric]:
        """OpenTelemetry's histograms of a server of generative AI, under the names that its exporters give them."""
        stats = self._stats
        durations = [
            (self._operation(kind) | {"error_type": ERROR_TYPES[outcome]}, seconds)
            for (kind, outcome), seconds in stats.seconds.items()
        ]
        if (embedding := self._engine.info.embedding) is not None:
            labels = self._named(EMBEDDINGS, embedding.model)
            durations += [
                (labels | {"error_type": ERROR_TYPES[outcome]}, seconds)
                for outcome, seconds in self.embeddings.seconds.items()
            ]
        text = "Seconds from a request's arrival to the end of its answer."
        yield histogram("gen_ai_server_request_duration_seconds", text, *durations)
        firsts = [(self._operation(kind), seconds) for kind, seconds in stats.first_token_seconds.items()]
        text = "Seconds from a request's arrival to the first token of its choices."
        yield histogram("gen_ai_server_time_to_first_token_seconds", text, *firsts)
        tokens = [(self._operation(kind), seconds) for kind, seconds in stats.token_seconds.items()]
        text = "Seconds for each token of a choice after its first."
        yield histogram("gen_ai_server_time_per_output_token_seconds", text, *tokens)

    def _operation(self, kind: str) -> Labels:
        return self._named(OPERATIONS[kind], self._engine.info.model)

    @staticmethod
    def _named(operation: str, model: str) -> Labels:
        return {
            "gen_ai_operation_name": operation,
            "gen_ai_provider_name": PROVIDER,
            "gen_ai_request_model": model,
        }

    def _engine_metrics(self) -> Iterator[Metric]:
        info, health = self._engine.info, self._engine.health()
        build = GaugeMetricFamily("chorus_build_info", "Always 1.", labels=["version", "model", "runner"])
        build.add_metric([__version__, info.model, info.backend], 1)
        yield build
        yield GaugeMetricFamily("chorus_sequences_running", "Choices that run.", value=health.num_running)
        yield GaugeMetricFamily("chorus_sequences_waiting", "Choices in the queue.", value=health.num_waiting)
        pages = GaugeMetricFamily("chorus_kv_pages", "Pages of keys and values.", labels=["state"])
        for state, count in (("free", health.pages_free), ("cached", health.pages_cached), ("held", health.pages_held)):
            pages.add_metric([state], count)
        yield pages
        text = "Choices that gave their pages or their place up and were computed again."
        yield CounterMetricFamily("chorus_preemptions", text, value=health.num_preemptions)
        yield CounterMetricFamily("chorus_prompt_tokens", "Prompt tokens computed.", value=health.prompt_tokens)
        text = "Prompt tokens that were looked up in the cache."
        yield CounterMetricFamily("chorus_looked_up_prompt_tokens", text, value=health.prefix_tokens_looked_up)
        text = "Prompt tokens that an earlier request had left in the cache."
        yield CounterMetricFamily("chorus_cached_prompt_tokens", text, value=health.prefix_tokens_found)
        yield CounterMetricFamily("chorus_generation_tokens", "Tokens generated.", value=health.generation_tokens)
        yield CounterMetricFamily("chorus_draft_tokens", "Tokens that were guessed.", value=health.draft_tokens)
        text = "Guessed tokens that came true."
        yield CounterMetricFamily("chorus_accepted_draft_tokens", text, value=health.accepted_draft_tokens)
        yield GaugeMetricFamily(
            "chorus_engine_heartbeat_age_seconds",
            "Seconds since the engine last made progress while it has work; 0 without work.",
            value=health.last_step_age or 0.0,
        )

    def _embedding_metrics(self) -> Iterator[Metric]:
        stats, health = self.embeddings, self._engine.health()
        text = "Requests for embeddings that have ended."
        yield counters("chorus_embedding_requests", text, "outcome", stats.requests)
        text = "Why requests for embeddings were turned away."
        yield counters("chorus_embedding_refusals", text, "reason", stats.refusals)
        text = "Inputs of requests for embeddings that were answered."
        yield CounterMetricFamily("chorus_embedding_inputs", text, value=stats.num_inputs)
        text = "Tokens that were embedded."
        yield CounterMetricFamily("chorus_embedding_tokens", text, value=health.embedding_tokens)
        text = "Inputs that are not embedded yet."
        yield GaugeMetricFamily("chorus_embedding_inputs_waiting", text, value=health.num_embedding_inputs)
        text = "Inputs that were embedded at once."
        yield histogram("chorus_embedding_batch_size", text, ({}, health.stats.embedding_batch_size))

    def _upstream_metrics(self) -> Iterator[Metric]:
        """Of an engine that has such; their names are the operator's, in the settings."""
        upstreams = self._engine.health().upstreams
        if not upstreams:
            return
        up = GaugeMetricFamily("chorus_upstream_up", "1 while it answers and has the model.", labels=["upstream"])
        text = "1 while it gets nothing, since it has failed too often."
        is_open = GaugeMetricFamily("chorus_upstream_circuit_open", text, labels=["upstream"])
        choices = GaugeMetricFamily("chorus_upstream_choices", "Choices that it has now.", labels=["upstream"])
        text = "Requests of choices to it that have ended, by what came of them."
        requests = CounterMetricFamily("chorus_upstream_requests", text, labels=["upstream", "outcome"])
        for upstream in upstreams:
            up.add_metric([upstream.name], upstream.is_up)
            is_open.add_metric([upstream.name], upstream.is_open)
            choices.add_metric([upstream.name], upstream.num_choices)
            for outcome, count in upstream.requests.items():
                requests.add_metric([upstream.name, outcome], count)
        yield from (up, is_open, choices, requests)

    def _step_metrics(self) -> Iterator[Metric]:
        stats = self._engine.health().stats
        yield histogram("chorus_step_seconds", "Seconds that engine steps took.", ({}, stats.step_seconds))
        yield histogram("chorus_step_tokens", "Tokens that engine steps computed.", ({}, stats.step_tokens))
        text = "Choices that engine steps drew a token for."
        yield histogram("chorus_batch_size", text, ({}, stats.batch_size))
        text = "Seconds from a token of a choice to its next, in the engine."
        yield histogram("chorus_inter_token_seconds", text, ({}, stats.inter_token_seconds))


def metrics_app(metrics: Metrics) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """An app that has nothing but GET /metrics, for an address of its own; whoever reaches that needs no key."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            found = scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD")
            body = metrics.render() if found else b""
            headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200 if found else 404, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


async def _live(receive: Any, send: Any) -> None:
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})
