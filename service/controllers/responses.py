"""Responses: made; where they are kept looked at and deleted; a running one can be cancelled."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.controllers.generate import generate
from service.errors import JSON_CONTENT_TYPE, invalid
from service.event_stream import GenerationResponse
from service.kept_responses import input_of, item_list, response_not_found
from service.lifespan import Services
from service.response_presenter import begun
from service.response_request import prepare_response
from service.response_store import StoredResponse
from service.schemas.kept_responses import DeletedResponse, ItemList
from service.schemas.responses import ResponseRequest
from service.writers import encoder

_INCLUDE = frozenset({"include", "include[]", "include_obfuscation"})
"""What is kept has all that was asked for when it was made."""


class ResponsesController(Controller):
    path = "/v1/responses"

    @post(status_code=200)
    async def create(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> GenerationResponse:
        return await generate(request, services, ResponseRequest, prepare_response)

    @get("/{response_id:str}")
    async def retrieve(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], response_id: FromPath[str]
    ) -> Response[bytes]:
        query = _query(request, {*_INCLUDE, "stream"})
        if query.get("stream", "false").lower() not in ("false", "0"):
            raise invalid("Unsupported parameter: `stream`: a response is streamed once.", "stream")
        running = services.running.find(response_id, request.auth.owner)
        found = await _find(request, services, response_id)  # what is kept counts, though it may still be running out
        if found is not None:
            body = found.body
        elif running is not None and running.job.kept_input is not None:
            body = encoder.encode(begun(running.job))
        else:
            raise response_not_found(response_id)
        return Response(body, media_type=JSON_CONTENT_TYPE)

    @delete("/{response_id:str}", status_code=200)
    async def delete(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], response_id: FromPath[str]
    ) -> DeletedResponse:
        """Its text is gone at once; a conversation that went on from it cannot go on any more."""
        store = services.responses
        if store is None or not await store.delete(response_id, request.auth.owner):
            raise response_not_found(response_id)
        return DeletedResponse(id=response_id)

    @get("/{response_id:str}/input_items")
    async def input_items(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], response_id: FromPath[str]
    ) -> ItemList:
        query = _query(request, {*_INCLUDE, "limit", "order", "after"})
        found = await _find(request, services, response_id)
        if found is None:
            raise response_not_found(response_id)
        return item_list(input_of(found), query)

    @post("/{response_id:str}/cancel", status_code=200)
    async def cancel(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], response_id: FromPath[str]
    ) -> Response[bytes]:
        """Its client gets what was made; what is kept is that."""
        running = services.running.find(response_id, request.auth.owner)
        if running is None or running.job.response is None or not running.cancel():
            if await _find(request, services, response_id) is None:
                raise response_not_found(response_id)
            raise invalid("Only a response that runs can be cancelled.", "response_id")
        return Response(encoder.encode(begun(running.job)), media_type=JSON_CONTENT_TYPE)


async def _find(request: Request[Any, Any, Any], services: Services, response_id: str) -> StoredResponse | None:
    """Raises ApiError (503)."""
    store = services.responses
    return None if store is None else await store.get(response_id, request.auth.owner)


def _query(request: Request[Any, Any, Any], known: Collection[str]) -> dict[str, str]:
    """Raises ApiError (400) for what is not known."""
    given = {name: str(value) for name, value in request.query_params.items()}
    for name in given:
        if name not in known:
            raise invalid(f"Unknown parameter: `{name}`.", name, "unknown_parameter")
    return given
