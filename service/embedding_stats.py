"""What the requests for embeddings came to that have ended: numbers only, in no exporter's shape."""

from __future__ import annotations

from engine.stats import Histogram
from service.errors import error_body
from service.finished import OUTCOMES, REFUSAL_REASONS, FinishedEmbedding, Outcome, RefusalReason, refusal_reason
from service.request_stats import DURATION_BOUNDS, ERROR_TYPES


class EmbeddingStats:
    def __init__(self) -> None:
        self.requests: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
        self.refusals: dict[RefusalReason, int] = dict.fromkeys(REFUSAL_REASONS, 0)
        self.num_inputs = 0
        self.seconds = {outcome: Histogram(DURATION_BOUNDS) for outcome in ERROR_TYPES}

    def refuse(self, error: Exception) -> None:
        """As RequestStats has it."""
        if error_body(error).unexpected:
            self.requests["error"] += 1
            return
        self.requests["refused"] += 1
        self.refusals[refusal_reason(error)] += 1

    def record(self, finished: FinishedEmbedding) -> None:
        """Count a request at its end, turned away by the engine or not."""
        if finished.outcome == "refused":
            assert finished.failure is not None
            self.refuse(finished.failure)
            return
        self.requests[finished.outcome] += 1
        self.seconds[finished.outcome].observe(finished.seconds)
        if finished.outcome == "ok":
            self.num_inputs += len(finished.job.batch)
