"""C20 to C26: what is refused, how, and that the server is as well afterwards as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.answers import ask, check_error
from tests.e2e.server import Server
from tests.e2e.wire import Wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def body_for(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    return {"model": server.model, "max_tokens": 2, **base, **fields}


@pytest.fixture
def well(one_tiny: Server) -> Iterator[Server]:
    """Whatever was sent, a normal request works right after."""
    yield one_tiny
    assert one_tiny.get("/health/live").status_code == 200
    ask(one_tiny, body_for(one_tiny, COMPLETIONS))


@pytest.mark.parametrize("prompt", [[], [[]], [""], "", [1, "a"], [[1], "a"], [1.5], {}, 7, [["a"]]])
def test_c20_a_prompt_of_nothing_or_of_the_wrong_kind(well: Server, prompt: Any) -> None:
    check_error(well.post(COMPLETIONS, body_for(well, COMPLETIONS, prompt=prompt)), 400)


@pytest.mark.parametrize(
    "messages",
    [[], "x", [{}], [{"content": "hi"}], [{"role": "user"}], [{"role": "alien", "content": "x"}], None, [None]],
)
def test_c20_messages_of_nothing_or_of_the_wrong_kind(well: Server, messages: Any) -> None:
    error = check_error(well.post(CHAT, body_for(well, CHAT, messages=messages)), 400)
    assert error is None or str(error["param"]).startswith("messages")


def test_c20_an_empty_user_text_is_a_text(well: Server) -> None:
    ask(well, body_for(well, CHAT, messages=[{"role": "user", "content": ""}]))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("max_tokens", "status"), [(1, 200), (2, 400), (10**9, 400), (2**31, 400)])
def test_c21_the_edge_of_the_context(cramped: Server, path: str, max_tokens: int, status: int) -> None:
    """The pool holds 256 tokens, which lowers the model's own limit; the prompt leaves room for one."""
    room = 256 - 1
    if path == CHAT:
        empty = ask(cramped, body_for(cramped, CHAT, max_tokens=1)).usage
        assert empty is not None
        content = "h" * (room - empty.prompt_tokens + len(HELLO[0]["content"]))
        body = body_for(cramped, CHAT, messages=[{"role": "user", "content": content}])
    else:
        body = body_for(cramped, COMPLETIONS, prompt=[100] * room)
    body |= {"max_tokens": max_tokens, "n": 2, "ignore_eos": True}
    if status == 200:
        folded = ask(cramped, body)
        assert folded.usage is not None and folded.usage.prompt_tokens == room
        assert [choice.finish_reason for choice in folded.choices] == ["length"] * 2
    else:
        check_error(cramped.post(path, body), 400, "max_tokens", "context_length_exceeded")


def test_c21_chat_without_max_tokens_may_run_to_the_contexts_end(cramped: Server) -> None:
    body = body_for(cramped, CHAT, messages=[{"role": "user", "content": "h" * 200}], ignore_eos=True)
    del body["max_tokens"]
    usage = ask(cramped, body).usage
    assert usage is not None and usage.total_tokens == 256


def test_c21_a_prompt_as_long_as_the_context_is_refused(cramped: Server) -> None:
    for length in (256, 257):
        body = body_for(cramped, COMPLETIONS, prompt=[100] * length, max_tokens=1)
        check_error(cramped.post(COMPLETIONS, body), 400, code="context_length_exceeded")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 2, 2.0], [2.0001, -0.1]),
        ("top_p", [0, 0.0, 1], [1.0001, -0.1]),
        ("presence_penalty", [-2, 2], [2.1, -2.1]),
        ("frequency_penalty", [-2, 2], [2.1, -2.1]),
        ("max_tokens", [1], [0, -1]),
        ("n", [1, 60], [0, 129]),
        ("min_p", [0, 1], [-0.1, 1.1]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_c22_closed_ranges(well: Server, path: str, name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert well.post(path, body_for(well, path, **{name: value})).status_code == 200, value
    for value in bad:
        check_error(well.post(path, body_for(well, path, **{name: value})), 400, name)


def test_c22_top_p_zero_is_greedy_and_not_the_default(well: Server) -> None:
    hot = body_for(well, COMPLETIONS, temperature=2, top_p=0, max_tokens=12)
    greedy = body_for(well, COMPLETIONS, temperature=0, max_tokens=12)
    assert ask(well, hot).texts == ask(well, hot).texts == ask(well, greedy).texts


MALFORMED = {
    "empty": b"",
    "open": b"{",
    "array": b"[]",
    "null": b"null",
    "number": b"123",
    "trailing comma": b'{"model":"m",}',
    "invalid utf-8": b'{"model":"\xff"}',
    "gbk": '{"model":"界"}'.encode("gbk"),
    "bom": b"\xef\xbb\xbf{}",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
    "deep": b"[" * 100_000,
    "lone surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
    "lone surrogate in a key": b'{"\\ud83d":1}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_c23_a_malformed_body_is_a_400_in_the_envelope(well: Server, path: str, data: bytes) -> None:
    for extra in (b"", b" "):
        with Wire(well) as wire:
            wire.post(path, data + extra)
            check_error(wire.read(), 400)


@pytest.mark.parametrize(
    ("media_type", "status"),
    [("application/json;charset=utf-8", 200), ("text/plain", 415), ("application/xml", 415), (None, 200)],
)
def test_c23_media_types(well: Server, media_type: str | None, status: int) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    response = well.http.post(COMPLETIONS, content=json.dumps(body_for(well, COMPLETIONS)), headers=headers)
    assert response.status_code == status
    if status != 200:
        check_error(response, status)


def test_c24_what_is_too_large_is_refused_and_held_nowhere(well: Server) -> None:
    before = well.resident_bytes()
    text = "x" * (64 * 2**20)
    response = well.post(COMPLETIONS, body_for(well, COMPLETIONS, prompt=text))
    check_error(response, 413)
    assert well.resident_bytes() - before < 32 * 2**20
    for fields in ({"n": 10**6}, {"max_tokens": 2**31}, {"best_of": 10**6}, {"prompt": ["a"] * 10_000}):
        check_error(well.post(COMPLETIONS, body_for(well, COMPLETIONS, **fields)), 400)


@pytest.mark.parametrize(
    ("roles", "reason"),
    [(["system", "user"], "System role not supported"), (["user", "user"], "Conversation roles must alternate")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_c25_a_template_that_refuses_says_why_and_nothing_else(
    well: Server, roles: list[str], reason: str, stream: bool
) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    response = well.post(CHAT, body_for(well, CHAT, messages=messages, stream=stream))
    error = check_error(response, 400, "messages")
    assert reason in response.text
    assert "{%" not in response.text and "jinja" not in response.text.lower(), error


def test_c26_text_parts_are_the_text_they_make(well: Server) -> None:
    parts = [{"type": "text", "text": "capital of"}, {"type": "text", "text": "France?"}]
    as_parts = ask(well, body_for(well, CHAT, messages=[{"role": "user", "content": parts}], temperature=0))
    as_text = ask(
        well, body_for(well, CHAT, messages=[{"role": "user", "content": "capital of\nFrance?"}], temperature=0)
    )
    assert as_parts.texts == as_text.texts
    assert as_parts.usage is not None and as_text.usage is not None
    assert as_parts.usage.prompt_tokens == as_text.usage.prompt_tokens
    for part in ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}, {"type": "what"}, {}):
        messages = [{"role": "user", "content": [*parts, part]}]
        check_error(well.post(CHAT, body_for(well, CHAT, messages=messages)), 400)
