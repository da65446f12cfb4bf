"""The HTTP client below all calls, and how it is left without a trace."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import anyio
import httpx

from engine.config import UpstreamConfig


def new_client(config: UpstreamConfig, num_kept: int) -> httpx.AsyncClient:
    """num_kept: connections that are kept for later. The environment is not looked at: a proxy for the world outside is
    none for a server next door.
    """
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    is_secure = any(url.startswith("https:") for url in config.urls)
    return httpx.AsyncClient(
        headers={"User-Agent": "chorus", "Content-Type": "application/json", **headers},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=num_kept),
        timeout=httpx.Timeout(None, connect=config.connect_timeout),
        trust_env=False,
        verify=ssl.create_default_context() if is_secure else False,
    )


class _Body(httpx.AsyncByteStream):
    """Of a request. No generator, which a cancelled send would leave suspended (see `unwind`)."""

    def __init__(self, body: bytes) -> None:
        self._rest: list[bytes] = [body]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._rest:
            raise StopAsyncIteration
        return self._rest.pop()


async def post(http: httpx.AsyncClient, url: str, body: bytes) -> httpx.Response:
    """The answer's beginning, to be closed."""
    request = http.build_request("POST", url, headers={"content-length": str(len(body))})
    request.stream = _Body(body)
    return await http.send(request, stream=True)


async def unwind(events: AsyncIterator[object]) -> None:
    """End every generator that the HTTP client has stacked up below this one: closing it would leave them suspended,
    for the garbage collector to find. A read that is cancelled in the lowest of them ends them all, and the connection.
    """
    with anyio.CancelScope() as scope:
        scope.cancel()
        async for _ in events:
            pass
