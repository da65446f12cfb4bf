"""vLLM's extensions: each does what it says, streamed and not, for every n; combinations without sense are 400s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.api import TokenPrompt
from engine.fake import TokenRule

from .apps import SETTINGS, Client, check_error, serving
from .constrained import ConstrainedEngine
from .folding import chunks_of, folded, same_both_ways, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
CHAT_BODY: dict[str, Any] = {"model": "org/m", "messages": HELLO, "seed": 0, "n": 3}
COMPLETION_BODY: dict[str, Any] = {"model": "org/m", "prompt": ["hi", "ho"], "seed": 0, "n": 3, "max_tokens": 50}
PATHS = [(CHAT, CHAT_BODY), (COMPLETIONS, COMPLETION_BODY)]
ANSWERS = (b"one. two", b"three\x01 four.", b"five six")


def script() -> TokenRule:
    """The choice with seed s says ANSWERS[s], then ends; byte 1 stands for a special token."""

    def rule(seed: int, position: int, _: int) -> int:
        token_id = [*ANSWERS[seed], 256][position]
        return 257 if token_id == 1 else token_id

    return rule


@pytest.fixture(scope="module")
def engine() -> ConstrainedEngine:
    return ConstrainedEngine(SETTINGS.engine_config(), rule=script())


@pytest.fixture(scope="module")
def client(engine: ConstrainedEngine) -> Iterator[Client]:
    with serving(engine=engine) as client:
        yield client


def texts(choices: list[dict[str, Any]]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def prompt_of(engine: ConstrainedEngine) -> tuple[int, ...]:
    prompt = engine.batch[0].prompt
    assert isinstance(prompt, TokenPrompt)
    return prompt.token_ids


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_ends_a_choice_is_part_of_its_text(client: Client, path: str, body: dict[str, Any]) -> None:
    num = 1 if path == CHAT else 2
    hidden = same_both_ways(client, path, body | {"stop": [". t", "."]})
    assert texts(hidden) == ["one", "three four", "five six"] * num
    fields = {"stop": [". t", "."], "include_stop_str_in_output": True}
    assert texts(same_both_ways(client, path, body | fields)) == ["one.", "three four.", "five six"] * num
    token = {"stop_token_ids": [ord("v")], "include_stop_str_in_output": True}
    assert texts(same_both_ways(client, path, body | token))[2] == "fiv"


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_special_tokens_are_shown_where_asked_for(client: Client, path: str, body: dict[str, Any]) -> None:
    assert texts(same_both_ways(client, path, body))[1] == "three four."
    assert texts(same_both_ways(client, path, body | {"skip_special_tokens": False}))[1] == "three<|start|> four."


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stop", [None, "six"])
def test_token_ids_are_returned(client: Client, path: str, body: dict[str, Any], stop: str | None) -> None:
    body = body | {"return_token_ids": True, "stop": stop}
    choices = same_both_ways(client, path, body)
    for choice, answer in zip(choices, ANSWERS * 2, strict=False):
        expected = [257 if byte == 1 else byte for byte in answer] + ([] if stop and b"six" in answer else [256])
        assert choice["token_ids"] == expected
    if path == CHAT:
        prompt_ids = whole(client, path, body)["prompt_token_ids"]
        first = [chunk for chunk in chunks_of(client, path, body) if "prompt_token_ids" in chunk]
        assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
        assert all(chunk["prompt_token_ids"] == prompt_ids for chunk in first)
        assert bytes(token_id for token_id in prompt_ids if token_id < 256) == b"user\nhiassistant\n"
    else:
        assert [choice["prompt_token_ids"] for choice in choices] == [[104, 105]] * 3 + [[104, 111]] * 3


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_long_prompt_keeps_its_end(
    client: Client, engine: ConstrainedEngine, path: str, body: dict[str, Any]
) -> None:
    for kept, num_tokens in ((1, 1), (1000, 20 if path == CHAT else 2)):
        answer = whole(client, path, body | {"truncate_prompt_tokens": kept})
        assert len(prompt_of(engine)) == num_tokens
        assert answer["usage"]["prompt_tokens"] == num_tokens * len(engine.batch)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_every_chunk_has_the_usage_so_far(client: Client, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(client, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == whole(client, path, body)["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_salt_is_a_namespace_of_the_cache(
    client: Client, engine: ConstrainedEngine, path: str, body: dict[str, Any]
) -> None:
    namespaces = []
    for salt in ("a", "b", None):
        whole(client, path, body | {"cache_salt": salt})
        namespaces.append(engine.batch[0].cache_namespace)
    assert len(set(namespaces)) == 3


def test_variables_of_the_template(client: Client, engine: ConstrainedEngine) -> None:
    plain = b"user\nhiassistant\n"
    for fields, thought in (
        ({}, b""),
        ({"chat_template_kwargs": {"enable_thinking": True}}, b""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, b"<think></think>"),
        ({"reasoning_effort": "none"}, b"<think></think>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, b""),
    ):
        whole(client, CHAT, CHAT_BODY | fields)
        assert bytes(token_id for token_id in prompt_of(engine) if token_id < 256) == plain + thought


def test_whose_turn_it_is(client: Client, engine: ConstrainedEngine) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "so"}]
    for fields, end in (
        ({}, b"assistant\n"),
        ({"add_generation_prompt": True, "continue_final_message": False}, b"assistant\n"),
        ({"add_generation_prompt": False}, b"assistant\nso|"),
        ({"continue_final_message": True}, b"assistant\nso"),
    ):
        whole(client, CHAT, CHAT_BODY | {"messages": messages} | fields)
        prompt = bytes(token_id if token_id < 256 else ord("|") for token_id in prompt_of(engine))
        assert prompt.endswith(end)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),  # not in this template
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),  # the last one is the user's
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": True,
                "messages": [{"role": "assistant", "content": "x"}],
            },
            "continue_final_message",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [7, 10**6]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x"], "allowed_token_ids": [1]}, "bad_words"),
        ({"bad_words": ["x"], "structured_outputs": {"regex": "a"}}, "bad_words"),
        ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
        ({"max_streaming_response_tokens": 0}, "max_streaming_response_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}):
        check_error(client.post(CHAT, json=CHAT_BODY | fields | stream), 400, param)


def test_usage_on_every_chunk_needs_usage(client: Client) -> None:
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    check_error(client.post(CHAT, json=CHAT_BODY | fields), 400, "stream_options.continuous_usage_stats")


def test_echo_repeats_whole_prompts_only(client: Client) -> None:
    fields = {"echo": True, "truncate_prompt_tokens": 1}
    check_error(client.post(COMPLETIONS, json=COMPLETION_BODY | fields), 400, "truncate_prompt_tokens")


def test_chunks_of_several_tokens(client: Client) -> None:
    for path, body in PATHS:
        for size in (1, 3, 100):
            fields = {"max_streaming_response_tokens": size, "return_token_ids": True}
            chunks = chunks_of(client, path, body | fields)
            assert folded(chunks) == whole(client, path, body | {"return_token_ids": True})["choices"]
            counts: dict[int, list[int]] = {}
            for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                counts.setdefault(choice["index"], []).append(len(choice.get("token_ids", [])))
            for own in counts.values():
                *full, _last = [count for count in own if count]
                assert all(size <= count <= size + 1 for count in full), "one more where a token has no text"
        check_error(client.post(path, json=body | {"max_streaming_response_tokens": 2}), 400, "max_streaming_response_tokens")  # fmt: skip  # noqa: E501
