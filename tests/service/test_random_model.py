"""The whole server over a model that writes at random: what is enforced holds all the same, bad schemas are 400s."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from .apps import Client, check_error
from .folding import same_both_ways, whole
from .random_model import random_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {
    "model": "org/m",
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 5,
    "n": 3,
    "max_tokens": 150,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "first", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "second"}},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with random_model(tmp_path_factory.mktemp("bytes")) as client:
        yield client


def schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_k": 1}, {"logit_bias": {"5": -100}}, {"top_p": 0.01}])
def test_every_choice_satisfies_the_schema_or_says_that_it_is_cut(client: Client, fields: dict[str, Any]) -> None:
    body = BODY | schema_format(SCHEMA) | {"logprobs": True, "top_logprobs": 20} | fields
    choices = same_both_ways(client, CHAT, body)
    for choice in choices:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop" or choice["end_reason"] == "length"
        for entry in choice["logprobs"]["content"]:
            numbers = [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
            assert all(-9999 <= number <= 0 for number in numbers) and len(numbers) == 21
    assert any(choice["finish_reason"] == "stop" for choice in choices)


def test_a_choice_cut_short_is_length(client: Client) -> None:
    choices = same_both_ways(client, CHAT, BODY | schema_format(SCHEMA) | {"max_tokens": 3})
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-c]{2}[0-9]"}, "[a-c]{2}[0-9]"),
        ({"choice": ["yes", "no", "né"]}, "yes|no|né"),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, "abd|acd"),
    ],
)
def test_structured_outputs_hold_on_both_endpoints(client: Client, outputs: dict[str, Any], pattern: str) -> None:
    for choice in same_both_ways(client, CHAT, BODY | {"structured_outputs": outputs}):
        assert re.fullmatch(pattern, choice["message"]["content"]) and choice["finish_reason"] == "stop"
    body = {"model": "org/m", "prompt": ["x", "y"], "seed": 3, "n": 3, "max_tokens": 150, "echo": True}
    for choice in same_both_ways(client, COMPLETIONS, body | {"structured_outputs": outputs}):
        assert re.fullmatch(pattern, choice["text"][1:])


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": "required", "parallel_tool_calls": False}]
)
def test_required_calls_are_valid_whatever_the_model(client: Client, fields: dict[str, Any]) -> None:
    choices = same_both_ways(client, CHAT, BODY | {"tools": TOOLS, "logprobs": True} | fields)
    for choice in choices:
        if choice["finish_reason"] != "tool_calls":
            assert choice["finish_reason"] == "length"
            continue
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        assert len(calls) == 1 or "parallel_tool_calls" not in fields
        for call in calls:
            schema = SCHEMA if call["function"]["name"] == "first" else {"type": "object"}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert any(choice["finish_reason"] == "tool_calls" for choice in choices)


def test_a_named_call_is_made_once_and_ends_in_stop(client: Client) -> None:
    named = {"type": "function", "function": {"name": "first"}}
    for choice in same_both_ways(client, CHAT, BODY | {"tools": TOOLS, "tool_choice": named}):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "first"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert choice["finish_reason"] == "stop"


def test_what_is_banned_occurs_in_no_answer(client: Client) -> None:
    free = whole(client, CHAT, BODY)["choices"]
    texts = [choice["message"]["content"] for choice in free]
    words = sorted({text[k : k + 2] for text in texts for k in range(len(text) - 1) if text[k : k + 2].isascii()})[:9]
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"tools": TOOLS}):
        choices = same_both_ways(client, CHAT, BODY | {"bad_words": [*words, "x", "\u00e9"], "logprobs": True} | fields)
        for choice in choices:
            content = choice["message"]["content"] or ""
            assert words and not any(word in content for word in [*words, "x", "\u00e9"])
            if "ignore_eos" in fields:
                assert len(choice["logprobs"]["content"]) == 150


def test_only_the_allowed_tokens_are_drawn(client: Client) -> None:
    allowed = [70, 71, 72]
    for fields in ({}, {"temperature": 0}, {"min_tokens": 5}):
        body = BODY | {"allowed_token_ids": allowed, "return_token_ids": True, "max_tokens": 30} | fields
        for choice in same_both_ways(client, CHAT, body):
            assert set(choice["token_ids"]) <= set(allowed)
            assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 30)
    ends = same_both_ways(client, CHAT, BODY | {"allowed_token_ids": [2, 70], "return_token_ids": True})
    assert [choice["finish_reason"] for choice in ends] == ["stop"] * 3


def test_a_forced_call_leaves_no_room_for_a_ban(client: Client) -> None:
    for fields in ({"bad_words": ["x"]}, {"allowed_token_ids": [70]}):
        body = BODY | {"tools": TOOLS, "tool_choice": "required"} | fields
        check_error(client.post(CHAT, json=body), 400, next(iter(fields)))


def test_unconstrained_neighbours_are_unmasked(client: Client) -> None:
    def texts() -> list[str]:
        return [choice["message"]["content"] for choice in whole(client, CHAT, BODY | {"max_tokens": 20})["choices"]]

    alone = texts()
    whole(client, CHAT, BODY | schema_format(SCHEMA))
    assert texts() == alone


BAD_SCHEMAS = [
    {"type": "str"},
    {"type": "string", "pattern": "[a"},
    {"type": "string", "pattern": "(?=x)y"},
    {"enum": []},
    {"$ref": "http://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"type": "object", "patternProperties": 5},
    {"type": "array", "contains": {"type": "integer"}},
    {"not": {"type": "string"}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=json.dumps)
def test_a_schema_that_cannot_be_enforced_is_400_with_its_place(client: Client, schema: dict[str, Any]) -> None:
    for stream in ({}, {"stream": True}):
        place = "response_format.json_schema.schema"
        check_error(client.post(CHAT, json=BODY | schema_format(schema) | stream), 400, place)
        parameters = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
        tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        fields = {"tools": tools, "tool_choice": "required"} | stream
        check_error(client.post(CHAT, json=BODY | fields), 400, "tools[1].function.parameters")
    assert client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    "outputs", [{"regex": "[a"}, {"regex": "(?=x)"}, {"grammar": "start: ("}, {"grammar": "x"}, {"json": "{"}]
)
def test_what_does_not_compile_is_400_with_its_place(client: Client, outputs: dict[str, Any]) -> None:
    (name,) = outputs
    check_error(client.post(CHAT, json=BODY | {"structured_outputs": outputs}), 400, f"structured_outputs.{name}")
