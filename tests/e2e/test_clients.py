"""What strict clients need (C38), and what every error looks like, whoever asks and whatever went wrong (C39)."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.e2e.answers import ask, ask_streamed, check_error, fold, path_of
from tests.e2e.fixtures import MODEL, SLOTS
from tests.e2e.scripts import SCRIPT_SEED, SCRIPTS
from tests.e2e.server import Server
from tests.e2e.wire import Wire

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 6}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "seed": 1, "max_tokens": 6}


def _events(server: Server, body: dict[str, Any]) -> list[str]:
    with Wire(server) as wire:
        wire.post(path_of(body), body | {"stream": True})
        assert wire.read_head().status == 200
        return wire.events()


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("usage", [False, True])
def test_c38_every_chunk_of_a_chat_is_what_strict_clients_parse(fake: Server, n: int, usage: bool) -> None:
    """`fold` holds each chunk against the schema of those clients; the official client's own types agree."""
    events = _events(fake, CHAT | {"n": n, "stream_options": {"include_usage": usage} if usage else None})
    fold(events, n, usage=usage)
    for event in events[:-1]:
        chunk = ChatCompletionChunk.model_validate_json(event, strict=True)
        assert isinstance(chunk.created, int)
        sent = json.loads(event)
        for choice in sent["choices"]:
            assert "role" not in choice["delta"] or choice["delta"]["role"] == "assistant"
            assert set(choice["delta"]) <= {"role", "content"}
            assert choice["finish_reason"] in (None, "stop", "length")
        assert ("usage" in sent) == usage


@pytest.mark.parametrize("n", [1, 2, 8])
def test_c38_every_chunk_of_a_completion_is_what_strict_clients_parse(fake: Server, n: int) -> None:
    events = _events(fake, TEXT | {"n": n})
    fold(events, n)
    for event in events[:-1]:
        sent = json.loads(event)
        assert sent["object"] == "text_completion"
        # the official type knows no chunk that has not ended
        sent["choices"] = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in sent["choices"]]
        Completion.model_validate(sent, strict=True)


def test_c38_whole_answers_are_what_strict_clients_parse(fake: Server) -> None:
    """`ask` holds them against the schema; the official client's own types agree."""
    ask(fake, CHAT | {"n": 3})
    ask(fake, TEXT | {"n": 3})
    ChatCompletion.model_validate_json(fake.post("/v1/chat/completions", CHAT | {"n": 3}).content, strict=True)
    Completion.model_validate_json(fake.post("/v1/completions", TEXT | {"n": 3}).content, strict=True)


def test_c38_choice_without_a_character_has_its_role_and_its_end(scripted: Server) -> None:
    """A model that ends at once: content "" rather than null, and still a first chunk with the role."""
    empty = CHAT | {"seed": SCRIPT_SEED + len(SCRIPTS) - 1}
    assert ask_streamed(scripted, empty) == ask(scripted, empty)
    assert ask(scripted, empty).texts == [""]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "unknown_url"),
        ("POST", "/v1/chat/completion", 404, "unknown_url"),
        ("GET", "/", None, None),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/v1/models/org/nobody", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "model_not_found"),
        ("GET", "/%ff%fe", 404, "unknown_url"),
    ],
)
def test_c39_routes_and_methods_that_are_none(
    fake: Server, method: str, path: str, status: int | None, code: str | None
) -> None:
    response = fake.http.request(method, path)
    if status is None:
        assert response.status_code < 500
        return
    check_error(response, status, code=code)


@pytest.mark.parametrize("base", [CHAT, TEXT], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("wrong", "status", "param", "code"),
    [
        ({"model": "nobody"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", None),
        ({"model": "../../etc/passwd"}, 404, "model", "model_not_found"),
        ({"n": "2"}, 400, "n", None),
        ({"n": 129}, 400, "n", None),
        ({"top_p": 1.01}, 400, "top_p", None),
        ({"stop": ["x"] * 17}, 400, "stop", None),
        ({"max_tokens": 2**21}, 400, "max_tokens", "context_length_exceeded"),
        ({"temprature": 1}, 400, "temprature", "unknown_parameter"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", None),
        ({"stream_options": {"include_usages": True}, "stream": True}, 400, "stream_options.include_usages", None),
    ],
)
def test_c39_fields_that_are_wrong(
    one_fake: Server, base: dict[str, Any], wrong: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    error = check_error(one_fake.post(path_of(base), base | wrong), status, param, code)
    assert error["type"] == "invalid_request_error"


def test_c39_bodies_and_media_types_that_are_wrong(fake: Server) -> None:
    for content, media_type, status in (
        (b"{", "application/json", 400),
        (b"{}", "text/html", 415),
        (b'{"a": ' + b"[" * 100_000, "application/json", 400),
        (b" " * (8 * 2**20 + 1), "application/json", 413),
    ):
        with Wire(fake) as wire:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {media_type}\r\n"
            wire.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            check_error(wire.read(), status)


def test_c39_official_client_raises_the_right_class_with_its_fields(one_fake: Server) -> None:
    """For a refusal of each kind; the bodies are the SDK's to unwrap."""
    with openai.OpenAI(base_url=f"{one_fake.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[], n=1)
        assert (bad.value.param, bad.value.code) == ("messages", "empty_array")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="m", prompt="x")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.APIStatusError) as large:
            client.completions.create(model=MODEL, prompt="x" * 9 * 2**20)
        assert large.value.status_code == 413
        with Wire(one_fake) as busy, pytest.raises(openai.RateLimitError) as full:
            busy.post("/v1/completions", TEXT | {"n": 64, "max_tokens": 100_000})
            one_fake.wait_metric("chorus_sequences_running", lambda value: value == SLOTS)
            client.completions.create(model=MODEL, prompt="x", n=8)
        assert full.value.code == "rate_limit_exceeded"
    one_fake.wait_idle()


def test_c11_official_client_reads_a_stream_with_comments(one_fake: Server) -> None:
    """A stream that waits for its turn gets comments until then."""
    with openai.OpenAI(base_url=f"{one_fake.url}/v1", api_key="none", max_retries=0) as client, Wire(one_fake) as busy:
        busy.post("/v1/completions", TEXT | {"n": SLOTS, "max_tokens": 500_000})
        one_fake.wait_metric("chorus_sequences_running", lambda value: value == SLOTS)
        with Wire(one_fake) as waiting:
            waiting.post("/v1/completions", TEXT | {"stream": True})
            assert waiting.read_head().status == 200
            assert [waiting.next_event() for _ in range(3)] == [": ping"] * 3
        with client.completions.create(model=MODEL, prompt="hi", seed=1, max_tokens=6, stream=True) as stream:
            busy.close()
            text = "".join(chunk.choices[0].text for chunk in stream)
    assert [text] == ask(one_fake, TEXT).texts
    one_fake.wait_idle()
