"""The ASGI app. `hypercorn service.app:app` serves it as `python -m service` does, as far as hypercorn lets it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import ScopeType
from litestar.types import Message, Scope

from engine.api import Engine
from service.backends import build_engine
from service.controllers.chat import ChatController
from service.controllers.completions import CompletionsController
from service.controllers.models import ModelsController
from service.controllers.ops import OpsController
from service.errors import EXCEPTION_HANDLERS
from service.lifespan import OnDeath, Services, engine_lifespan
from service.logs import configure_logging, log_event
from service.metrics import Metrics
from service.settings import Settings, SettingsError, read_settings, unknown_variables, write_library_variables

logger = logging.getLogger("chorus.app")

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]

LAST_WORDS_SECONDS = 1.0
"""Between the engine's death and the process's end: open streams get their error event meanwhile."""


def create_app(
    settings: Settings,
    *,
    engine: Engine | None = None,
    on_death: OnDeath | None = None,
    before: Sequence[Lifespan] = (),
) -> Litestar:
    """engine: None for the one that the settings name. on_death: see `Services`. before: entered before it runs.

    Raises SettingsError.
    """
    engine = build_engine(settings) if engine is None else engine
    services = Services(settings=settings, engine=engine, metrics=Metrics(engine), on_death=on_death)
    return Litestar(
        route_handlers=[ChatController, CompletionsController, ModelsController, OpsController],
        dependencies={"services": Provide(lambda: services, sync_to_thread=False)},
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=[*before, engine_lifespan(services)],
        before_send=[_echo_request_id],
        state=State({"services": services}),
        openapi_config=None,
        logging_config=None,
    )


async def _echo_request_id(message: Message, scope: Scope) -> None:
    """Every answer to a request with an X-Request-Id carries it, errors too."""
    if message["type"] != "http.response.start" or scope["type"] != ScopeType.HTTP:
        return
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
    if given is not None and not any(name.lower() == b"x-request-id" for name, _ in message["headers"]):
        message["headers"] = [*message["headers"], (b"x-request-id", given)]


@asynccontextmanager
async def _prepare_process(app: Litestar) -> AsyncIterator[None]:
    services: Services = app.state.services
    write_library_variables()
    configure_logging(services.settings.log_level)
    for warning in unknown_variables():
        logger.warning(warning)
    log_event(logger, "start", backend=services.engine.info.backend, **services.settings.public())
    yield


async def end_process() -> None:
    """Plain hypercorn would serve errors for ever after a death, and start a child that ends with 0 again."""
    await anyio.sleep(LAST_WORDS_SECONDS)
    logging.shutdown()
    os._exit(1)


def _app_from_environment() -> Litestar:
    try:
        return create_app(read_settings(), on_death=end_process, before=[_prepare_process])
    except SettingsError as error:
        sys.stderr.write(f"chorus: {error}\n")
        sys.exit(2)


app = _app_from_environment()
