"""GET and DELETE /v1/requests: the requests that run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class RunningChoice(Struct, kw_only=True, frozen=True):
    """end_reason: null while it runs or waits."""

    index: int
    completion_tokens: int
    end_reason: str | None


class RunningRequestCard(Struct, kw_only=True, frozen=True):
    """choices: empty until it is admitted. created: unix seconds. request_id: the client's own word for it."""

    id: str
    object: Literal["request"] = "request"
    created: int
    model: str
    kind: Literal["chat", "completion", "response"]
    stream: bool
    n: int
    request_id: str | None
    choices: list[RunningChoice]


class RunningRequestList(Struct, kw_only=True, frozen=True):
    """Oldest first."""

    object: Literal["list"] = "list"
    data: list[RunningRequestCard]


class Cancelled(Struct, kw_only=True, frozen=True):
    id: str
    cancelled: Literal[True] = True
