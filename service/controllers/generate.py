"""What the generation endpoints share: body, job, answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request

from engine.api import EngineError
from service.decoding import check_media_type, decode_body, read_body
from service.errors import ApiError, invalid
from service.event_stream import GenerationResponse
from service.lifespan import Services
from service.requests import GenerationJob

T = TypeVar("T", bound=msgspec.Struct)

MAX_REQUEST_ID = 256
_REQUEST_ID = re.compile(f"[ -~]{{1,{MAX_REQUEST_ID}}}")

Prepare = Callable[[T, Services, str | None], Awaitable[GenerationJob]]


async def generate(
    request: Request[Any, Any, Any], services: Services, type_: type[T], prepare: Prepare[T]
) -> GenerationResponse:
    """A request that is refused here is counted here, all others at their end."""
    try:
        request_id = _request_id(request)
        check_media_type(request.headers.get("content-type"), request.headers.get("content-encoding"))
        body = await read_body(request.receive, request.headers.get("content-length"), services.settings)
        job = await prepare(await decode_body(body, type_), services, request_id)
    except (ApiError, EngineError):
        services.metrics.record("refused", 0, None)
        raise
    return GenerationResponse(job, services)


def _request_id(request: Request[Any, Any, Any]) -> str | None:
    request_id = request.headers.get("x-request-id")
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise invalid(f"X-Request-Id must be 1 to {MAX_REQUEST_ID} printable ASCII characters.")
    return request_id
