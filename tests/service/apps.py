"""What tests of the app share: a client over the fake engine, and the check that every error has the envelope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import anyio.lowlevel
import httpx
from litestar import Litestar
from litestar.testing import TestClient

from engine.fake import FakeEngine
from service.app import create_app
from service.lifespan import Services
from service.settings import Settings

MAX_MODEL_LEN = 256
SETTINGS = Settings(engine="fake", served_model_name="org/m", max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
EMBEDDING = replace(SETTINGS, embedding_model="any", served_embedding_model_name="org/e")
"""With an embedding model beside."""

Client = TestClient[Litestar]


@contextmanager
def serving(
    settings: Settings = SETTINGS,
    *,
    engine: FakeEngine | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
    wait: bool = True,
) -> Iterator[Client]:
    """wait: until the engine is ready."""
    app = create_app(settings, engine=engine or FakeEngine(settings.engine_config()))
    with TestClient(app, backend=backend, raise_server_exceptions=False) as client:
        if wait:
            client.blocking_portal.call(_until_ready, app.state.services)
        yield client


async def _until_ready(services: Services) -> None:
    await services.engine.wait_ready()
    while services.tokenizer is None:
        await anyio.lowlevel.checkpoint()


def check_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Asserts status and envelope; param and code when given. Returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert not any(leak in error["message"] for leak in ("Traceback", "object at 0x", "<class", "service."))
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error
