from __future__ import annotations

from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency

from service.completion_request import prepare_completion
from service.controllers.generate import generate
from service.event_stream import GenerationResponse
from service.lifespan import Services
from service.schemas.completions import CompletionRequest


class CompletionsController(Controller):
    path = "/v1/completions"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> GenerationResponse:
        return await generate(request, services, CompletionRequest, prepare_completion)
