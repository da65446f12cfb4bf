from __future__ import annotations

from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency

from service.controllers.generate import generate
from service.event_stream import GenerationResponse
from service.lifespan import Services
from service.response_request import prepare_response
from service.schemas.responses import ResponseRequest


class ResponsesController(Controller):
    path = "/v1/responses"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> GenerationResponse:
        return await generate(request, services, ResponseRequest, prepare_response)
