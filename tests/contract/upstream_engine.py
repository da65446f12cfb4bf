"""UpstreamEngine in front of Chorus itself: the fake engine behind a real socket, in the test's own event loop."""

from __future__ import annotations

import logging
import socket
import weakref
from dataclasses import replace

import anyio
import sniffio
from anyio.abc import TaskStatus
from hypercorn.config import Config

from engine.config import EngineConfig, UpstreamConfig
from engine.fake import FakeEngine
from engine.upstream.engine import UpstreamEngine
from service.app import create_app
from service.settings import Settings
from tests.contract.faults import failing_rule

STEP_SECONDS = 0.001
ROOM = 1000
"""More places than the tests ask for: a server takes a moment to notice what has been given up."""


class UpstreamOverChorus(UpstreamEngine):
    """Hosts its upstream as long as it runs itself."""

    def __init__(self, config: EngineConfig) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        served = replace(config, served_model_name="m", max_queued_seqs=ROOM)
        engine = FakeEngine(served, step_seconds=STEP_SECONDS, rule=failing_rule)
        settings = Settings(engine="fake", served_model_name="m", max_queued_seqs=ROOM, ping_seconds=0.05)
        self._app = create_app(settings, engine=engine)
        upstream = UpstreamConfig((f"http://127.0.0.1:{port}",), poll_seconds=0.02)
        super().__init__(replace(config, served_model_name=""), upstream)
        weakref.finalize(self, self._listener.close)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        stop = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve, stop)
            try:
                await super().run(task_status=task_status)
            finally:
                stop.set()

    async def _serve(self, stop: anyio.Event) -> None:
        config = Config()
        config.bind = [f"fd://{self._listener.detach()}"]
        config.errorlog = logging.getLogger("tests.hypercorn")
        config.graceful_timeout = 0.1
        with anyio.CancelScope(shield=True):  # hypercorn ends by its trigger, and cancelled it makes a mess
            await _serve(self._app, config, stop)


async def _serve(app: object, config: Config, stop: anyio.Event) -> None:
    if sniffio.current_async_library() == "trio":
        from hypercorn.trio import serve as serve_on_trio

        await serve_on_trio(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]
    else:
        from hypercorn.asyncio import serve

        await serve(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]
