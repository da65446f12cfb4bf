"""The requests of one key that run now, and how to stop them or one of their choices."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.errors import not_found
from service.lifespan import Services
from service.running import RunningRequest
from service.schemas.requests import Cancelled, RunningChoice, RunningRequestCard, RunningRequestList


class RequestsController(Controller):
    path = "/v1/requests"

    @get(sync_to_thread=False)
    def list_requests(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> RunningRequestList:
        return RunningRequestList(data=[_card(running) for running in services.running.of(request.auth.owner)])

    @delete("/{response_id:str}", status_code=200, sync_to_thread=False)
    def cancel(
        self, request: Request[Any, Any, Any], services: NamedDependency[Services], response_id: FromPath[str]
    ) -> Cancelled:
        running = services.running.find(response_id, request.auth.owner)
        if running is None or not running.cancel():
            raise not_found(f"No request `{response_id}` runs.")
        return Cancelled(id=response_id)

    @delete("/{response_id:str}/choices/{index:int}", status_code=200, sync_to_thread=False)
    def cancel_choice(
        self,
        request: Request[Any, Any, Any],
        services: NamedDependency[Services],
        response_id: FromPath[str],
        index: FromPath[int],
    ) -> Cancelled:
        running = services.running.find(response_id, request.auth.owner)
        if running is None or not 0 <= index < running.job.num_choices or not running.cancel(index):
            raise not_found(f"No choice {index} of a request `{response_id}` runs.")
        return Cancelled(id=response_id)


def _card(running: RunningRequest) -> RunningRequestCard:
    job, fan_out = running.job, running.fan_out
    choices = []
    if fan_out is not None:
        for index in range(job.num_choices):
            reason = fan_out.end_reason(index)
            choices.append(
                RunningChoice(
                    index=index,
                    completion_tokens=fan_out.num_tokens(index),
                    end_reason=None if reason is None else reason.value,
                )
            )
    return RunningRequestCard(
        id=job.response_id,
        created=job.created,
        model=job.model,
        kind=job.kind,
        stream=job.stream,
        n=job.n,
        request_id=job.request_id,
        choices=choices,
    )
