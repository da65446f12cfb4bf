from __future__ import annotations

from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency

from service.chat_request import prepare_chat
from service.controllers.generate import generate
from service.event_stream import GenerationResponse
from service.lifespan import Services
from service.schemas.chat import ChatCompletionRequest


class ChatController(Controller):
    path = "/v1/chat/completions"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> GenerationResponse:
        return await generate(request, services, ChatCompletionRequest, prepare_chat)
