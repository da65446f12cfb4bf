from __future__ import annotations

import json

import pytest

from engine.api import (
    Capability,
    ChoiceFailed,
    EngineDead,
    EngineError,
    EngineNotReady,
    EngineOverloaded,
    InvalidConstraint,
    RequestTooLarge,
    UnsupportedByEngine,
)
from service.errors import error_body, invalid, model_not_found


@pytest.mark.parametrize(
    ("error", "status", "type_", "param", "code"),
    [
        (invalid("m", "p", "c"), 400, "invalid_request_error", "p", "c"),
        (model_not_found("x"), 404, "invalid_request_error", "model", "model_not_found"),
        (EngineOverloaded("m"), 429, "rate_limit_error", None, "rate_limit_exceeded"),
        (EngineNotReady("m"), 503, "server_error", None, "engine_not_ready"),
        (EngineDead("m"), 503, "server_error", None, "engine_dead"),
        (ChoiceFailed("m"), 500, "server_error", None, "choice_failed"),
        (RequestTooLarge("m", "messages"), 400, "invalid_request_error", "messages", "context_length_exceeded"),
        (RequestTooLarge("m", "n"), 400, "invalid_request_error", "n", None),
        (InvalidConstraint("m", "response_format"), 400, "invalid_request_error", "response_format", None),
        (UnsupportedByEngine(Capability.CONSTRAINTS), 400, "invalid_request_error", None, "unsupported"),
        (EngineError("m"), 500, "server_error", None, None),
    ],
)
def test_each_error_has_its_status(
    error: Exception, status: int, type_: str, param: str | None, code: str | None
) -> None:
    info = error_body(error)
    assert (info.status, info.type, info.param, info.code) == (status, type_, param, code)
    assert not info.unexpected
    assert json.loads(info.encode()) == {"error": {"message": str(error), "type": type_, "param": param, "code": code}}


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (1.0, "1"), (1.2, "2"), (30.0, "30")])
def test_retry_after_is_whole_seconds_and_never_0(seconds: float, header: str) -> None:
    """A client told to wait 0 s hammers a full queue."""
    for error in (EngineOverloaded("m", seconds), EngineNotReady("m", seconds)):
        assert error_body(error).headers["Retry-After"] == header


def test_a_group_is_unwrapped_to_the_error_that_was_meant_for_the_client() -> None:
    """anyio's task groups wrap what their tasks raise; unmapped it would be a 500."""
    group = BaseExceptionGroup("a", [KeyError("x"), ExceptionGroup("b", [EngineOverloaded("full")])])
    assert error_body(group).status == 429


def test_an_unknown_error_tells_nothing_of_itself() -> None:
    info = error_body(ExceptionGroup("g", [RuntimeError("/etc/secret")]))
    assert info.status == 500 and info.unexpected
    assert b"secret" not in info.encode()
