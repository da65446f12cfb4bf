"""The ASGI app. `hypercorn service.app:app` serves it as `python -m service` does, as far as hypercorn lets it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
from litestar import Controller, Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import ScopeType
from litestar.middleware import AbstractMiddleware
from litestar.types import Message, Scope

from engine.api import Engine
from service.auth import KeyFile, KeysError
from service.backends import build_engine
from service.controllers.chat import ChatController
from service.controllers.completions import CompletionsController
from service.controllers.embeddings import EmbeddingsController
from service.controllers.models import ModelsController
from service.controllers.ops import OpsController
from service.controllers.playground import PlaygroundController
from service.controllers.requests import RequestsController
from service.controllers.responses import ResponsesController
from service.controllers.tokenize import TokenizeController
from service.errors import EXCEPTION_HANDLERS
from service.finished import Recorder
from service.gate import Gate
from service.lifespan import OnDeath, Services, engine_lifespan
from service.logs import configure_logging, log_event, wanted_format
from service.metrics import Metrics
from service.refusal import turn_away_stranger
from service.response_store import ResponseStore
from service.settings import Settings, SettingsError, read_settings, unknown_variables, write_library_variables
from service.template_workers import TemplateWorkers

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
    services = Services(
        settings=settings,
        engine=engine,
        metrics=Metrics(engine, settings.metrics_compat),
        templates=TemplateWorkers(settings.template_timeout),
        responses=_response_store(settings),
        tracing=_tracing(settings),
        on_death=on_death,
    )
    keys = _read_keys(settings)
    app = Litestar(
        route_handlers=_controllers(settings),
        dependencies={"services": Provide(lambda: services, sync_to_thread=False)},
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=[*before, engine_lifespan(services)],
        before_send=[_add_request_id, _announce_end],
        state=State({"services": services}),
        cors_config=_cors(settings),
        openapi_config=None,
        logging_config=None,
    )
    refused = partial(turn_away_stranger, services.metrics)
    outer = app.asgi_handler
    if isinstance(outer, AbstractMiddleware):  # CORS, which answers preflights: browsers send those without a key
        outer.app = Gate(outer.app, keys, refused)
    else:
        app.asgi_handler = Gate(outer, keys, refused)
    return app


def _controllers(settings: Settings) -> list[type[Controller]]:
    api = [
        ChatController,
        CompletionsController,
        ResponsesController,
        EmbeddingsController,
        TokenizeController,
        ModelsController,
        RequestsController,
        OpsController,
    ]
    return [*api, PlaygroundController] if settings.playground else [*api]


def _response_store(settings: Settings) -> ResponseStore | None:
    if settings.responses_store is None:
        return None
    return ResponseStore(
        settings.responses_store, max_bytes=settings.responses_max_bytes, max_age=settings.responses_max_age
    )


def _read_keys(settings: Settings) -> KeyFile | None:
    if settings.api_keys_file is None:
        return None
    try:
        return KeyFile(settings.api_keys_file)
    except KeysError as error:
        raise SettingsError(f"CHORUS_API_KEYS_FILE: {error}") from None


def _tracing(settings: Settings) -> Recorder | None:
    if settings.otlp_endpoint is None:
        if settings.trace_content:
            raise SettingsError("CHORUS_TRACE_CONTENT needs CHORUS_OTLP_ENDPOINT: without it there are no traces")
        return None
    try:
        from service.tracing import tracing_to  # OpenTelemetry is an extra
    except ImportError:
        raise SettingsError(
            "CHORUS_OTLP_ENDPOINT needs OpenTelemetry, the extra `tracing`; deploy/serve installs it"
        ) from None
    return tracing_to(settings.otlp_endpoint)


def _cors(settings: Settings) -> CORSConfig | None:
    if not settings.cors_origins:
        return None
    return CORSConfig(
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Chorus-Response-Id", "X-Request-Id", "Retry-After"],
    )


async def _add_request_id(message: Message, scope: Scope) -> None:
    """Every answer carries the request's id, errors too."""
    if message["type"] != "http.response.start" or scope["type"] != ScopeType.HTTP:
        return
    request_id = scope["state"].get("request_id")
    if request_id is not None and not any(name.lower() == b"x-request-id" for name, _ in message["headers"]):
        message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]


async def _announce_end(message: Message, scope: Scope) -> None:
    """An answer that does not wait for the request's body ends the connection (HTTP/1.1), and must say so."""
    if message["type"] != "http.response.start" or scope["type"] != ScopeType.HTTP or scope["state"].get("body_read"):
        return
    request = dict(scope["headers"])
    has_body = request.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in request
    is_http_1 = scope["http_version"].startswith("1")  # later versions have no such header
    if has_body and is_http_1 and not any(name.lower() == b"connection" for name, _ in message["headers"]):
        message["headers"] = [*message["headers"], (b"connection", b"close")]


@asynccontextmanager
async def _prepare_process(app: Litestar) -> AsyncIterator[None]:
    services: Services = app.state.services
    write_library_variables()
    configure_logging(services.settings.log_level, wanted_format(services.settings.log_format))
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
