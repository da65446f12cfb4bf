"""Every field that has a rule is sent once at least, and what comes of it is what the rule says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from service.schemas.embedding_fields import EMBEDDING_FIELDS
from service.schemas.field_rules import FieldRule, Use, rule_for
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from service.schemas.response_fields import RESPONSE_FIELDS

from .apps import EMBEDDING, Client, check_error, serving
from .constrained import ConstrainedEngine
from .response_samples import ELSEWHERE, RESPONSE_SAMPLES, RESPONSE_TOOLS

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
    "embedding": "/v1/embeddings",
}
FIELDS = {
    "chat": CHAT_FIELDS,
    "completion": COMPLETION_FIELDS,
    "response": RESPONSE_FIELDS,
    "embedding": EMBEDDING_FIELDS,
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2, "seed": 1},
    "completion": {"model": "org/m", "prompt": "hi", "max_tokens": 4, "n": 2, "seed": 1},
    "response": {"model": "org/m", "input": "hi", "max_output_tokens": 4, "seed": 1},
    "embedding": {"model": "org/e", "input": "hi"},
}
TEXT = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
PARSED = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
CALL = {"id": "c", "type": "function", "index": 0, "function": PARSED}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "f"}}

SHARED: dict[str, list[Any]] = {
    "model": ["org/m"],
    "n": [2],
    "seed": [7],
    "stream": [True, False],
    "stream_options": [{"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": True}],
    "max_tokens": [3],
    "min_tokens": [1],
    "temperature": [0.5],
    "top_p": [0.5],
    "top_k": [5],
    "min_p": [0.1],
    "stop": ["x", ["x", "y"]],
    "stop_token_ids": [[7]],
    "ignore_eos": [True],
    "frequency_penalty": [1],
    "presence_penalty": [1],
    "repetition_penalty": [1.1],
    "logit_bias": [{"7": 1}],
    "user": ["u"],
    "timeout": [60],
    "request_id": ["r"],
    "priority": [1],
    "structured_outputs": [
        {"json": {"type": "object"}},
        {"json_object": True},
        {"regex": "a"},
        {"choice": ["a"]},
        {"grammar": 'start: "a"'},
    ],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "return_token_ids": [True],
    "truncate_prompt_tokens": [9],
    "cache_salt": ["s"],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "max_streaming_response_tokens": [4],
    "prompt_logprobs": [1],
    "fan_out": [
        {"on_error": "isolate", "stop_after": 1, "keep_unfinished": False, "details": True},
        {"rank_by": "logprob", "keep": 1, "agree": {"on": "regex", "value": "x", "count": 2}},
    ],
}
SAMPLES: dict[str, dict[str, list[Any]]] = {
    "chat": {
        **SHARED,
        "messages": [
            [
                {"role": "system", "content": [TEXT], "name": "n"},
                {"role": "user", "content": [TEXT], "name": "n"},
                {
                    "role": "assistant",
                    "content": [TEXT],
                    "name": "n",
                    "refusal": "r",
                    "reasoning_content": "t",
                    "annotations": [],
                    "tool_calls": [CALL],
                    "parsed": {},
                },
                {"role": "tool", "content": [TEXT], "tool_call_id": "c", "name": "f"},
                {"role": "assistant", "content": None, "function_call": PARSED},
                {"role": "function", "name": "f", "content": "x"},
            ],
            [{"role": "developer", "content": [TEXT], "name": "n"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
            [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}],
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]}],
            [{"role": "assistant", "content": "x", "audio": {"id": "x"}}],
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}],
        ],
        "max_completion_tokens": [4],
        "metadata": [{"a": "b"}],
        "parallel_tool_calls": [True, False],
        "prediction": [{"type": "content", "content": "x"}],
        "prompt_cache_key": ["k"],
        "prompt_cache_options": [{"mode": "implicit"}],
        "prompt_cache_retention": ["24h"],
        "safety_identifier": ["s"],
        "store": [True],
        "audio": [{"voice": "x", "format": "wav"}],
        "function_call": [{"name": "f"}],
        "functions": [[{"name": "f"}]],
        "logprobs": [True],
        "modalities": [["text", "audio"]],
        "moderation": [{"model": "x"}],
        "reasoning_effort": ["none"],
        "chat_template": ["{{ messages[0].content }}"],
        "chat_template_kwargs": [{"enable_thinking": True}, {"thinking": None}],
        "add_generation_prompt": [True],
        "continue_final_message": [False],
        "response_format": [
            {"type": "text"},
            {"type": "json_object"},
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "strict": True, "schema": {"type": "object"}},
            },
        ],
        "service_tier": ["flex"],
        "tool_choice": [
            "required",
            NAMED,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
            {"type": "custom", "custom": {"name": "f"}},
        ],
        "tools": [TOOLS, [{"type": "custom", "custom": {"name": "f"}}]],
        "top_logprobs": [5],
        "verbosity": ["low"],
        "web_search_options": [{}],
    },
    "completion": {
        **SHARED,
        "prompt": ["x", ["x", "y"], [1, 2], [[1], [2]]],
        "best_of": [3],
        "echo": [True],
        "logprobs": [5],
        "suffix": ["x"],
    },
    "response": {**SHARED, "fan_out": [{"stop_after": 1}], **RESPONSE_SAMPLES},
    "embedding": {
        "model": ["org/e"],
        "input": ["x", ["x", "y"], [1, 2], [[1], [2]]],
        "encoding_format": ["float", "base64"],
        "dimensions": [3],
        "user": ["u"],
    },
}
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "max_streaming_response_tokens": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}
RESPONSE_NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"include": ["message.output_text.logprobs"]},
    "max_streaming_response_tokens": {"stream": True},
    "tool_choice": {"tools": RESPONSE_TOOLS},
    "parallel_tool_calls": {"tools": RESPONSE_TOOLS},
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings = replace(EMBEDDING, tool_parser="hermes", trust_request_chat_template=True)
    with serving(settings, engine=ConstrainedEngine(settings.engine_config())) as client:
        yield client


def paths_of(value: object, path: str, rules: Mapping[str, FieldRule]) -> Iterator[str]:
    """All paths that a value fills, in the spelling of the rules."""
    yield path
    if isinstance(value, Mapping):
        tagged = (f"{path}[{value[tag]}]" for tag in ("role", "type") if tag in value)
        base = next((variant for variant in tagged if variant in rules), path)
        yield base
        for name, inner in value.items():
            yield from paths_of(inner, f"{base}.{name}", rules)
    elif isinstance(value, list):
        for inner in value:
            yield from paths_of(inner, path, rules)


def test_there_is_a_sample_for_every_rule() -> None:
    for kind, rules in FIELDS.items():
        sent = {path for name, values in SAMPLES[kind].items() for one in values for path in paths_of(one, name, rules)}
        unsent = {path for path in set(rules) - sent if not path.startswith(tuple(ELSEWHERE))}
        assert unsent == set(), "a rule that nothing is sent for"


CASES = [
    pytest.param(kind, name, value, id=f"{kind}-{name}-{number}")
    for kind, samples in SAMPLES.items()
    for name, values in samples.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_a_field_does_what_its_rule_says(client: Client, kind: str, name: str, value: object) -> None:
    rules = FIELDS[kind]
    used = [rule for path in paths_of(value, name, rules) if (rule := rule_for(rules, path)) is not None]
    refused = any(rule.use is Use.REFUSED for rule in used)
    needs = RESPONSE_NEEDS if kind == "response" else NEEDS
    body = BODIES[kind] | needs.get(name, {}) | {name: value}
    if name == "max_completion_tokens":
        body.pop("max_tokens")
    response = client.post(PATHS[kind], json=body)
    if refused:
        assert check_error(response, 400)["param"].partition(".")[0].partition("[")[0] == name
    else:
        assert response.status_code == 200, response.text
