from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency

from service.chat_request import prepare_chat
from service.controllers.generate import generate
from service.controllers.receive import answer
from service.event_stream import GenerationResponse
from service.lifespan import Services
from service.schemas.chat import ChatCompletionRequest
from service.tokenizing import rendered_chat


class ChatController(Controller):
    path = "/v1/chat/completions"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> GenerationResponse:
        return await generate(request, services, ChatCompletionRequest, prepare_chat)

    @post("/render", status_code=200)
    async def render(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> Response[bytes]:
        return await answer(request, services, ChatCompletionRequest, rendered_chat)
