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
        return ModelList(data=_cards(services))

    @get("/{model_id:path}", sync_to_thread=False)
    def get_model(self, model_id: FromPath[str], services: NamedDependency[Services]) -> ModelCard:
        # a path parameter keeps its leading slash, for model ids have slashes of their own
        name = model_id.removeprefix("/")
        for card in _cards(services):
            if card.id == name:
                return card
        raise model_not_found(name)


def _cards(services: Services) -> list[ModelCard]:
    """The model that generates, and behind it the one that embeds where there is one."""
    info = services.engine.info
    limits = {services.model_name: info.max_model_len}
    if info.embedding is not None:
        limits[services.settings.served_embedding_model_name] = info.embedding.max_model_len
    return [
        ModelCard(id=name, created=services.started_at, owned_by="chorus", max_model_len=limit or None)
        for name, limit in limits.items()
    ]
