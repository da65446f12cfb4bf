"""The app and its clients in the test's own event loop: what runs at the same time is the test's to say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
from litestar import Litestar

from engine.fake import FakeEngine
from service.app import create_app
from service.lifespan import Services
from service.settings import Settings

from .asgi import until


@asynccontextmanager
async def app_and_client(
    settings: Settings, engine: FakeEngine | None = None, *, wait: bool = True
) -> AsyncIterator[tuple[Litestar, httpx.AsyncClient]]:
    """wait: until the engine is ready. Answers are whole ones: a stream is there when it has ended."""
    app = create_app(settings, engine=engine or FakeEngine(settings.engine_config()))
    services: Services = app.state.services
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
    async with app.lifespan(), httpx.AsyncClient(transport=transport, base_url="http://chorus") as client:
        with anyio.fail_after(60):
            if wait:
                await until(lambda: services.tokenizer is not None)
            yield app, client


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}
