"""What every endpoint with a body begins with: limits of the key, the body, its deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from litestar import Request, Response

from service.decoding import check_media_type, decode_body, read_body
from service.errors import JSON_CONTENT_TYPE, invalid
from service.job import Arrival
from service.lifespan import Services
from service.running import deadline_passed

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")

MAX_REQUEST_ID = 256
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


async def receive(request: Request[Any, Any, Any], services: Services, type_: type[T]) -> tuple[T, Arrival]:
    """Raises ApiError (4xx)."""
    services.quotas.take_request(request.auth)
    arrival = _arrival(request)
    check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding"))
    body = await read_body(request.receive, request.headers.get("content-length"), services.settings)
    request.scope["state"]["body_read"] = True
    return await decode_body(body, type_), arrival


async def in_time(work: Awaitable[R], arrival: Arrival, seconds: float) -> R:
    """Raises 503 when so many seconds from the arrival are over first."""
    with anyio.move_on_after(max(0.0, arrival.received_at + seconds - time.monotonic())):
        return await work
    raise deadline_passed()


async def answer(
    request: Request[Any, Any, Any],
    services: Services,
    type_: type[T],
    work: Callable[[T, Services, Arrival], Awaitable[bytes]],
) -> Response[bytes]:
    """For what runs no model: `work` makes the JSON body."""
    decoded, arrival = await receive(request, services, type_)
    with services.quotas.running(arrival.caller, 0):
        body = await in_time(work(decoded, services, arrival), arrival, arrival.seconds(None, services.settings))
    return Response(body, media_type=JSON_CONTENT_TYPE)


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
