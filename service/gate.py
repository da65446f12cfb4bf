"""What every HTTP request passes first: it gets its id, and without a key it goes no further than the open paths."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from service.auth import ANYONE, Caller, KeyFile
from service.errors import JSON_CONTENT_TYPE, ApiError, ErrorInfo
from service.playground import FILES

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", *FILES})
"""Exactly these, as the server sees them. All else is denied by default, whatever routes there are or will be."""

_REQUEST_ID = re.compile(rb"[ -~]{1,256}")
UNAUTHORIZED = ErrorInfo(
    401,
    "A known API key is needed, as `Authorization: Bearer KEY`.",
    code="invalid_api_key",
    headers={"WWW-Authenticate": 'Bearer realm="chorus"'},
)


class Gate:
    """Around the whole app, unknown URLs included. Leaves the caller in scope["auth"], the id in the scope's state."""

    def __init__(self, app: ASGIApp, keys: KeyFile | None, refused: Callable[[dict[str, Any], ApiError], None]) -> None:
        """refused: told of each request for an answer that ends here, with the scope's state."""
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            # there are no websockets here, and none may come to be open by accident
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        scope["state"] = {**scope["state"], "request_id": _request_id(scope)}  # hypercorn's is the connection's
        caller = self._caller(scope)
        if caller is None:
            if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                self._refused(scope["state"], ApiError(UNAUTHORIZED))
            await _refuse(send)
            return
        scope["auth"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if self._keys is None or not OPEN_PATHS.isdisjoint(_paths(scope)):
            return ANYONE
        return self._keys.caller(scope["headers"])


def _paths(scope: Scope) -> tuple[str, str]:
    """The path, and that behind the root path where one is set: routes are found with it or without it."""
    path = scope["path"]
    return path, path.removeprefix(scope.get("root_path", "")) or "/"


def _request_id(scope: Scope) -> str:
    """The client's own where it is fit for a header and a log line, else a fresh one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(16)}"


async def _refuse(send: Send) -> None:
    body = UNAUTHORIZED.encode()
    headers = {"Content-Type": JSON_CONTENT_TYPE, "Content-Length": str(len(body)), **UNAUTHORIZED.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": UNAUTHORIZED.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
