"""One generation request on its way from its arrival to the engine and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine import api
from service.auth import ANYONE, Caller
from service.fan_out import STEERED_BY_NOTHING, FanOutRules
from service.schemas.common import SamplingFields
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, checked and tokenised.

    batch: one engine request per prompt; choice i of prompt p has index p * n + i. created: unix seconds.
    stop: stop strings. request_id: the client's own, echoed. timeout: seconds from received_at, which is of
    time.monotonic(), to the deadline.
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
    fan_out: FanOutRules = STEERED_BY_NOTHING
    caller: Caller = ANYONE
    received_at: float = 0.0
    timeout: float = math.inf

    @property
    def num_choices(self) -> int:
        return len(self.batch) * self.n


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request came with besides its body. received_at: time.monotonic(). timeout: seconds, of the header."""

    caller: Caller
    received_at: float
    request_id: str | None = None
    timeout: float | None = None

    def timeout_for(self, request: SamplingFields, settings: Settings) -> float:
        """The smallest of what the body, the header and the server say."""
        given = (request.timeout, self.timeout, settings.request_timeout)
        return min(seconds for seconds in given if seconds is not None)
