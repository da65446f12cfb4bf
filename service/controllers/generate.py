"""What the generation endpoints share: body, job, answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from litestar import Request

from service.controllers.receive import in_time, receive
from service.event_stream import GenerationResponse
from service.job import Arrival, GenerationJob
from service.lifespan import Services
from service.refusal import turn_away
from service.schemas.common import SamplingFields

T = TypeVar("T", bound=SamplingFields)

Prepare = Callable[[T, Services, Arrival], Awaitable[GenerationJob]]


async def generate(
    request: Request[Any, Any, Any], services: Services, type_: type[T], prepare: Prepare[T]
) -> GenerationResponse:
    """A request that ends here is told of here, all others at their end."""
    received_at = time.monotonic()
    try:
        decoded, arrival = await receive(request, services, type_)
        seconds = arrival.seconds(decoded.timeout, services.settings)
        job = await in_time(prepare(decoded, services, arrival), arrival, seconds)
    except Exception as error:
        turn_away(request, services, received_at, error, services.metrics.refuse)
        raise
    return GenerationResponse(job, services)
