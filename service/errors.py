"""Every error, whoever raised it, as OpenAI's envelope. The only place that maps an exception to a status."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import ExceptionHandlersMap

from engine.api import (
    ChoiceFailed,
    EngineDead,
    EngineError,
    EngineNotReady,
    EngineOverloaded,
    InvalidConstraint,
    RequestRejected,
    RequestTooLarge,
    UnsupportedByEngine,
)
from service.logs import log_unexpected
from service.schemas.common import ErrorDetail, ErrorEnvelope

logger = logging.getLogger("chorus.errors")

INVALID = "invalid_request_error"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
DEADLINE_EXCEEDED = "deadline_exceeded"
JSON_CONTENT_TYPE = "application/json"
MAX_RETRY_SECONDS = 120.0
NO_RETRY = {"x-should-retry": "false"}
"""For errors that the SDK takes for passing ones although the same request would fail again."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """status: HTTP's. unexpected: nobody raised this on purpose, so it belongs in the log with its traceback."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    unexpected: bool = False

    def encode(self) -> bytes:
        """{"error": {"message", "type", "param", "code"}} as JSON."""
        return msgspec.json.encode(ErrorEnvelope(error=self.detail()))

    def identified(self, request_id: str | None) -> ErrorInfo:
        """With the id by which an unexpected error is found in the log; others explain themselves."""
        if not self.unexpected or request_id is None:
            return self
        return replace(self, message=f"{self.message} Its id is {request_id}.")

    def detail(self) -> ErrorDetail:
        return ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)


class ApiError(Exception):
    """An error that the service answers with on purpose."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(ErrorInfo(400, message, INVALID, param, code))


def model_not_found(model: str) -> ApiError:
    return ApiError(ErrorInfo(404, f"The model `{model}` does not exist.", INVALID, "model", "model_not_found"))


def not_found(message: str) -> ApiError:
    return ApiError(ErrorInfo(404, message, INVALID, code="not_found"))


def body_too_large(limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    headers = {"Connection": "close"}
    return ApiError(ErrorInfo(413, f"The request body is larger than {limit} bytes.", INVALID, headers=headers))


def body_too_slow(seconds: float) -> ApiError:
    headers = {"Connection": "close"}
    return ApiError(ErrorInfo(400, f"The request body did not arrive within {seconds:g} s.", INVALID, headers=headers))


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(ErrorInfo(415, message, INVALID, code="unsupported_media_type"))


def error_body(exc: BaseException) -> ErrorInfo:
    """What the client is told. Of a group, the first error that was raised on purpose counts."""
    known = next((info for leaf in _leaves(exc) if (info := _known(leaf)) is not None), None)
    if known is not None:
        return known
    return ErrorInfo(500, "The server had an error while processing your request.", "server_error", unexpected=True)


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


def _known(exc: BaseException) -> ErrorInfo | None:
    match exc:
        case ApiError():
            return exc.info
        case EngineError():
            return _engine_error(exc)
        case HTTPException():
            return _http_error(exc)
    return None


def _engine_error(exc: EngineError) -> ErrorInfo:
    message = str(exc)
    match exc:
        case EngineOverloaded():
            headers = retry_after(exc.retry_after)
            return ErrorInfo(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=headers)
        case EngineNotReady():
            headers = retry_after(exc.retry_after)
            return ErrorInfo(503, message, "server_error", code="engine_not_ready", headers=headers)
        case RequestTooLarge():
            code = None if exc.param == "n" else CONTEXT_LENGTH_EXCEEDED
            return ErrorInfo(400, message, INVALID, exc.param, code)
        case InvalidConstraint():
            return ErrorInfo(400, message, INVALID, exc.param)
        case RequestRejected():
            return ErrorInfo(400, message, INVALID, exc.param, exc.code)
        case UnsupportedByEngine():
            return ErrorInfo(400, message, INVALID, code="unsupported")
        case EngineDead():
            return ErrorInfo(503, message, "server_error", code="engine_dead", headers=NO_RETRY)
        case ChoiceFailed():
            return ErrorInfo(500, message, "server_error", code="choice_failed", headers=NO_RETRY)
    return ErrorInfo(500, message, "server_error")


def retry_after(seconds: float) -> dict[str, str]:
    """Headers. At least a second, and no more than the two minutes beyond which the SDK gives up."""
    seconds = min(max(seconds, 1.0), MAX_RETRY_SECONDS)
    return {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def _http_error(exc: HTTPException) -> ErrorInfo | None:
    """Litestar's own errors; its 500s are unexpected ones."""
    if exc.status_code >= 500:
        return None
    return ErrorInfo(exc.status_code, exc.detail, INVALID, headers=exc.headers or {})


def _answer(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    info = error_body(exc)
    if isinstance(exc, NotFoundException):
        info = replace(info, message=f"Unknown URL: {request.method} {request.url.path}", code="unknown_url")
    elif isinstance(exc, MethodNotAllowedException):
        message = f"{request.method} is not allowed on {request.url.path}"
        info = replace(info, message=message, code="method_not_allowed")
    if info.unexpected:
        request_id = request.scope["state"].get("request_id")
        info = info.identified(request_id)
        log_unexpected(logger, f"unexpected error in {request.method} {request.url.path}", exc, request_id=request_id)
    return Response(info.encode(), status_code=info.status, headers=dict(info.headers), media_type=JSON_CONTENT_TYPE)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {Exception: _answer, HTTPException: _answer}
