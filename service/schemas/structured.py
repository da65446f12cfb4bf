"""What an answer's text must be: OpenAI's `response_format`, and `structured_outputs` as vLLM has it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

JsonObjectValue = dict[str, Any]

MAX_OPTIONS = 1000


class _Format(Struct, tag_field="type", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Told apart by `type`."""


class TextFormat(_Format, tag="text", frozen=True):
    pass


class JsonObjectFormat(_Format, tag="json_object", frozen=True):
    pass


class NamedSchema(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """strict: the schema is enforced whatever it says."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: JsonObjectValue
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema", frozen=True):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Exactly one of them. json: a schema, as an object or as its text."""

    json: JsonObjectValue | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_OPTIONS)] | None = None
    grammar: str | None = None
