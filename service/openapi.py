"""The API's description, made from the request and answer schemas, and a page that shows it without outside assets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, get_args

import msgspec

from service import __version__
from service.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from service.schemas.common import ErrorEnvelope
from service.schemas.completions import Completion, CompletionRequest
from service.schemas.embedding_fields import EMBEDDING_FIELDS
from service.schemas.embeddings import MAX_INPUTS, EmbeddingCreateRequest, EmbeddingList
from service.schemas.field_rules import FieldRule
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from service.schemas.kept_responses import DeletedResponse, ItemList
from service.schemas.models import ModelCard, ModelList
from service.schemas.requests import Cancelled, RunningRequestList
from service.schemas.response_events import Event
from service.schemas.response_fields import RESPONSE_FIELDS
from service.schemas.response_items import InputItem
from service.schemas.responses import Response, ResponseRequest
from service.schemas.tokenize import Detokenized, DetokenizeRequest, RenderedChat, Tokenized, TokenizeRequest

ERRORS = {
    400: "The request is malformed or asks for what is not supported; `param` names the field.",
    401: "No known API key came with it.",
    404: "No such model, URL, response or running request.",
    405: "The URL does not take this method.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full, or a limit of the key is reached; see Retry-After.",
    500: "The server had an error.",
    503: "The model is loading, the server is shutting down, the engine has died, or a deadline passed in the queue.",
}
REQUESTS = (
    ("/v1/chat/completions", "ChatCompletionRequest", CHAT_FIELDS),
    ("/v1/completions", "CompletionRequest", COMPLETION_FIELDS),
    ("/v1/responses", "ResponseRequest", RESPONSE_FIELDS),
    ("/v1/embeddings", "EmbeddingCreateRequest", EMBEDDING_FIELDS),
)
KEPT_ERRORS = (400, 401, 404, 500, 503)
GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 500, 503)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Operation:
    """answers: media type to schema, of status 200."""

    path: str
    method: str
    summary: str
    answers: Mapping[str, Json]
    errors: Sequence[int] = (401, 500)
    body: str | None = None
    parameters: Sequence[Json] = ()
    is_open: bool = False


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_EVENTS = [_ref(kind.__name__) for kind in get_args(Event)]
_ITEMS = [_ref(kind.__name__) for kind in get_args(InputItem)]
_STATUS = {"application/json": {"type": "object", "additionalProperties": {"type": "string"}}}
_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
_RESPONSE_ID = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "description": "The answer's `id`, also its header X-Chorus-Response-Id.",
    "schema": {"type": "string"},
}
_LIMIT = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}}
_ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}}
_AFTER = {"name": "after", "in": "query", "description": "The item before.", "schema": {"type": "string"}}
_INDEX = {"name": "index", "in": "path", "required": True, "schema": {"type": "integer"}}
_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Seconds after which the answer ends with what there is.",
    "schema": {"type": "string", "pattern": "^(?=.*[1-9])[0-9]{1,9}(\\.[0-9]{1,9})?$"},
}
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Echoed in the answer and in the log.",
    "schema": {"type": "string", "pattern": "^[!-~]([ -~]{0,254}[!-~])?$"},
}

OPERATIONS = (
    _Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation, n times",
        {"application/json": _ref("ChatCompletion"), "text/event-stream": _ref("ChatCompletionChunk")},
        GENERATION_ERRORS,
        "ChatCompletionRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/v1/completions",
        "post",
        "Continue one or more prompts, n times each",
        {"application/json": _ref("Completion"), "text/event-stream": _ref("Completion")},
        GENERATION_ERRORS,
        "CompletionRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/v1/responses",
        "post",
        "Answer a conversation, with or without tools",
        {"application/json": _ref("Response"), "text/event-stream": {"anyOf": _EVENTS}},
        GENERATION_ERRORS,
        "ResponseRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/v1/responses/{response_id}",
        "get",
        "A response that is kept, or runs and will be",
        {"application/json": _ref("Response")},
        KEPT_ERRORS,
        parameters=(_RESPONSE_ID,),
    ),
    _Operation(
        "/v1/responses/{response_id}",
        "delete",
        "Delete a response that is kept",
        {"application/json": _ref("DeletedResponse")},
        KEPT_ERRORS,
        parameters=(_RESPONSE_ID,),
    ),
    _Operation(
        "/v1/responses/{response_id}/input_items",
        "get",
        "The input of a response that is kept, the last item first",
        {"application/json": _ref("ItemList")},
        KEPT_ERRORS,
        parameters=(_RESPONSE_ID, _LIMIT, _ORDER, _AFTER),
    ),
    _Operation(
        "/v1/responses/{response_id}/cancel",
        "post",
        "Cancel a response that runs; its client gets what was made",
        {"application/json": _ref("Response")},
        KEPT_ERRORS,
        parameters=(_RESPONSE_ID,),
    ),
    _Operation(
        "/v1/chat/completions/render",
        "post",
        "The prompt that a conversation becomes; nothing is generated",
        {"application/json": _ref("RenderedChat")},
        GENERATION_ERRORS,
        "ChatCompletionRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/v1/embeddings",
        "post",
        "Vectors of texts, where there is an embedding model",
        {"application/json": _ref("EmbeddingList")},
        GENERATION_ERRORS,
        "EmbeddingCreateRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/tokenize",
        "post",
        "The tokens of a text or a conversation",
        {"application/json": _ref("Tokenized")},
        GENERATION_ERRORS,
        "TokenizeRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation(
        "/detokenize",
        "post",
        "The text of tokens",
        {"application/json": _ref("Detokenized")},
        GENERATION_ERRORS,
        "DetokenizeRequest",
        (_REQUEST_ID, _TIMEOUT),
    ),
    _Operation("/v1/models", "get", "The served model", {"application/json": _ref("ModelList")}),
    _Operation(
        "/v1/models/{model_id}",
        "get",
        "One model; ids may contain slashes",
        {"application/json": _ref("ModelCard")},
        (401, 404, 500),
        parameters=(_MODEL_ID,),
    ),
    _Operation("/v1/requests", "get", "Your requests that run", {"application/json": _ref("RunningRequestList")}),
    _Operation(
        "/v1/requests/{response_id}",
        "delete",
        "Cancel a request; its client gets what was made",
        {"application/json": _ref("Cancelled")},
        (401, 404, 500),
        parameters=(_RESPONSE_ID,),
    ),
    _Operation(
        "/v1/requests/{response_id}/choices/{index}",
        "delete",
        "Cancel one choice of a request",
        {"application/json": _ref("Cancelled")},
        (401, 404, 500),
        parameters=(_RESPONSE_ID, _INDEX),
    ),
    _Operation("/health", "get", "Same as /health/ready", _STATUS, (500, 503), is_open=True),
    _Operation("/health/ready", "get", "Whether requests are served now", _STATUS, (500, 503), is_open=True),
    _Operation("/health/live", "get", "503 once the engine has died or hangs", _STATUS, (500, 503), is_open=True),
    _Operation("/version", "get", "Version, model and backend", _STATUS),
    _Operation("/metrics", "get", "Prometheus metrics", {"text/plain": {"type": "string"}}),
    _Operation(
        "/debug/steps",
        "get",
        "The engine's last steps, where debugging is on",
        {"application/json": {"type": "object"}},
        (401, 404, 500),
    ),
    _Operation("/openapi.json", "get", "This description", {"application/json": {"type": "object"}}),
    _Operation("/docs", "get", "This description as a page", {"text/html": {"type": "string"}}),
)


@cache
def openapi_document() -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chorus", "version": __version__, "description": "One prompt, n voices."},
        "paths": _paths(),
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
            "responses": {
                str(status): {"description": text, "content": {"application/json": {"schema": _ref("ErrorEnvelope")}}}
                for status, text in ERRORS.items()
            },
        },
    }


def _paths() -> Json:
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return paths


def _describe(operation: _Operation) -> Json:
    answers = {media_type: {"schema": schema} for media_type, schema in operation.answers.items()}
    described: Json = {
        "operationId": f"{operation.method}_{operation.path.strip('/')}".translate(str.maketrans("/.", "__", "{}")),
        "summary": operation.summary,
        "responses": {"200": {"description": "Success", "content": answers}}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in operation.errors},
    }
    if operation.is_open:
        described["security"] = []
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    return described


def _schemas() -> Json:
    types = (
        ChatCompletionRequest,
        CompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
        Completion,
        ResponseRequest,
        Response,
        *get_args(Event),
        *get_args(InputItem),
        DeletedResponse,
        ItemList,
        ModelCard,
        ModelList,
        RunningRequestList,
        Cancelled,
        EmbeddingCreateRequest,
        EmbeddingList,
        TokenizeRequest,
        Tokenized,
        DetokenizeRequest,
        Detokenized,
        RenderedChat,
        ErrorEnvelope,
    )
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for _, name, fields in REQUESTS:
        for field, schema in schemas[name]["properties"].items():
            schema["description"] = _note(fields[field])
    _describe_input(schemas)
    _describe_embedding_input(schemas)
    schemas["ChatCompletionRequest"]["properties"]["messages"]["minItems"] = 1
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {
            "required": ["messages"],
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": {"type": "null"}},
        },
    ]
    return schemas


def _describe_embedding_input(schemas: Json) -> None:
    """Its four forms, none of them empty."""
    text: Json = {"type": "string", "minLength": 1}
    token_ids: Json = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    several = [{"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": form} for form in (text, token_ids)]
    described = schemas["EmbeddingCreateRequest"]["properties"]["input"]
    described.pop("anyOf")
    described["anyOf"] = [text, token_ids, *several]


def _describe_input(schemas: Json) -> None:
    """What `service.response_input` makes of it: an item's `type` may be left out where its fields tell."""
    for name in ("InputMessage", "ItemReference"):
        schemas[name]["required"].remove("type")
    description = schemas["ResponseRequest"]["properties"]["input"]["description"]
    items = {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}
    schemas["ResponseRequest"]["properties"]["input"] = {
        "anyOf": [{"type": "string"}, items],
        "description": description,
    }
    schemas["ResponseRequest"]["required"].append("input")


def _note(rule: FieldRule) -> str:
    return f"{rule.use.value}: {rule.note}"


@cache
def docs_page() -> str:
    """The operations, and each request's fields with what becomes of them."""
    document = openapi_document()
    operations = "".join(
        f"<tr><td>{operation.method.upper()}</td><td><code>{escape(operation.path)}</code></td>"
        f"<td>{escape(operation.summary)}</td></tr>"
        for operation in OPERATIONS
    )
    requests = "".join(
        f"<h2><code>{path}</code></h2><table><tr><th>field</th><th>use</th><th></th></tr>{_field_rows(fields)}</table>"
        for path, _, fields in REQUESTS
    )
    title = f"{document['info']['title']} {document['info']['version']}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{text-align:left;vertical-align:top;padding:.2em .8em .2em 0}</style>"
        f'<h1>{title}</h1><p><a href="openapi.json">openapi.json</a></p><table>{operations}</table>{requests}</html>'
    )


def _field_rows(fields: Mapping[str, FieldRule]) -> str:
    return "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{rule.use.value}</td><td>{escape(rule.note)}</td></tr>"
        for name, rule in fields.items()
    )
