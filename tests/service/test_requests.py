"""Requests through the app: what is refused, with which status, param and code; and what reaches the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.api import Request, SamplingParams, Submission, TokenPrompt
from engine.fake import VOCAB_SIZE, FakeEngine
from service.settings import Settings

from .apps import MAX_MODEL_LEN, SETTINGS, Client, check_error, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
HELLO_TOKENS = len("<user\nhi><assistant\n")  # one token each for the markers, as for the bytes
REMOVED = object()


class RecordingEngine(FakeEngine):
    """Remembers what it admits."""

    batch: tuple[Request, ...] = ()

    @asynccontextmanager
    async def submit(self, batch: Sequence[Request]) -> AsyncIterator[Submission]:
        async with super().submit(batch) as submission:
            self.batch = tuple(batch)
            yield submission

    @property
    def choices(self) -> list[SamplingParams]:
        return [params for request in self.batch for params in request.choices]


@pytest.fixture(scope="module")
def engine() -> RecordingEngine:
    return RecordingEngine(SETTINGS.engine_config())


@pytest.fixture(scope="module")
def client(engine: RecordingEngine) -> Iterator[Client]:
    with serving(engine=engine) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "org/m", "messages": HELLO, "max_tokens": 1} | fields
    return {name: value for name, value in body.items() if value is not REMOVED}


def completion(**fields: Any) -> dict[str, Any]:
    body = {"model": "org/m", "prompt": "hi", "max_tokens": 1} | fields
    return {name: value for name, value in body.items() if value is not REMOVED}


def post_each(client: Client, fields: dict[str, Any]) -> Iterator[Any]:
    yield client.post(CHAT, json=chat(**fields))
    yield client.post(COMPLETIONS, json=completion(**fields))


def alive(client: Client) -> None:
    assert client.get("/health/live").status_code == 200
    assert client.post(CHAT, json=chat()).status_code == 200


SHARED_REFUSALS = [
    ("seed", -1),
    ("seed", -(2**63)),
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", 1.5),
    ("seed", "7"),
    ("seed", True),
    ("n", 0),
    ("n", 129),
    ("n", 10**6),
    ("n", "2"),
    ("n", 1.0),
    ("temperature", 2.0001),
    ("temperature", -0.1),
    ("temperature", True),
    ("top_p", 1.0001),
    ("top_p", -0.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("top_k", -2),
    ("min_p", 1.1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 10**9),
    ("min_tokens", -1),
    ("min_tokens", 2),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 100_000),
    ("stop", ["x" * 16385]),
    ("stop", ["é" * 8000, "x" * 385]),
    ("stop", [1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "a"),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"1": 100.1}),
    ("logit_bias", {"1": -101}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("model", REMOVED),
    ("model", 5),
    ("model", None),
    ("user", 5),
]


@pytest.mark.parametrize(("name", "value"), SHARED_REFUSALS)
def test_a_value_out_of_range_is_refused_by_name(client: Client, name: str, value: object) -> None:
    for response in post_each(client, {name: value}):
        error = check_error(response, 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"].partition("[")[0] == name


SHARED_ACCEPTED: list[tuple[str, Any, str, Any]] = [
    ("seed", 0, "seed", 0),
    ("seed", 2**63 - 1, "seed", 2**63 - 1),
    ("temperature", 0, "temperature", 0.0),
    ("temperature", 2, "temperature", 2.0),
    ("temperature", 1e-9, "temperature", 0.0),
    ("temperature", None, "temperature", 1.0),
    ("top_p", 0, "top_p", 0.0),
    ("top_p", 1, "top_p", 1.0),
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 2, "frequency_penalty", 2.0),
    ("frequency_penalty", 0, "frequency_penalty", 0.0),
    ("repetition_penalty", 0.5, "repetition_penalty", 0.5),
    ("top_k", -1, "top_k", 0),
    ("top_k", 0, "top_k", 0),
    ("top_k", 5, "top_k", 5),
    ("top_k", 10**30, "top_k", VOCAB_SIZE),
    ("min_p", 0, "min_p", 0.0),
    ("min_p", 0.5, "min_p", 0.5),
    ("min_tokens", 0, "min_tokens", 0),
    ("min_tokens", 1, "min_tokens", 1),
    ("max_tokens", 1, "max_tokens", 1),
    ("ignore_eos", True, "ignore_eos", True),
    ("ignore_eos", False, "ignore_eos", False),
    ("stop_token_ids", [], "stop_token_ids", ()),
    ("stop_token_ids", [0, 7], "stop_token_ids", (0, 7)),
    ("logit_bias", {"0": -100, "7": 100}, "logit_bias", ((0, -100.0), (7, 100.0))),
    ("logit_bias", {}, "logit_bias", ()),
]


@pytest.mark.parametrize(("name", "value", "param", "expected"), SHARED_ACCEPTED)
def test_a_value_reaches_the_engine_as_it_is(
    client: Client, engine: RecordingEngine, name: str, value: object, param: str, expected: object
) -> None:
    """Falsy ones too: `or default` would invert top_p 0 and temperature 0."""
    for response in post_each(client, {name: value}):
        assert response.status_code == 200, response.text
        (params,) = engine.choices
        assert getattr(params, param) == expected


def test_null_equals_absent_for_every_optional_field(client: Client, engine: RecordingEngine) -> None:
    from service.schemas.chat import ChatCompletionRequest
    from service.schemas.completions import CompletionRequest

    for path, body, struct in ((CHAT, chat, ChatCompletionRequest), (COMPLETIONS, completion, CompletionRequest)):
        optional = dict.fromkeys(set(struct.__struct_fields__) - {"model", "messages", "prompt"})
        seen = []
        for fields in ({}, optional):
            given = body(**fields, max_tokens=None) if "max_tokens" not in fields else body(**fields)
            assert client.post(path, json=given | {"seed": 1}).status_code == 200
            seen.append(engine.batch)
        assert seen[0] == seen[1]


def test_choice_i_draws_from_seed_plus_i_for_every_prompt(client: Client, engine: RecordingEngine) -> None:
    body = completion(prompt=["a", "b"], n=3, seed=2**63 - 2)
    assert client.post(COMPLETIONS, json=body).status_code == 200
    assert [params.seed for params in engine.choices] == [2**63 - 2, 2**63 - 1, 2**63] * 2


def test_without_a_seed_each_request_gets_a_fresh_base(client: Client, engine: RecordingEngine) -> None:
    bases = set()
    for _ in range(4):
        assert client.post(CHAT, json=chat(n=2)).status_code == 200
        first, second = (params.seed for params in engine.choices)
        assert second == first + 1 and 0 <= first < 2**63
        bases.add(first)
    assert len(bases) == 4


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": REMOVED}, "messages", "missing_required_parameter"),
        ({"messages": None}, "messages", None),
        ({"messages": "x"}, "messages", None),
        ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", None),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
        ({"messages": [*HELLO, {"role": "assistant"}]}, "messages[1].content", None),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", None),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "1"}]}, "messages[0].content", None),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name", None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
            None,
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", None),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown_parameter"),
        ({"messages": [*HELLO, {"role": "system", "content": "late"}]}, "messages", None),  # says the template
        ({"messages": HELLO * 100_000}, "messages", "context_length_exceeded"),
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_completion_tokens", None),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens", None),
        ({"max_completion_tokens": 10**9, "max_tokens": None}, "max_completion_tokens", "context_length_exceeded"),
        ({"min_tokens": MAX_MODEL_LEN, "max_tokens": None}, "min_tokens", "context_length_exceeded"),
        ({"stream": True, "stream_options": {"every": 1}}, "stream_options.every", "unknown_parameter"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"structured_outputs": {}}, "structured_outputs", None),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", None),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"max_token": 4}, "max_token", "unknown_parameter"),
    ],
)
def test_a_bad_chat_is_refused_by_name(client: Client, fields: dict[str, Any], param: str, code: str | None) -> None:
    for stream in ({}, {"stream": True}):  # a stream must not have begun
        check_error(client.post(CHAT, json=chat(**stream | fields)), 400, param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [""]}, "prompt", None),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt", None),
        ({"prompt": None}, "prompt", None),
        ({"prompt": REMOVED}, "prompt", "missing_required_parameter"),
        ({"prompt": ["a", 1]}, "prompt", None),
        ({"prompt": ["a", [1]]}, "prompt", None),
        ({"prompt": [1, [1]]}, "prompt", None),
        ({"prompt": [VOCAB_SIZE]}, "prompt", None),
        ({"prompt": [[1], [-1]]}, "prompt", None),
        ({"prompt": [1.5]}, "prompt[0]", None),
        ({"prompt": ["a"] * 10_000}, "prompt", None),
        ({"prompt": ["a"] * 10, "n": 100}, "n", None),
        ({"max_completion_tokens": 1}, "max_completion_tokens", "unknown_parameter"),
        ({"best_of": 0}, "best_of", None),
        ({"best_of": 1, "n": 2}, "best_of", None),
        ({"best_of": 2, "stream": True}, "best_of", None),
        ({"best_of": 2, "fan_out": {"details": True}}, "best_of", None),
        ({"best_of": 10**6}, "best_of", None),
        ({"best_of": 100, "prompt": ["a"] * 10}, "best_of", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": -1, "echo": True}, "max_tokens", None),
        ({"prompt_logprobs": 21}, "prompt_logprobs", None),
        ({"prompt_logprobs": -1}, "prompt_logprobs", None),
        ({"prompt_logprobs": True}, "prompt_logprobs", None),
        ({"suffix": "x", "echo": True}, "suffix", None),
        ({"suffix": "x", "truncate_prompt_tokens": 3}, "suffix", None),
        ({"echo": True, "logprobs": 5, "prompt": ["a" * 200] * 5, "n": 100}, "echo", None),
        ({"messages": HELLO}, "messages", "unknown_parameter"),
    ],
)
def test_a_bad_completion_is_refused_by_name(
    client: Client, fields: dict[str, Any], param: str, code: str | None
) -> None:
    check_error(client.post(COMPLETIONS, json=completion(**fields)), 400, param, code)


NEUTRAL = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "logprobs": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "service_tier": "auto",
    "verbosity": "medium",
    "reasoning_effort": "none",
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "metadata": {"a": "b"},
    "store": True,
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
}


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_a_field_that_asks_for_nothing_is_accepted(client: Client, name: str, value: object) -> None:
    assert client.post(CHAT, json=chat(**{name: value})).status_code == 200


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"echo": False}, {"suffix": ""}])
def test_a_completion_field_that_asks_for_nothing_is_accepted(client: Client, fields: dict[str, Any]) -> None:
    assert client.post(COMPLETIONS, json=completion(**fields)).status_code == 200


def test_an_unknown_field_names_the_nearest_one(client: Client) -> None:
    error = check_error(client.post(CHAT, json=chat(temprature=1)), 400, "temprature", "unknown_parameter")
    assert "`temperature`" in error["message"]
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "txt": "x"}]}])
    error = check_error(client.post(CHAT, json=body), 400, "messages[0].content[0].txt")
    assert "`text`" in error["message"]


def test_an_unknown_field_that_is_near_none_gets_no_false_hint(client: Client) -> None:
    error = check_error(client.post(CHAT, json=chat(guided_json={})), 400, "guided_json", "unknown_parameter")
    assert error["message"] == "Unknown parameter: `guided_json`."


def test_the_model_must_be_the_served_one_exactly(client: Client) -> None:
    for name in ("m", "org/M", "../../etc/passwd", "file:///x", "org/m\u0000", ""):
        for response in post_each(client, {"model": name}):
            check_error(response, 404, "model", "model_not_found")


def test_text_parts_make_the_prompt_of_the_joined_text(client: Client, engine: RecordingEngine) -> None:
    parts = [{"type": "text", "text": "capital of"}, {"type": "text", "text": "France?"}]
    prompts = []
    for content in (parts, "capital of\nFrance?"):
        for role in ("system", "developer", "user", "assistant"):
            assert client.post(CHAT, json=chat(messages=[{"role": role, "content": content}])).status_code == 200
            prompts.append(engine.batch[0].prompt)
    assert prompts[:4] == prompts[4:]
    assert prompts[0] == prompts[1]  # developer is system


def test_an_answer_is_taken_back_with_all_its_fields(client: Client, engine: RecordingEngine) -> None:
    message = client.post(CHAT, json=chat(seed=1)).json()["choices"][0]["message"]
    from_sdk = {"annotations": [], "audio": None, "tool_calls": None, "function_call": None, "refusal": None}
    for answer in (message, message | from_sdk, message | {"tool_calls": [], "reasoning_content": "so"}):
        assert client.post(CHAT, json=chat(messages=[*HELLO, answer, *HELLO])).status_code == 200
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    assert client.post(CHAT, json=chat(messages=[*HELLO, refused])).status_code == 200
    prompt = engine.batch[0].prompt
    assert isinstance(prompt, TokenPrompt) and b"assistant\nno" in bytes(t for t in prompt.token_ids if t < 256)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("a<|eos|>", [(97, 256)]),
    ],
)
def test_all_forms_of_a_prompt_become_one_batch(
    client: Client, engine: RecordingEngine, prompt: object, expected: list[tuple[int, ...]]
) -> None:
    response = client.post(COMPLETIONS, json=completion(prompt=prompt, n=2))
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(2 * len(expected)))
    assert [request.prompt for request in engine.batch] == [TokenPrompt(ids) for ids in expected]


CONTEXT = [
    # tokens in the prompt, max_tokens, status, blamed
    (MAX_MODEL_LEN - 2, None, 200, None),
    (MAX_MODEL_LEN - 2, 1, 200, None),
    (MAX_MODEL_LEN - 2, 2, 200, None),
    (MAX_MODEL_LEN - 2, 3, 400, "max_tokens"),
    (MAX_MODEL_LEN - 1, None, 200, None),
    (MAX_MODEL_LEN - 1, 1, 200, None),
    (MAX_MODEL_LEN - 1, 2, 400, "max_tokens"),
    (MAX_MODEL_LEN - 1, 10**9, 400, "max_tokens"),
    (MAX_MODEL_LEN, None, 400, "prompt"),
    (MAX_MODEL_LEN, 1, 400, "prompt"),
    (MAX_MODEL_LEN + 1, None, 400, "prompt"),
    (MAX_MODEL_LEN + 1, 10**9, 400, "prompt"),
]


@pytest.mark.parametrize(("num_tokens", "max_tokens", "status", "blamed"), CONTEXT)
def test_the_edge_of_the_context(
    client: Client, num_tokens: int, max_tokens: int | None, status: int, blamed: str | None
) -> None:
    """A prompt of exactly the context's length once tripped an assertion in a peer's engine."""
    content = "x" * (num_tokens - HELLO_TOKENS + len("hi"))
    bodies = [(CHAT, "messages", chat(messages=[{"role": "user", "content": content}], n=2, max_tokens=max_tokens))]
    if max_tokens is not None:  # a completion would get 16
        bodies += [
            (COMPLETIONS, "prompt", completion(prompt=prompt, n=2, max_tokens=max_tokens))
            for prompt in ("x" * num_tokens, [120] * num_tokens)
        ]
    for path, prompt_param, body in bodies:
        response = client.post(path, json=body)
        if status == 200:
            usage = response.json()["usage"]
            assert usage["prompt_tokens"] == num_tokens
            assert usage["prompt_tokens"] + usage["completion_tokens"] // 2 <= MAX_MODEL_LEN
            assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"length"}
        else:
            param = prompt_param if blamed == "prompt" else blamed
            error = check_error(response, 400, param, "context_length_exceeded")
            assert str(num_tokens) in error["message"] and str(MAX_MODEL_LEN) in error["message"]


def test_a_completion_without_max_tokens_gets_16(client: Client, engine: RecordingEngine) -> None:
    assert client.post(COMPLETIONS, json=completion(max_tokens=REMOVED)).status_code == 200
    assert engine.choices[0].max_tokens == 16


def test_max_completion_tokens_is_max_tokens(client: Client, engine: RecordingEngine) -> None:
    for fields in ({"max_completion_tokens": 2, "max_tokens": REMOVED}, {"max_completion_tokens": 2, "max_tokens": 2}):
        assert client.post(CHAT, json=chat(**fields)).status_code == 200
        assert engine.choices[0].max_tokens == 2


def raw(client: Client, body: bytes | str, content_type: str | None = "application/json", **headers: str) -> Any:
    sent = headers | ({} if content_type is None else {"content-type": content_type})
    return client.post(CHAT, content=body, headers=sent)


LONE_SURROGATES = [
    chat(messages=[{"role": "user", "content": "SURROGATE"}]),
    chat(messages=[{"role": "user", "content": "x", "name": "SURROGATE"}]),
    chat(stop="SURROGATE"),
    chat(model="SURROGATE"),
    chat(prediction=[{"SURROGATE": 1}]),
    chat(SURROGATE=1),
    chat(stream=True, metadata={"a": "SURROGATE"}),
]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"123",
        b'"x"',
        json.dumps(chat())[:-1] + ",}",
        json.dumps(chat()) + "x",
        b"\xef\xbb\xbf" + json.dumps(chat()).encode(),
        json.dumps(chat()).encode("utf-16"),
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\xbd"}',
        '{"model": "模型"}'.encode("gbk"),
        b"\x1f\x8b\x08\x00",
        b"[" * 100_000,
        b'{"prediction": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"seed": ' + b"9" * 5000 + b"}",
        *(json.dumps(body).replace("SURROGATE", "\\ud83d") for body in LONE_SURROGATES),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_malformed_body_is_400(client: Client, body: bytes | str) -> None:
    error = check_error(raw(client, body), 400)
    if not (isinstance(body, bytes) and b"seed" in body):
        assert error["param"] is None
    alive(client)


def test_paired_surrogates_are_text(client: Client) -> None:
    body = json.dumps(chat()).replace("hi", "\\ud83d\\ude00")
    assert raw(client, body).status_code == 200


def test_the_last_of_duplicate_keys_counts(client: Client, engine: RecordingEngine) -> None:
    assert raw(client, json.dumps(chat())[:-1] + ',"seed":1,"seed":2}').status_code == 200
    assert engine.choices[0].seed == 2


def test_media_types(client: Client) -> None:
    body = json.dumps(chat())
    for content_type in ("application/json", "application/json; charset=utf-8", "Application/JSON", None):
        assert raw(client, body, content_type).status_code == 200
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", "x"):
        check_error(raw(client, body, content_type), 415)
    check_error(raw(client, b"\x1f\x8b", **{"content-encoding": "gzip"}), 415)


def test_a_body_beyond_the_limit_is_413_chunked_or_not() -> None:
    settings = Settings(engine="fake", served_model_name="org/m", max_body_bytes=1000)
    with serving(settings) as client:
        body = json.dumps(chat(messages=[{"role": "user", "content": "x" * 1000}])).encode()
        for content in (body, (body[at : at + 100] for at in range(0, len(body), 100))):
            response = client.post(CHAT, content=content, headers={"content-type": "application/json"})
            check_error(response, 413)
            assert response.headers["connection"] == "close"
        exactly = json.dumps(chat(user="")).encode()
        exactly = json.dumps(chat(user="u" * (1000 - len(exactly)))).encode()
        assert len(exactly) == 1000 and raw(client, exactly).status_code == 200


def test_a_large_body_is_decoded_off_the_loop_with_the_same_errors(client: Client) -> None:
    body = chat(messages=[{"role": "user", "content": "x" * 100_000}])
    check_error(client.post(CHAT, json=body), 400, "messages", "context_length_exceeded")
    check_error(client.post(CHAT, json=body | {"n": 0}), 400, "n")


def test_choices_beyond_what_could_ever_be_admitted_are_400_not_429() -> None:
    """A 429 would have the client try again for ever."""
    settings = Settings(engine="fake", served_model_name="org/m", max_num_seqs=4, max_queued_seqs=0)
    with serving(settings) as client:
        assert client.post(CHAT, json=chat(n=4)).status_code == 200
        check_error(client.post(CHAT, json=chat(n=5)), 400, "n")
        check_error(client.post(COMPLETIONS, json=completion(prompt=["a"] * 5)), 400, "prompt")
        check_error(client.post(COMPLETIONS, json=completion(prompt=["a", "b"], n=3)), 400, "n")


def test_the_largest_n_is_a_setting() -> None:
    with serving(Settings(engine="fake", served_model_name="org/m", max_n=2)) as client:
        assert client.post(CHAT, json=chat(n=2)).status_code == 200
        check_error(client.post(CHAT, json=chat(n=3)), 400, "n")


@pytest.mark.parametrize("n", [1, 128])
def test_n_up_to_the_limit(client: Client, n: int) -> None:
    assert len(client.post(CHAT, json=chat(n=n)).json()["choices"]) == n
