"""Hypercorn's connections, with one fault mended: one that its client has closed is not kept until keep-alive runs out.

As released (0.18), a connection's task waits for its idle timer after the client's FIN (asyncio) or RST (both workers).
With a keep-alive of 75 s, which proxies need, some fourteen short-lived connections a second would use up 1,024 file
descriptors.
"""

from __future__ import annotations

from hypercorn.asyncio import run as asyncio_run
from hypercorn.asyncio.tcp_server import TCPServer as AsyncioTCPServer
from hypercorn.events import Event
from hypercorn.trio import run as trio_run
from hypercorn.trio.tcp_server import TCPServer as TrioTCPServer


class _ClosingAsyncioServer(AsyncioTCPServer):
    _client_has_closed = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._client_has_closed = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        await super().protocol_send(event)
        if self._client_has_closed:  # a request that ends now would start the timer again
            await self.idle_task.stop()


class _ClosingTrioServer(TrioTCPServer):
    _client_has_closed = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._client_has_closed = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        await super().protocol_send(event)
        if self._client_has_closed:
            await self.idle_task.stop()


def install() -> None:
    """Make hypercorn's `serve` use them; there is no setting for the class."""
    asyncio_run.TCPServer = _ClosingAsyncioServer  # type: ignore[attr-defined]
    trio_run.TCPServer = _ClosingTrioServer  # type: ignore[attr-defined]
