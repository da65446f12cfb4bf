"""What is answered about responses that are kept."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class DeletedResponse(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct, kw_only=True, frozen=True):
    """Items of a response's own input. first_id, last_id: null of an empty list."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
