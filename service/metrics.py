"""Prometheus metrics: what requests came to, and the engine's state as it is when scraped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from engine.api import EndReason, Engine
from service.schemas.common import Usage

Outcome = Literal["ok", "error", "cancelled", "refused"]

OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "cancelled", "refused")


class Metrics(Collector):
    """Label values are fixed, so the number of series does not depend on what clients send."""

    media_type = CONTENT_TYPE_LATEST.removesuffix("; charset=utf-8")  # Litestar adds the charset

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self._choices = 0
        self._ends: dict[EndReason, int] = dict.fromkeys(EndReason, 0)
        self._cached_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def record(
        self, outcome: Outcome, num_choices: int, usage: Usage | None, end_reasons: Iterable[EndReason] = ()
    ) -> None:
        """Once for each generation request, at its end. num_choices: all that were asked for. end_reasons: theirs."""
        self._requests[outcome] += 1
        if outcome != "refused":
            self._choices += num_choices
        for reason in end_reasons:
            self._ends[reason] += 1
        if usage is not None:
            self._cached_tokens += usage.prompt_tokens_details.cached_tokens

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._request_metrics()
        yield from self._engine_metrics()

    def _request_metrics(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("chorus_requests", "Generation requests that have ended.", labels=["outcome"])
        for outcome, count in self._requests.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily("chorus_choices", "Choices of requests that have ended.", value=self._choices)
        ends = CounterMetricFamily("chorus_choices_ended", "Why choices ended.", labels=["end_reason"])
        for reason, count in self._ends.items():
            ends.add_metric([reason.value], count)
        yield ends
        yield CounterMetricFamily(
            "chorus_cached_prompt_tokens",
            "Prompt tokens that an earlier request had left in the cache.",
            value=self._cached_tokens,
        )

    def _engine_metrics(self) -> Iterator[Metric]:
        health = self._engine.health()
        yield GaugeMetricFamily("chorus_sequences_running", "Choices that run.", value=health.num_running)
        yield GaugeMetricFamily("chorus_sequences_waiting", "Choices in the queue.", value=health.num_waiting)
        pages = GaugeMetricFamily("chorus_kv_pages", "Pages of keys and values.", labels=["state"])
        for state, count in (("free", health.pages_free), ("cached", health.pages_cached), ("held", health.pages_held)):
            pages.add_metric([state], count)
        yield pages
        yield SummaryMetricFamily(
            "chorus_step_seconds",
            "Seconds that engine steps took.",
            count_value=health.num_steps,
            sum_value=health.step_seconds_sum,
        )
        yield CounterMetricFamily("chorus_prompt_tokens", "Prompt tokens computed.", value=health.prompt_tokens)
        yield CounterMetricFamily("chorus_generation_tokens", "Tokens generated.", value=health.generation_tokens)
        yield GaugeMetricFamily(
            "chorus_engine_heartbeat_age_seconds",
            "Seconds since the engine last made progress while it has work; 0 without work.",
            value=health.last_step_age or 0.0,
        )


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
