"""One request at its end, for whoever keeps count: metrics and tracing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from engine.api import EndReason, EngineOverloaded, PromptInfo
from service.errors import CONTEXT_LENGTH_EXCEEDED, DEADLINE_EXCEEDED, ApiError, error_body
from service.fan_out import SeenChoice
from service.schemas.common import Usage

if TYPE_CHECKING:
    from service.embedding_request import EmbeddingJob
    from service.job import GenerationJob
    from service.parsers.pieces import Message

Outcome = Literal["ok", "error", "cancelled", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "cancelled", "refused")

RefusalReason = Literal[
    "queue_full", "key_limit", "not_ready", "deadline", "too_large", "unknown_model", "unauthorized", "invalid"
]
REFUSAL_REASONS: tuple[RefusalReason, ...] = (
    "queue_full",
    "key_limit",
    "not_ready",
    "deadline",
    "too_large",
    "unknown_model",
    "unauthorized",
    "invalid",
)

WITHOUT_USE = frozenset({EndReason.CANCELLED, EndReason.ERROR})
"""Ends after which what a choice has made is, as a rule, thrown away."""


def refusal_reason(error: Exception) -> RefusalReason:
    """Why a request was turned away before anything was made for it."""
    if isinstance(error, EngineOverloaded):
        return "queue_full"
    info = error_body(error)
    if info.code == DEADLINE_EXCEEDED:
        return "deadline"
    if info.code == CONTEXT_LENGTH_EXCEEDED or info.status == 413:
        return "too_large"
    by_status: dict[int, RefusalReason] = {
        401: "unauthorized",
        404: "unknown_model" if info.code == "model_not_found" else "invalid",
        429: "key_limit",
        503: "not_ready",
    }
    return by_status.get(info.status, "invalid")


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """ended_at: of time.monotonic(), as all times here. choices, prompts: empty where nothing was admitted. failure:
    what the client was told. answered: the choices' messages, only where traces are to have them.
    """

    job: GenerationJob
    outcome: Outcome
    ended_at: float
    usage: Usage | None = None
    prompts: Sequence[PromptInfo] = ()
    choices: Sequence[SeenChoice] = ()
    failure: Exception | None = None
    answered: Sequence[Message] = ()

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.job.received_at)

    @property
    def end_reasons(self) -> list[EndReason]:
        """Of all choices; those that had not ended were cut short with the request."""
        cut = EndReason.ERROR if self.outcome == "error" else EndReason.CANCELLED
        return [choice.end_reason or cut for choice in self.choices]

    @property
    def queue_seconds(self) -> list[float]:
        """Of each prompt that the engine began with: from the request's arrival till then."""
        begun = (prompt.started_at for prompt in self.prompts)
        return [max(0.0, at - self.job.received_at) for at in begun if at is not None]

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's arrival to the first token of all its choices."""
        first = min((choice.first_token_at for choice in self.choices if choice.first_token_at), default=None)
        return None if first is None else max(0.0, first - self.job.received_at)

    @property
    def num_wasted_tokens(self) -> int:
        ends = zip(self.choices, self.end_reasons, strict=True)
        return sum(choice.num_tokens for choice, end in ends if end in WITHOUT_USE)


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A request that ended before there was a job. route: the handler's path. error: a code or an exception's name.
    Times: of time.monotonic().
    """

    route: str
    outcome: Outcome
    status: int
    error: str
    received_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class FinishedEmbedding:
    """ended_at: of time.monotonic(). failure: what the client was told."""

    job: EmbeddingJob
    outcome: Outcome
    ended_at: float
    failure: Exception | None = None

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended_at - self.job.received_at)

    @property
    def error_name(self) -> str:
        code = self.failure.info.code if isinstance(self.failure, ApiError) else None
        return code or type(self.failure).__name__


class Recorder(Protocol):
    """Tells somebody elsewhere of finished requests (service.tracing, which not every process imports)."""

    async def run(self) -> None:
        """Beside the app, until cancelled."""
        ...

    def record(self, finished: FinishedRequest, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """headers: the request's own. Never blocks."""
        ...

    def refuse(self, turned: TurnedAway, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The same."""
        ...

    def record_embedding(self, finished: FinishedEmbedding, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """As `record`."""
        ...


def seconds_per_token(choice: SeenChoice) -> float | None:
    """After the first token; None for a choice that has no other, or was cut short."""
    if choice.first_token_at is None or choice.ended_at is None or choice.num_tokens < 2:
        return None
    return (choice.ended_at - choice.first_token_at) / (choice.num_tokens - 1)
