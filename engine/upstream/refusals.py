"""What can go wrong with an upstream, as the errors that clients are told, and whether another try may help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from engine.api import ChoiceFailed, EngineError, EngineNotReady, EngineOverloaded, RequestRejected, RequestTooLarge

T = TypeVar("T")

MAX_MESSAGE = 2000
CONTEXT_LENGTH_EXCEEDED, CHOICE_FAILED = "context_length_exceeded", "choice_failed"

_BUSY = {408, 502, 503, 504, 529}
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
_STATUS_OF_CODE = {"engine_not_ready": 503, "engine_dead": 503, "deadline_exceeded": 503}


class Refusal(Exception):
    """error: for the client. is_passing: another upstream may do it, or this one later. is_fault: the upstream is
    ill; what it says of a request is no sign of that, nor is a full queue. is_unheard: the connection broke before any
    answer, as one does that was kept for later while the server had given it up.
    """

    def __init__(
        self, error: EngineError, *, is_passing: bool = False, is_fault: bool = False, is_unheard: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_passing = is_passing
        self.is_fault = is_fault
        self.is_unheard = is_unheard

    @classmethod
    def unreachable(cls, reason: str, *, is_unheard: bool) -> Refusal:
        error = EngineNotReady(f"the upstream cannot be reached: {reason}")
        return cls(error, is_passing=True, is_fault=True, is_unheard=is_unheard)

    @classmethod
    def lost(cls, reason: str) -> Refusal:
        return cls(ChoiceFailed(f"the connection to the upstream was lost: {reason}"), is_passing=True, is_fault=True)

    @classmethod
    def broken(cls, reason: str) -> Refusal:
        return cls(ChoiceFailed(f"the upstream's answer cannot be read: {reason}"), is_passing=True, is_fault=True)

    def told(self, own_names: Mapping[str, str]) -> EngineError:
        """To a client that has own names for some fields."""
        match self.error:
            case RequestRejected(param=str(param)) | RequestTooLarge(param=str(param)) as error:
                error.param = own_names.get(param.partition(".")[0].partition("[")[0], param)
        return self.error

    @classmethod
    def failed(cls, message: str) -> Refusal:
        """Of one choice, by the server's own word."""
        return cls(ChoiceFailed(message))


class _Error(Struct):
    """OpenAI's, or FastAPI's and llama.cpp's."""

    message: str | None = None
    detail: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class _Envelope(_Error):
    error: msgspec.Raw = msgspec.Raw()


def refusal_of(status: int, body: bytes, retry_after: str | None) -> Refusal:
    """Of an HTTP answer that is no 200."""
    envelope = _decoded(body, _Envelope) or _Envelope()
    told = _error(bytes(envelope.error)) if bytes(envelope.error) else envelope
    return _refusal(status, told, retry_after)


def refusal_in_stream(error: bytes) -> Refusal:
    """error: the value of an event's `error`."""
    told = _error(error)
    status = told.code if isinstance(told.code, int) else _STATUS_OF_CODE.get(told.code or "")
    return _refusal(status or _STATUS_OF_TYPE.get(told.type or "", 500), told, None)


def _error(value: bytes) -> _Error:
    """An object, or a text."""
    return _decoded(value, _Error) or _Error(message=_decoded(value, str))


def _decoded(value: bytes, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(value, type=type_)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refusal(status: int, told: _Error, retry_after: str | None) -> Refusal:
    message = (told.message or told.detail or f"the upstream has answered with status {status}")[:MAX_MESSAGE]
    if told.code == CHOICE_FAILED:
        return Refusal.failed(message)
    if status == 429:
        return Refusal(EngineOverloaded(message, _seconds(retry_after)), is_passing=True)
    if status in _BUSY:
        return Refusal(EngineNotReady(message, _seconds(retry_after)), is_passing=True, is_fault=True)
    if status in (401, 403, 404, 405):
        reason = f"the upstream refuses this server's requests with status {status}"
        return Refusal(ChoiceFailed(reason), is_passing=True, is_fault=True)
    if 400 <= status < 500:
        code = None if told.code is None or isinstance(told.code, int) else told.code
        if code == CONTEXT_LENGTH_EXCEEDED:
            return Refusal(RequestTooLarge(message, told.param or "max_tokens"))
        return Refusal(RequestRejected(message, told.param, code))
    return Refusal(ChoiceFailed(message), is_passing=True, is_fault=True)


def _seconds(retry_after: str | None) -> float:
    """Dates, which the header may have as well, count as a second."""
    try:
        seconds = float(retry_after or 1.0)
    except ValueError:
        return 1.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 1.0
