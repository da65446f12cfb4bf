"""`python -m service`: one process whose address, exit status and draining can be relied on.

Exit status: 0 after a clean stop; 1 when the engine died, the address is taken or the stop had to be forced; 2 for a
bad setting.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

import anyio
from hypercorn.config import Config
from litestar import Litestar

from service import __version__, connections
from service.lifespan import Services
from service.logs import configure_logging, log_event, wanted_format
from service.metrics import metrics_app
from service.settings import Settings, settings_table

logger = logging.getLogger("chorus.main")

GRACE_SECONDS = 5.0
"""Beyond the drain limit: for clients to read their error events; then connections are cut."""

LAST_WORDS_SECONDS = 1.0
"""The same after a second signal, and after a death."""


class Launcher:
    """Serves one app until a signal, or its death, and knows the exit status."""

    def __init__(self, app: Litestar) -> None:
        self.services: Services = app.state.services
        self.services.on_death = self._on_death
        self.status = 0
        self._app = app
        self._stopping = anyio.Event()

    async def serve(self, listeners: Sequence[int]) -> None:
        """File descriptors of listening sockets, closed at the end: the app's, then one for /metrics alone if any."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_signals)
            group.start_soon(self._bound_the_end)
            group.start_soon(self._run_hypercorn, listeners[0], group.cancel_scope)
            for listener in listeners[1:]:
                group.start_soon(self._serve_metrics, listener)

    async def _run_hypercorn(self, listener: int, scope: anyio.CancelScope) -> None:
        """A task of its own: the TaskGroup of asyncio 3.11, in hypercorn, leaves its task marked as cancelled."""
        await self._host(self._app, listener)
        scope.cancel()

    async def _serve_metrics(self, listener: int) -> None:
        await self._host(metrics_app(self.services.metrics), listener)

    async def _host(self, app: object, listener: int) -> None:
        settings = self.services.settings
        config = _hypercorn_config(settings, listener)
        await _hypercorn(settings.worker)(app, config, shutdown_trigger=self._stopping.wait)

    async def _on_death(self) -> None:
        self.status = 1
        await anyio.sleep(LAST_WORDS_SECONDS)
        self._stopping.set()

    async def _watch_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if self._stopping.is_set():
                    self.services.engine.stop()
                    await anyio.sleep(LAST_WORDS_SECONDS)
                    _end_now(1)
                log_event(logger, "stop", signal=number.name, drain_seconds=self.services.settings.drain_seconds)
                self.services.engine.drain()
                self._stopping.set()

    async def _bound_the_end(self) -> None:
        """Hypercorn waits for connections, the engine for its step; neither may hold the exit for ever."""
        settings = self.services.settings
        await self._stopping.wait()
        await anyio.sleep(settings.drain_seconds)
        self.services.engine.stop()
        await anyio.sleep(GRACE_SECONDS + settings.release_timeout + LAST_WORDS_SECONDS)
        logger.error("something did not end within its time; the stop is forced")
        _end_now(1)


def _hypercorn(worker: str) -> Callable[..., Awaitable[None]]:
    connections.install()
    if worker == "trio":
        from hypercorn.trio import serve as serve_on_trio

        return serve_on_trio
    from hypercorn.asyncio import serve

    return serve


def _hypercorn_config(settings: Settings, listener: int) -> Config:
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.backlog = settings.backlog
    config.keep_alive_timeout = settings.keep_alive_seconds
    config.graceful_timeout = settings.drain_seconds + GRACE_SECONDS
    config.include_server_header = False
    config.errorlog = logging.getLogger("chorus.hypercorn")
    config.errorlog.setLevel(logging.WARNING)  # the address is told already
    return config


def _listen(host: str, port: int, settings: Settings) -> socket.socket:
    """Listening already: who connects before hypercorn accepts only waits. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=settings.backlog)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # the kernel drops a connection whose client takes nothing: hypercorn would wait for it, at its end for ever
        milliseconds = min(max(1, int(settings.write_timeout * 1000)), 2**31 - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def _listen_to_all(settings: Settings) -> list[socket.socket]:
    """The app's address, then the metrics' own where there is one; none of them, and a line, when one is taken."""
    addresses = [(settings.host, settings.port)]
    if settings.metrics_bind is not None:
        addresses.append(settings.metrics_bind)
    listeners: list[socket.socket] = []
    for host, port in addresses:
        try:
            listeners.append(_listen(host, port, settings))
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]
            print(f"chorus: cannot listen on {host}:{port}: {reason}", file=sys.stderr)
            for listener in listeners:
                listener.close()
            return []
    return listeners


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _tell_addresses(settings: Settings, listeners: Sequence[socket.socket]) -> None:
    """To people in words, whatever the log's level; as an event where each line has to be one."""
    form = wanted_format(settings.log_format)
    if form == "json":
        configure_logging(settings.log_level, form)
    for listener, what, path in zip(listeners, ("listening", "metrics"), ("", "/metrics"), strict=False):
        if form == "json":
            log_event(logger, what, url=_url(listener) + path)
        else:
            print(f"chorus: {what} on {_url(listener)}{path}", file=sys.stderr, flush=True)


def _end_now(status: int) -> None:
    logging.shutdown()
    os._exit(status)


def run(launcher: Launcher) -> int:
    """Serve until the end; returns the exit status."""
    settings = launcher.services.settings
    listeners = _listen_to_all(settings)
    if not listeners:
        return 1
    _tell_addresses(settings, listeners)
    anyio.run(
        launcher.serve,
        [listener.detach() for listener in listeners],
        backend="trio" if settings.worker == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if settings.worker == "uvloop" else {},
    )
    if launcher.services.tokenizer is None:
        _end_now(launcher.status)  # the engine's thread may still be loading, and nothing can interrupt it
    return launcher.status


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="Serve a model over the OpenAI API. Settings are environment variables:",
        epilog=settings_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"chorus {__version__}")
    parser.parse_args()

    from service.app import app  # reads the settings

    return run(Launcher(app))


if __name__ == "__main__":
    sys.exit(main())
