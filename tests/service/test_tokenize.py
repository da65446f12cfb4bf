"""/tokenize, /detokenize and rendered chats say what generation would use, and refuse what they do not serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from engine.fake import FakeEngine
from service.tokenizer import ByteTokenizer
from tests.service.apps import MAX_MODEL_LEN, SETTINGS, Client, check_error, serving
from tests.service.tiny_tokenizers import TEXTS, wrapped

CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SAID = {"role": "assistant", "content": "so far"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(replace(SETTINGS, tool_parser="hermes", max_body_bytes=2**20)) as client:
        yield client


def tokens_of(client: Client, **body: Any) -> list[int]:
    response = client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == MAX_MODEL_LEN
    tokens: list[int] = answer["tokens"]
    return tokens


def test_a_text_becomes_its_tokens_and_they_the_text_again(client: Client) -> None:
    for text in ("", " ", *TEXTS, "a<|eos|>b"):
        tokens = tokens_of(client, prompt=text)
        assert tokens == ByteTokenizer().encode(text, add_special_tokens=True)
        assert client.post("/detokenize", json={"tokens": tokens, "model": "org/m"}).json() == {"prompt": text}


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_a_models_own_tokenizer_is_asked(family: str) -> None:
    ours, theirs = wrapped(family)
    with serving() as client:
        client.app.state.services.tokenizer = ours
        for text in TEXTS:
            tokens = tokens_of(client, prompt=text)
            assert tokens == theirs.encode(text)
            answer = client.post("/detokenize", json={"tokens": tokens}).json()
            assert answer["prompt"] == theirs.decode(tokens, clean_up_tokenization_spaces=False)
        rendered = client.post(
            "/v1/chat/completions/render", json={"model": "org/m", "messages": [CHAT["messages"][1]]}
        )
        expected = theirs.apply_chat_template([CHAT["messages"][1]], add_generation_prompt=True, return_dict=False)
        assert rendered.json()["token_ids"] == expected
        assert rendered.json()["prompt"] == theirs.decode(expected, clean_up_tokenization_spaces=False)


def test_token_strs_are_there_when_asked_for(client: Client) -> None:
    response = client.post("/tokenize", json={"prompt": "hé<|eos|>", "return_token_strs": True})
    assert response.json()["token_strs"] == ["h", "\ufffd", "\ufffd", "<|eos|>"]
    assert client.post("/tokenize", json={"prompt": "x"}).json()["token_strs"] is None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [*CHAT["messages"], SAID], "continue_final_message": True},
    ],
)
def test_a_chat_gives_the_tokens_that_generation_uses(client: Client, more: dict[str, Any]) -> None:
    body = CHAT | more
    named = body | {"model": "org/m"}
    used = client.post("/v1/chat/completions", json=named | {"max_tokens": 1, "return_token_ids": True}).json()
    rendered = client.post("/v1/chat/completions/render", json=named).json()
    assert rendered["token_ids"] == used["prompt_token_ids"] == tokens_of(client, **body)
    assert rendered["count"] == used["usage"]["prompt_tokens"] and rendered["max_model_len"] == MAX_MODEL_LEN
    assert client.post("/detokenize", json={"tokens": rendered["token_ids"]}).json()["prompt"] == rendered["prompt"]


def test_rendering_generates_nothing_and_refuses_what_generation_would(client: Client) -> None:
    made = client.app.state.services.engine.health().generation_tokens
    path, body = "/v1/chat/completions/render", CHAT | {"model": "org/m"}
    assert client.post(path, json=body | {"n": 4, "stream": True}).json()["count"]
    assert client.app.state.services.engine.health().generation_tokens == made
    check_error(client.post(path, json=body | {"n": 0}), 400, "n")
    check_error(client.post(path, json=body | {"max_tokens": MAX_MODEL_LEN}), 400, "max_tokens")
    check_error(client.post(path, json=body | {"model": "other"}), 404, "model")
    check_error(client.post(path, json=body | {"messages": []}), 400, "messages")
    check_error(client.post(path, json=body | {"audio": {}}), 400, "audio")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "messages": CHAT["messages"]}, "messages"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"messages": []}, "messages"),
        (CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        (CHAT | {"chat_template": "x"}, "chat_template"),
        (CHAT | {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        (CHAT | {"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "x"}] * (MAX_MODEL_LEN + 1)}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}, "messages"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(client: Client, body: dict[str, Any], param: str) -> None:
    check_error(client.post("/tokenize", json=body), 400, param)


@pytest.mark.parametrize("tokens", [[320], [-1], [2**40], ["x"], [1.5], "x", None, [True]])
def test_unknown_ids_are_refused_by_name(client: Client, tokens: Any) -> None:
    error = check_error(client.post("/detokenize", json={"tokens": tokens}), 400)
    assert error["param"].startswith("tokens")


def test_ids_that_stand_for_nothing_are_no_text(client: Client) -> None:
    """As in the padded vocabularies of real models: generation takes them too."""
    assert client.post("/detokenize", json={"tokens": [104, 319, 105]}).json() == {"prompt": "hi"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_another_model_is_not_found(client: Client) -> None:
    check_error(client.post("/tokenize", json={"prompt": "x", "model": "m2"}), 404, "model", "model_not_found")
    check_error(client.post("/detokenize", json={"tokens": [1], "model": "m2"}), 404, "model", "model_not_found")


def test_a_prompt_longer_than_the_context_is_counted(client: Client) -> None:
    """That is what many ask this for. Half a character pair is no text, and the limit of bodies holds."""
    assert len(tokens_of(client, prompt="x" * 500_000)) == 500_000
    answer = client.post("/detokenize", json={"tokens": [120] * 200_000}).json()
    assert answer["prompt"] == "x" * 200_000
    check_error(client.post("/tokenize", content=b'{"prompt": "\\ud800"}'), 400)
    check_error(client.post("/tokenize", json={"prompt": "x" * 2**20}), 413)
    check_error(client.post("/tokenize", content=b"x=1", headers={"content-type": "text/plain"}), 415)


def test_keys_and_their_limits_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 one requests_per_minute=2\nk2 two max_concurrent=0\n")
    with serving(replace(SETTINGS, api_keys_file=keys)) as client:
        check_error(client.post("/tokenize", json={"prompt": "x"}), 401)
        key = {"Authorization": "Bearer k1"}
        assert client.post("/tokenize", json={"prompt": "x"}, headers=key).status_code == 200
        assert client.post("/detokenize", json={"tokens": [1]}, headers=key).status_code == 200
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render"):
            response = client.post(path, json={"prompt": "x"}, headers=key)
            check_error(response, 429, code="rate_limit_exceeded")
        check_error(client.post("/tokenize", json={"prompt": "x"}, headers={"Authorization": "Bearer k2"}), 429)


def test_before_the_model_is_loaded_there_is_no_tokenizer() -> None:
    engine = FakeEngine(SETTINGS.engine_config(), load=anyio.sleep_forever)
    with serving(engine=engine, wait=False) as client:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/tokenize", CHAT), ("/detokenize", {"tokens": [1]})):
            response = client.post(path, json=body)
            check_error(response, 503)
            assert int(response.headers["retry-after"]) >= 1


def test_time_that_is_over_is_told(client: Client) -> None:
    """The pool of tokenizer threads is busy: nobody waits for it beyond the own deadline."""
    limiter = client.app.state.services.tokenizer_limiter
    places = int(limiter.total_tokens)
    owners = [object() for _ in range(places)]

    async def take() -> None:
        for owner in owners:
            await limiter.acquire_on_behalf_of(owner)

    async def give_back() -> None:
        for owner in owners:
            limiter.release_on_behalf_of(owner)

    client.blocking_portal.call(take)
    try:
        response = client.post("/tokenize", json={"prompt": "x"}, headers={"X-Request-Timeout": "0.05"})
        check_error(response, 503, code="deadline_exceeded")
    finally:
        client.blocking_portal.call(give_back)
    assert tokens_of(client, prompt="x") == [120]


def test_the_models_list_tells_the_context(client: Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
