"""What the requests came to that have ended: numbers only, in no exporter's shape."""

from __future__ import annotations

from engine.api import EndReason
from engine.stats import POWERS_OF_TWO, Histogram
from service.errors import error_body
from service.finished import (
    OUTCOMES,
    REFUSAL_REASONS,
    FinishedRequest,
    Outcome,
    RefusalReason,
    refusal_reason,
    seconds_per_token,
)

# As OpenTelemetry's conventions for generative AI advise.
DURATION_BOUNDS = tuple(0.01 * 2**k for k in range(14))
FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

LENGTH_BOUNDS = tuple(float(2**k) for k in range(18))
OPERATIONS = {"chat": "chat", "completion": "text_completion", "response": "response"}
EMBEDDINGS = "embeddings"
"""OpenTelemetry's names of what is asked for."""

PROVIDER = "chorus"
ERROR_TYPES: dict[Outcome, str] = {"ok": "", "error": "error", "cancelled": "cancelled"}


class RequestStats:
    """What the requests came to that have ended, all choices of a request with it."""

    def __init__(self) -> None:
        self.requests: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.refusals: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)
        self.num_choices = 0
        self.ends: dict[EndReason, int] = dict.fromkeys(EndReason, 0)
        self.num_wasted_tokens = 0
        self.seconds = {(kind, outcome): Histogram(DURATION_BOUNDS) for kind in OPERATIONS for outcome in ERROR_TYPES}
        self.first_token_seconds = {kind: Histogram(FIRST_TOKEN_BOUNDS) for kind in OPERATIONS}
        self.token_seconds = {kind: Histogram(TOKEN_BOUNDS) for kind in OPERATIONS}
        self.queue_seconds = Histogram(FIRST_TOKEN_BOUNDS)
        self.n = Histogram(POWERS_OF_TWO)
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.generation_tokens = Histogram(LENGTH_BOUNDS)

    def refuse(self, error: Exception) -> None:
        """error: an unexpected one is no refusal, though nothing was made for the request."""
        if error_body(error).unexpected:
            self.requests["error"] += 1
            return
        self.requests["refused"] += 1
        self.refusals[refusal_reason(error)] += 1

    def record(self, finished: FinishedRequest) -> None:
        self.requests[finished.outcome] += 1
        if finished.choices:
            self.num_choices += finished.job.num_choices
            self.n.observe(finished.job.n)
        self._record_times(finished)
        for reason in finished.end_reasons:
            self.ends[reason] += 1
        self.num_wasted_tokens += finished.num_wasted_tokens
        if finished.usage is not None:
            self.prompt_tokens.observe(finished.usage.prompt_tokens)
            self.generation_tokens.observe(finished.usage.completion_tokens)

    def _record_times(self, finished: FinishedRequest) -> None:
        kind = finished.job.kind
        self.seconds[kind, finished.outcome].observe(finished.seconds)
        for seconds in finished.queue_seconds:
            self.queue_seconds.observe(seconds)
        if (first := finished.first_token_seconds) is not None:
            self.first_token_seconds[kind].observe(first)
        for choice in finished.choices:
            if (each := seconds_per_token(choice)) is not None:
                self.token_seconds[kind].observe(each)
