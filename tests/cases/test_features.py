"""Every feature for every choice, streamed and not, from the real default model (C15 to C17, and n of everything)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from engine.native.binding import find_variant
from tests.e2e.answers import check_error
from tests.e2e.server import Server, Servers, spec
from tests.service.folding import same_both_ways, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"enum": [2, 4]}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "animal", "parameters": SCHEMA, "strict": True}}
ASK = [{"role": "user", "content": "Name an animal."}]
THINKING = [*ASK, {"role": "assistant", "content": "<think>\nThe user wants"}]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    """The default model, taken for one that reasons and calls: its own template shows neither."""
    return servers.get(spec("service", "asyncio", {"CHORUS_TOOL_PARSER": "hermes", "CHORUS_REASONING_PARSER": "think"}))


CHAT_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs_alone": {"logprobs": True, "temperature": 0},
    "logprobs_top_k": {"logprobs": True, "top_logprobs": 20, "top_k": 1},
    "logprobs_top_p": {"logprobs": True, "top_logprobs": 20, "top_p": 0.01},
    "logprobs_banned": {"logprobs": True, "top_logprobs": 20, "logit_bias": {"28": -100, "30": -100}},
    "logprobs_stop": {"logprobs": True, "stop": ["zzzz", "\n\n", " a"]},
    "stop": {"stop": ["ani", "mal", " is"]},
    "stop_included": {"stop": [" is", " the"], "include_stop_str_in_output": True, "return_token_ids": True},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "schema_logprobs": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "logprobs": True,
        "top_logprobs": 20,
    },
    "regex": {"structured_outputs": {"regex": "(cat|dog)s? [0-9]{2}"}},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "animal"}}},
    "strict_auto": {"tools": [TOOL], "logprobs": True},
    "reasoning": {"messages": THINKING, "continue_final_message": True},
    "reasoning_logprobs": {"messages": THINKING, "continue_final_message": True, "logprobs": True, "stop": [" that"]},
    "bad_words": {"bad_words": [" the", "an", "."], "ignore_eos": True},
    "allowed_token_ids": {"allowed_token_ids": list(range(300, 400)), "return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 2, "return_token_ids": True},
    "fan_out": {"fan_out": {"on_error": "isolate"}, "min_tokens": 5, "stop": ["."]},
}
COMPLETION_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "echo": {"echo": True, "stop": ["."]},
    "echo_logprobs": {"echo": True, "logprobs": 5},
    "echo_logprobs_0": {"echo": True, "logprobs": 0, "temperature": 0},
    "score": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 0, "return_token_ids": True, "logprobs": 2},
    "grammar": {"structured_outputs": {"grammar": 'start: /[a-f]{3}/ ("!" | "?")'}, "logprobs": 1},
    "bad_words": {"bad_words": [" a", "e"]},
}


def single(server: Server, path: str, body: dict[str, Any], index: int) -> dict[str, Any]:
    """Choice i of n as the answer to a request of its own."""
    (choice,) = whole(server.http, path, body | {"n": 1, "seed": body["seed"] + index})["choices"]  # type: ignore[arg-type]
    return {**choice, "index": index}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(choice))
    for call in copy.get("message", {}).get("tool_calls", []):
        del call["id"]
    return copy


@pytest.mark.parametrize("feature", CHAT_FEATURES)
def test_three_choices_of_a_chat_are_the_same_streamed_whole_and_alone(server: Server, feature: str) -> None:
    body = {"model": server.model, "messages": ASK, "n": 3, "seed": 11, "max_tokens": 40} | CHAT_FEATURES[feature]
    choices = same_both_ways(server.http, CHAT, body)  # type: ignore[arg-type]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for index in (0, 2):
        assert without_ids(choices[index]) == without_ids(single(server, CHAT, body, index))
    for choice in choices:
        check_feature(feature, choice)


def check_feature(feature: str, choice: dict[str, Any]) -> None:
    message = choice["message"]
    entries = (choice["logprobs"] or {}).get("content", [])
    assert ("logprobs" in CHAT_FEATURES[feature]) == bool(entries)
    for entry in entries:
        numbers = [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
        assert all(-9999 <= number <= 0 for number in numbers)
        assert len(entry["top_logprobs"]) == CHAT_FEATURES[feature].get("top_logprobs", 0)
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    if feature.startswith("schema") and choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    if feature in ("required", "named") and choice["end_reason"] == "stop":
        assert choice["finish_reason"] == {"required": "tool_calls", "named": "stop"}[feature]
        (call,) = message["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    if feature.startswith("reasoning"):
        assert message["reasoning_content"]
    if feature == "bad_words":
        assert not any(word in message["content"] for word in CHAT_FEATURES[feature]["bad_words"])
    if feature == "allowed_token_ids":
        assert all(300 <= token_id < 400 for token_id in choice["token_ids"])


@pytest.mark.parametrize("feature", COMPLETION_FEATURES)
def test_three_choices_of_two_completions_are_the_same_streamed_whole_and_alone(server: Server, feature: str) -> None:
    prompts = ["Birds are", "The café’s 🧪 was"]
    body = {"model": server.model, "prompt": prompts, "n": 3, "seed": 11, "max_tokens": 20}
    body |= COMPLETION_FEATURES[feature]
    choices = same_both_ways(server.http, COMPLETIONS, body)  # type: ignore[arg-type]
    assert [choice["index"] for choice in choices] == list(range(6))
    for index in (0, 4):
        alone = single(server, COMPLETIONS, body | {"prompt": prompts[index // 3]}, index % 3)
        assert choices[index] == alone | {"index": index}
    for index, choice in enumerate(choices):
        if "echo" in COMPLETION_FEATURES[feature]:
            assert choice["text"].startswith(prompts[index // 3])
        if (logprobs := choice["logprobs"]) is not None:
            assert len({len(value) for value in logprobs.values() if value is not None}) == 1
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    usage = whole(server.http, COMPLETIONS, body)["usage"]  # type: ignore[arg-type]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_what_was_drawn_scores_as_it_was_drawn(server: Server) -> None:
    """An evaluation harness's question, put to an answer that is known."""
    body: dict[str, Any] = {"model": server.model, "temperature": 0, "logprobs": 5, "return_token_ids": True}
    drawn = whole(server.http, COMPLETIONS, body | {"prompt": "The capital of France is", "max_tokens": 30})["choices"][0]  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    token_ids = drawn["prompt_token_ids"] + drawn["token_ids"]
    for max_tokens in (0, 1):
        score = body | {"prompt": [token_ids], "echo": True, "max_tokens": max_tokens}
        (choice,) = whole(server.http, COMPLETIONS, score)["choices"]  # type: ignore[arg-type]
        told, start = choice["logprobs"], len(drawn["prompt_token_ids"])
        stop = len(token_ids)
        expected = drawn["logprobs"]["token_logprobs"]
        if find_variant() is None:
            assert told["token_logprobs"][start:stop] == pytest.approx(expected, abs=0.05)
        else:
            assert told["token_logprobs"][start:stop] == expected, "not the bits that it was drawn by"
            assert told["top_logprobs"][start:stop] == drawn["logprobs"]["top_logprobs"]
        assert told["tokens"][start:stop] == drawn["logprobs"]["tokens"]
        for logprob, top in zip(told["token_logprobs"][start:stop], told["top_logprobs"][start:stop], strict=True):
            assert logprob == max(top.values()), "it was greedy"


def test_a_long_prompt_is_scored_in_chunks(server: Server) -> None:
    body = {"model": server.model, "prompt": [[1 + k % 5000 for k in range(1500)]], "echo": True, "logprobs": 0}
    (choice,) = whole(server.http, COMPLETIONS, body | {"max_tokens": 0})["choices"]  # type: ignore[arg-type]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None and len(others) == 1499
    assert all(-9999 <= logprob <= 0 for logprob in others)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_c16_counts_that_are_none(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {"model": server.model, "max_tokens": 2}
    base |= {"messages": ASK} if path == CHAT else {"prompt": "x"}
    for stream in (False, True):
        check_error(server.post(path, base | fields | {"stream": stream}), 400, param)
