"""The same numbers under vLLM's names, for dashboards and gateways that know those only.

Names and labels as vLLM's V1 engine has them (vllm/v1/metrics/loggers.py); histograms have our own bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.api import EndReason, Engine
from engine.stats import merged
from service.metric_families import counter, counters, gauge, histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from service.request_stats import RequestStats

FINISHED_REASONS = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.DEADLINE: "length",
    EndReason.CANCELLED: "abort",
    EndReason.ERROR: "error",
}


def vllm_metrics(engine: Engine, requests: RequestStats) -> Iterator[Metric]:
    labels = {"model_name": engine.info.model, "engine": "0"}
    health = engine.health()
    num_pages = health.pages_free + health.pages_cached + health.pages_held
    yield gauge("vllm:num_requests_running", "Choices that run.", labels, health.num_running)
    yield gauge("vllm:num_requests_waiting", "Choices in the queue.", labels, health.num_waiting)
    text = "Share of the pages of keys and values that running choices hold."
    yield gauge("vllm:kv_cache_usage_perc", text, labels, health.pages_held / num_pages if num_pages else 0.0)
    counts = {
        "vllm:num_preemptions": ("Choices that were put off and computed again.", health.num_preemptions),
        "vllm:prompt_tokens": ("Prompt tokens computed.", health.prompt_tokens),
        "vllm:generation_tokens": ("Tokens generated.", health.generation_tokens),
        "vllm:spec_decode_num_draft_tokens": ("Tokens that were guessed.", health.draft_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Guessed tokens that came true.", health.accepted_draft_tokens),
        "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache.", health.prefix_tokens_looked_up),
        "vllm:prefix_cache_hits": ("Prompt tokens found in the cache.", health.prefix_tokens_found),
    }
    for name, (text, count) in counts.items():
        yield counter(name, text, labels, count)
    ended = Counter(dict.fromkeys(FINISHED_REASONS.values(), 0))
    for reason, count in requests.ends.items():
        ended[FINISHED_REASONS[reason]] += count
    yield counters("vllm:request_success", "Choices that have ended.", "finished_reason", ended, labels)
    stats = health.stats
    histograms = {
        "vllm:e2e_request_latency_seconds": ("Seconds of a request.", merged(requests.seconds.values())),
        "vllm:time_to_first_token_seconds": (
            "Seconds to a request's first token.",
            merged(requests.first_token_seconds.values()),
        ),
        "vllm:inter_token_latency_seconds": ("Seconds from token to token.", stats.inter_token_seconds),
        "vllm:request_time_per_output_token_seconds": (
            "Seconds for each token of a choice after its first.",
            merged(requests.token_seconds.values()),
        ),
        "vllm:request_queue_time_seconds": ("Seconds until the engine began.", requests.queue_seconds),
        "vllm:request_prompt_tokens": ("Prompt tokens of a request.", requests.prompt_tokens),
        "vllm:request_generation_tokens": ("Tokens generated for a request.", requests.generation_tokens),
        "vllm:request_params_n": ("n of a request.", requests.n),
        "vllm:iteration_tokens_total": ("Tokens computed in a step.", stats.step_tokens),
    }
    for name, (text, counted) in histograms.items():
        yield histogram(name, text, (labels, counted))
