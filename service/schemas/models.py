"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCard(Struct, kw_only=True, frozen=True):
    """max_model_len: our extension, null until the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
