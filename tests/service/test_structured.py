"""What the client says of the text reaches the engine as a constraint of every choice, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.api import Choice, InvalidConstraint, JsonObject, JsonSchema, Lark, Regex

from .apps import SETTINGS, Client, check_error, serving
from .constrained import ConstrainedEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 3}
COMPLETION_BODY = {"model": "org/m", "prompt": ["a", "b"], "max_tokens": 2, "n": 3}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": [2**70, 1.5]}}}


@pytest.fixture(scope="module")
def engine() -> ConstrainedEngine:
    return ConstrainedEngine(SETTINGS.engine_config())


@pytest.fixture(scope="module")
def client(engine: ConstrainedEngine) -> Iterator[Client]:
    with serving(engine=engine) as client:
        yield client


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


TEXT = json.dumps(SCHEMA)
PLACE = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject("response_format")),
        (schema_format(SCHEMA, strict=True, description="d"), JsonSchema(TEXT, PLACE)),
        (schema_format(SCHEMA), JsonSchema(TEXT, PLACE)),
    ],
)
def test_a_response_format_holds_for_every_choice(
    client: Client, engine: ConstrainedEngine, fields: dict[str, Any], constraint: object
) -> None:
    for stream in ({}, {"stream": True}):
        assert client.post(CHAT, json=CHAT_BODY | fields | stream).status_code == 200
        assert engine.constraints == [constraint] * 3


@pytest.mark.parametrize(
    ("outputs", "constraint"),
    [
        ({"json": SCHEMA}, JsonSchema(TEXT, "structured_outputs.json")),
        ({"json": TEXT, "regex": None}, JsonSchema(TEXT, "structured_outputs.json")),
        ({"json_object": True}, JsonObject("structured_outputs.json_object")),
        ({"regex": "[a-z]+"}, Regex("[a-z]+", "structured_outputs.regex")),
        ({"choice": ["yes", "no"]}, Choice(("yes", "no"), "structured_outputs.choice")),
        ({"grammar": 'start: "a"'}, Lark('start: "a"', "structured_outputs.grammar")),
    ],
)
def test_structured_outputs_hold_for_every_choice_of_every_prompt(
    client: Client, engine: ConstrainedEngine, outputs: dict[str, Any], constraint: object
) -> None:
    assert client.post(CHAT, json=CHAT_BODY | {"structured_outputs": outputs}).status_code == 200
    assert engine.constraints == [constraint] * 3
    assert client.post(COMPLETIONS, json=COMPLETION_BODY | {"structured_outputs": outputs}).status_code == 200
    assert engine.constraints == [constraint] * 6


def test_both_at_once_are_refused(client: Client) -> None:
    fields = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    check_error(client.post(CHAT, json=CHAT_BODY | fields), 400, "structured_outputs")
    fields["response_format"] = {"type": "text"}
    assert client.post(CHAT, json=CHAT_BODY | fields).status_code == 200


def test_what_does_not_compile_is_400_with_its_place_streamed_or_not(client: Client, engine: ConstrainedEngine) -> None:
    for stream in ({}, {"stream": True}):
        engine.refuse_next(InvalidConstraint("unsupported keyword: contains", PLACE))
        error = check_error(client.post(CHAT, json=CHAT_BODY | schema_format(SCHEMA) | stream), 400, PLACE)
        assert "contains" in error["message"]
    assert client.post(CHAT, json=CHAT_BODY).status_code == 200
