"""`strict` tools under tool_choice auto: what the model calls by itself follows the schema, and its text is free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest
import torch

from engine.plan import SampledToken, StepPlan
from engine.sampler import sample
from tests.engine.constrained import RandomRunner, token_texts

from .apps import Client, check_error
from .folding import same_both_ways, whole
from .random_model import random_model

CHAT = "/v1/chat/completions"
LEAD = "Let me see: <b> <tool_call>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "not": {}}}}
BODY: dict[str, Any] = {
    "model": "org/m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [STRICT, LOOSE],
    "seed": 5,
    "n": 3,
    "max_tokens": 250,
}


@dataclass
class LeadingRunner(RandomRunner):
    """Writes LEAD, then at random, with an inclination to end."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        drawn = super().execute(plan)
        lead = [token_texts().index(bytes([byte])) for byte in LEAD.encode()]
        for number, row in enumerate(plan.sampling_rows):
            place = len(row.output_ids)
            if place < len(lead):
                logits = torch.zeros(1, self.vocab_size)
                logits[0, lead[place]] = 100.0
                (drawn[number],) = sample(logits, [replace(row, logits_row=0)])
        return drawn


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with random_model(tmp_path_factory.mktemp("bytes"), LeadingRunner) as client:
        yield client


@pytest.mark.parametrize("fields", [{}, {"parallel_tool_calls": False}, {"temperature": 0}, {"tool_choice": "auto"}])
def test_a_call_that_the_model_makes_by_itself_follows_the_schema(client: Client, fields: dict[str, Any]) -> None:
    choices = same_both_ways(client, CHAT, BODY | fields)
    for choice in choices:
        message = choice["message"]
        assert message["content"].startswith("Let me see: <b>")
        calls = message.get("tool_calls", [])
        whole_calls = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        for call in whole_calls:
            if call["function"]["name"] == "weather":
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert any(choice["message"].get("tool_calls") for choice in choices)


def test_a_strict_call_is_always_whole_where_the_choice_ends_by_itself(client: Client) -> None:
    only = BODY | {"tools": [STRICT], "n": 8, "max_tokens": 400}
    ended = [choice for choice in whole(client, CHAT, only)["choices"] if choice["end_reason"] == "stop"]
    assert ended and all(choice["finish_reason"] == "tool_calls" for choice in ended)
    for choice in ended:
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_without_strict_the_model_writes_what_it_likes(client: Client) -> None:
    loose = BODY | {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]}
    for choice in whole(client, CHAT, loose)["choices"]:
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    "schema", [{"type": "object", "properties": {"a": {"type": "str"}}}, {"type": "object", "not": {"required": ["a"]}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_is_400_with_its_place(client: Client, schema: object, stream: bool) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema, "strict": True}}
    response = client.post(CHAT, json=BODY | {"tools": [STRICT, bad], "stream": stream})
    check_error(response, 400, "tools[1].function.parameters")


def test_where_calls_have_no_marker_a_strict_schema_is_checked_all_the_same(client: Client) -> None:
    services = client.app.state.services
    before = services.parsers
    services.parsers = replace(before, tools="pythonic")
    try:
        bad = {"type": "function", "function": {"name": "bad", "parameters": {"not": {}}, "strict": True}}
        check_error(client.post(CHAT, json=BODY | {"tools": [LOOSE, bad]}), 400, "tools[1].function.parameters")
        assert whole(client, CHAT, BODY | {"tools": [STRICT, LOOSE]})["choices"]
    finally:
        services.parsers = before


def test_what_else_says_what_the_text_may_be_is_refused(client: Client) -> None:
    check_error(client.post(CHAT, json=BODY | {"bad_words": ["x"]}), 400, "bad_words")
