"""What the generation endpoints share: body, job, answer."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from litestar import Request

from engine.api import EngineError
from service.decoding import check_media_type, decode_body, read_body
from service.errors import ApiError, invalid
from service.event_stream import GenerationResponse
from service.job import Arrival, GenerationJob
from service.lifespan import Services
from service.running import deadline_passed
from service.schemas.common import SamplingFields

T = TypeVar("T", bound=SamplingFields)

MAX_REQUEST_ID = 256
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)

Prepare = Callable[[T, Services, Arrival], Awaitable[GenerationJob]]


async def generate(
    request: Request[Any, Any, Any], services: Services, type_: type[T], prepare: Prepare[T]
) -> GenerationResponse:
    """A request that is refused here is counted here, all others at their end."""
    try:
        services.quotas.take_request(request.auth)
        arrival = _arrival(request)
        check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding"))
        body = await read_body(request.receive, request.headers.get("content-length"), services.settings)
        request.scope["state"]["body_read"] = True
        decoded = await decode_body(body, type_)
        job = await _prepare_in_time(prepare, decoded, services, arrival)
    except (ApiError, EngineError) as error:
        services.metrics.refuse(error)
        raise
    return GenerationResponse(job, services)


async def _prepare_in_time(prepare: Prepare[T], decoded: T, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises 503 when the deadline passes while the request waits for its prompt to be tokenised."""
    deadline = arrival.received_at + arrival.timeout_for(decoded, services.settings)
    with anyio.move_on_after(max(0.0, deadline - time.monotonic())):
        return await prepare(decoded, services, arrival)
    raise deadline_passed()


def _arrival(request: Request[Any, Any, Any]) -> Arrival:
    return Arrival(
        caller=request.auth,
        received_at=time.monotonic(),
        request_id=_request_id(request),
        timeout=_timeout(request.headers.get("x-request-timeout")),
    )


def _request_id(request: Request[Any, Any, Any]) -> str:
    given, known = request.headers.get("x-request-id"), str(request.scope["state"]["request_id"])
    if given is not None and given != known:
        raise invalid(f"X-Request-Id must be 1 to {MAX_REQUEST_ID} printable ASCII characters.", "X-Request-Id")
    return known


def _timeout(given: str | None) -> float | None:
    if given is None:
        return None
    if not _SECONDS.fullmatch(given) or not (seconds := float(given)):
        raise invalid("X-Request-Timeout must be a number of seconds above 0.", "X-Request-Timeout")
    return seconds
