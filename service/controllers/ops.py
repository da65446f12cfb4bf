"""Health, version, metrics and docs. Nothing here waits for the engine."""

from __future__ import annotations

from litestar import Controller, MediaType, Response, get
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException

from service import __version__
from service.lifespan import Services
from service.openapi import docs_page, openapi_document


class OpsController(Controller):
    path = "/"

    @get("/health/live", sync_to_thread=False)
    def live(self, services: NamedDependency[Services]) -> dict[str, str]:
        services.check_live()
        return {"status": "live"}

    @get(["/health", "/health/ready"], sync_to_thread=False)
    def ready(self, services: NamedDependency[Services]) -> dict[str, str]:
        services.check_ready()
        return {"status": "ready"}

    @get("/version", sync_to_thread=False)
    def version(self, services: NamedDependency[Services]) -> dict[str, str]:
        info = services.engine.info
        return {"version": __version__, "model": info.model, "backend": info.backend}

    @get("/metrics", sync_to_thread=False)
    def metrics(self, services: NamedDependency[Services]) -> Response[bytes]:
        if services.settings.metrics_bind is not None:
            raise NotFoundException
        return Response(services.metrics.render(), media_type=services.metrics.media_type)

    @get("/debug/steps", sync_to_thread=False)
    def debug_steps(self, services: NamedDependency[Services]) -> dict[str, object]:
        if not services.settings.debug:
            raise NotFoundException
        return {"object": "list", "data": list(services.engine.last_steps())}

    @get("/openapi.json", sync_to_thread=False)
    def openapi(self) -> dict[str, object]:
        return openapi_document()

    @get("/docs", media_type=MediaType.HTML, sync_to_thread=False)
    def docs(self) -> str:
        return docs_page()
