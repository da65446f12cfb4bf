"""From a decoded body to an engine batch: cross-field checks, chat template, tokens. 4xx ends here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine import api


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, checked and tokenised.

    batch: one engine request per prompt; choice i of prompt p has index p * n + i. created: unix seconds.
    stop: stop strings. request_id: the client's X-Request-Id, echoed.
    """

    kind: Literal["chat", "completion"]
    response_id: str
    created: int
    model: str
    batch: tuple[api.Request, ...]
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    request_id: str | None
