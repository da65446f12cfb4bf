from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, post
from litestar.di import NamedDependency

from service.controllers.receive import answer
from service.lifespan import Services
from service.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from service.tokenizing import detokenized, tokenized


class TokenizeController(Controller):
    path = "/"

    @post("/tokenize", status_code=200)
    async def tokenize(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> Response[bytes]:
        return await answer(request, services, TokenizeRequest, tokenized)

    @post("/detokenize", status_code=200)
    async def detokenize(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> Response[bytes]:
        return await answer(request, services, DetokenizeRequest, detokenized)
