"""A request that ends before there is a job: it is counted, traced and logged as all others are, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from service.errors import ApiError, ErrorInfo, error_body
from service.finished import Outcome, TurnedAway
from service.logs import log_event

if TYPE_CHECKING:
    from litestar import Request

    from service.lifespan import Services
    from service.metrics import Metrics

logger = logging.getLogger("chorus.request")


def turn_away(
    request: Request[Any, Any, Any],
    services: Services,
    received_at: float,
    error: Exception,
    count: Callable[[Exception], None],
) -> None:
    """received_at: time.monotonic(). error: raised on purpose for the client, or an unexpected one. count: of such."""
    count(error)
    info, now = error_body(error), time.monotonic()
    route = str(request.scope["path_template"])
    if services.tracing is not None:
        turned = TurnedAway(route, _outcome(info), info.status, _name(error), received_at, now)
        services.tracing.refuse(turned, request.scope["headers"])
    _log(
        request.scope["state"],
        info,
        error,
        key=request.auth.name,
        route=route,
        total_ms=round(1000 * (now - received_at)),
    )


def turn_away_stranger(metrics: Metrics, state: dict[str, Any], error: ApiError) -> None:
    """Who has no key leaves no span: whoever reaches the port could fill a collector."""
    metrics.refuse(error)
    _log(state, error.info, error)


def _log(state: dict[str, Any], info: ErrorInfo, error: Exception, **more: object) -> None:
    log_event(
        logger,
        "request",
        request_id=state["request_id"],
        outcome=_outcome(info),
        status=info.status,
        error=_name(error),
        **more,
    )


def _outcome(info: ErrorInfo) -> Outcome:
    return "error" if info.unexpected else "refused"


def _name(error: Exception) -> str:
    """One of a few words, and nothing that a client has written."""
    return error.info.code or error.info.type if isinstance(error, ApiError) else type(error).__name__
