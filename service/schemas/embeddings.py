"""POST /v1/embeddings: request and answer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_INPUTS = 2048
"""In one request, as OpenAI has it."""


class EmbeddingCreateRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """input: text, a list of texts, token ids, or a list of token-id lists. null equals absent."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class EmbeddingObject(Struct, kw_only=True, frozen=True):
    """embedding: numbers, or base64 of them as four little-endian bytes each."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, kw_only=True, frozen=True):
    """Tokens of all inputs, the special ones that the model wants included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
