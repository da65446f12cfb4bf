from __future__ import annotations

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from service.errors import model_not_found
from service.lifespan import Services
from service.schemas.models import ModelCard, ModelList


class ModelsController(Controller):
    path = "/v1/models"

    @get(sync_to_thread=False)
    def list_models(self, services: NamedDependency[Services]) -> ModelList:
        return ModelList(data=[_card(services)])

    @get("/{model_id:path}", sync_to_thread=False)
    def get_model(self, model_id: FromPath[str], services: NamedDependency[Services]) -> ModelCard:
        # a path parameter keeps its leading slash, for model ids have slashes of their own
        if model_id.removeprefix("/") != services.settings.served_model_name:
            raise model_not_found(model_id.removeprefix("/"))
        return _card(services)


def _card(services: Services) -> ModelCard:
    return ModelCard(
        id=services.settings.served_model_name,
        created=services.started_at,
        owned_by="chorus",
        max_model_len=services.engine.info.max_model_len or None,
    )
