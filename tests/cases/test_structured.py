"""C27 to C30: schemas good and bad through the service, over a model that writes at random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.constrained import violations
from tests.engine.test_grammar_random import random_schema
from tests.service.apps import Client, check_error
from tests.service.folding import same_both_ways, whole
from tests.service.random_model import random_model

CHAT = "/v1/chat/completions"
PLACE = "response_format.json_schema.schema"
BODY: dict[str, Any] = {
    "model": "org/m",
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 3,
    "n": 4,
    "max_tokens": 120,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with random_model(tmp_path_factory.mktemp("bytes")) as client:
        yield client


def schema_format(schema: object) -> dict[str, Any]:
    json_schema = {"name": "x", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def check_choices(schema: object, choices: list[dict[str, Any]]) -> int:
    """How many have ended by themselves: each of them satisfies the schema, the others say that they are cut."""
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    for choice in ended:
        text = choice["message"]["content"]
        assert violations(schema, text.encode()) == [], (json.dumps(schema), text)
    assert all(choice["end_reason"] == "length" for choice in choices if choice not in ended)
    return len(ended)


REFUSED = {
    "not": {"type": "string"},
    "if": {"type": "string"},
    "contains": {"type": "integer"},
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
    "$dynamicRef": "#x",
}


def places_of(schema: Any) -> list[dict[str, Any]]:
    """All schemas in a schema, itself first."""
    found = [schema]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += places_of(schema[key])
    for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for inner in schema.get(key, []):
            found += places_of(inner)
    for key in ("properties", "patternProperties"):
        for inner in schema.get(key, {}).values():
            found += places_of(inner)
    return found


def test_c28_whatever_schema_is_accepted_is_kept_and_whatever_is_not_is_400(client: Client) -> None:
    rng = random.Random(28)
    num_accepted = num_ended = 0
    for number in range(60):
        schema = {"type": "object", "properties": {"p": random_schema(rng)}, "required": ["p"]}
        schema["additionalProperties"] = False
        response = client.post(CHAT, json=BODY | schema_format(schema) | {"seed": number})
        if response.status_code != 200:
            check_error(response, 400, PLACE)
            continue
        num_accepted += 1
        num_ended += check_choices(schema, response.json()["choices"])
    assert num_accepted > 30 and num_ended > 60


def test_c28_a_keyword_that_is_not_enforced_is_refused_by_name_wherever_it_stands(client: Client) -> None:
    rng = random.Random(29)
    for number in range(60):
        schema = {"type": "object", "properties": {"p": random_schema(rng)}, "required": ["p"]}
        keyword = rng.choice(sorted(REFUSED))
        bad = copy.deepcopy(schema)
        rng.choice(places_of(bad))[keyword] = REFUSED[keyword]
        body = BODY | schema_format(bad) | {"stream": number % 2 == 0}
        error = check_error(client.post(CHAT, json=body), 400, PLACE)
        if client.post(CHAT, json=BODY | schema_format(schema) | {"max_tokens": 1}).status_code == 200:
            assert keyword in error["message"], (error["message"], json.dumps(bad))


C27 = [
    {"type": "str"},
    {"type": "string", "pattern": "[a"},
    {"type": "integer", "maximum": 20000000000},
    {"enum": []},
    {"type": "object", "required": ["x"], "properties": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"minimum": 5, "type": "integer"}, {"maximum": 3, "type": "integer"}]},
    {"$ref": "http://example.com/x.json"},
    {"$ref": "#/$defs/none"},
    {"$ref": "#"},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "\\"},
    {"type": "string", "pattern": "^a|b\\"},
    {"type": "object", "patternProperties": {"x\\": {"type": "integer"}}},
    {"type": "string", "pattern": "\\\\"},
    {"type": "string", "minLength": -1},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "minLength": "5"},
    {"type": "string", "format": "no-such-format"},
    {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 5},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "minItems": 3, "maxItems": 1},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "array", "items": "x"},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"a": 5}},
    {"type": "object", "additionalProperties": "no"},
    {"type": "object", "patternProperties": {"[": {}}},
    {"type": "object", "minProperties": 5, "maxProperties": 1},
    {"type": "number", "multipleOf": 0},
    {"type": "number", "multipleOf": 0.1},
    {"type": "number", "minimum": 1e307, "maximum": 1e308},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    {"type": ["integer", "nope"]},
    {"type": []},
    {"const": {"a": [1, {"b": None}]}},
    {"anyOf": []},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"unknownKeyword": 1},
    {"minLength": 2},
    {},
]


@pytest.mark.parametrize("schema", C27, ids=json.dumps)
def test_c27_a_schema_is_400_with_its_place_or_is_kept_and_neighbours_do_not_notice(
    client: Client, schema: dict[str, Any]
) -> None:
    neighbour = BODY | {"max_tokens": 8}
    before = whole(client, CHAT, neighbour)["choices"]
    for stream in (False, True):
        response = client.post(CHAT, json=BODY | schema_format(schema) | {"stream": stream})
        if response.status_code != 200:
            check_error(response, 400, PLACE)
        elif not stream:
            check_choices(schema, response.json()["choices"])
        parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        called = client.post(CHAT, json=BODY | {"tools": tools, "tool_choice": "required", "stream": stream})
        if called.status_code != 200:
            check_error(called, 400, "tools[0].function.parameters")
    assert whole(client, CHAT, neighbour)["choices"] == before


def test_c29_each_choice_has_its_own_place_in_the_grammar(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    fields = schema_format(schema) | {"temperature": 1, "logprobs": True}
    choices = same_both_ways(client, CHAT, BODY | fields)
    assert check_choices(schema, choices) > 0
    assert len({choice["message"]["content"] for choice in choices}) > 1
    for choice in same_both_ways(client, CHAT, BODY | fields | {"max_tokens": 3}):
        assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 3)


def test_c30_parallel_calls_are_counted_named_once_and_whole(client: Client) -> None:
    """The fold checks each delta: id, type and name with a call's first, then arguments only."""
    parameters = {"type": "object", "properties": {"q": {"enum": ['"', "é", "\\", ""]}}, "required": ["q"]}
    tools = [
        {
            "type": "function",
            "function": {
                "name": "deep",
                "parameters": {
                    "type": "object",
                    "properties": {"a": parameters},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "none", "parameters": {"type": "object", "maxProperties": 0}}},
    ]
    seen: set[str] = set()
    most = 0
    for seed in range(4):
        body = BODY | {
            "tools": tools,
            "tool_choice": "required",
            "max_tokens": 400,
            "seed": seed,
            "logit_bias": {"2": -9},
        }
        for choice in same_both_ways(client, CHAT, body):
            calls = choice["message"].get("tool_calls", [])
            most = max(most, len(calls))
            assert len({call["id"] for call in calls}) == len(calls)
            for call in calls if choice["finish_reason"] == "tool_calls" else calls[:-1]:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                seen.add(call["function"]["name"])
    assert seen == {"deep", "none"} and most > 1
