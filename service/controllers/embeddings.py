from __future__ import annotations

import time
from typing import Any

from litestar import Controller, Request, post
from litestar.di import NamedDependency

from service.controllers.receive import in_time, receive
from service.embedding_request import prepare_embedding
from service.embedding_response import EmbeddingResponse
from service.lifespan import Services
from service.refusal import turn_away
from service.schemas.embeddings import EmbeddingCreateRequest


class EmbeddingsController(Controller):
    path = "/v1/embeddings"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> EmbeddingResponse:
        received_at = time.monotonic()
        try:
            decoded, arrival = await receive(request, services, EmbeddingCreateRequest)
            seconds = arrival.seconds(None, services.settings)
            job = await in_time(prepare_embedding(decoded, services, arrival), arrival, seconds)
        except Exception as error:
            turn_away(request, services, received_at, error, services.metrics.embeddings.refuse)
            raise
        return EmbeddingResponse(job, services)
