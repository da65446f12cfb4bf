"""Steering, cancelling and bounding requests over real sockets, by the official client and by plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.answers import check_error
from tests.e2e.fixtures import ENDLESS, MODEL, SLOTS, TINY_ENDLESS
from tests.e2e.server import Server
from tests.e2e.wire import Wire

MADE = "chorus_generation_tokens_total"
LATE_STEPS = 12
"""The word goes from the engine's thread to the loop and back, and counts from the next step on: one step where a step
takes longer than that trip (tests/engine/test_thread.py has it exactly). This model's takes a millisecond, and the
interpreter alone may keep the loop's thread waiting for five (sys.getswitchinterval).
"""

both_modes = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


@pytest.fixture
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    tiny.wait_idle()


def test_official_client_steers_a_fan_out_by_extra_body(tiny: Server, client: openai.OpenAI) -> None:
    made = tiny.metric(MADE)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "count"}],
        n=3,
        seed=1,
        max_tokens=40,
        extra_body={"fan_out": {"stop_after": 1, "details": True}, "ignore_eos": True},
    )
    # all have the same length: they end in the same step, and so by themselves
    assert [choice.model_extra["end_reason"] for choice in answer.choices] == ["length"] * 3  # type: ignore[index]
    details = [choice.model_extra["details"] for choice in answer.choices]  # type: ignore[index]
    assert [one["seed"] for one in details] == [1, 2, 3]
    assert all(one["mean_logprob"] < 0 and one["total_ms"] >= one["first_token_ms"] > 0 for one in details)
    assert tiny.metric(MADE) - made == 3 * 40


@both_modes
def test_those_not_done_are_cancelled_within_a_step_of_a_real_engine(tiny: Server, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "a b c", "max_tokens": TINY_ENDLESS, "temperature": 1}
    body |= {"stop_token_ids": list(range(0, 256, 64))}  # each choice draws one of them sooner or later
    alone = [tiny.post("/v1/completions", body | {"seed": seed}).json() for seed in range(SLOTS)]
    lengths = [answer["usage"]["completion_tokens"] for answer in alone]
    made = tiny.metric(MADE)
    fan_out = {"n": 2 * SLOTS, "seed": 0, "fan_out": {"stop_after": 1}, "stream": stream}
    response = tiny.post("/v1/completions", body | fan_out)
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = response.json()["choices"]
    tiny.wait_idle()
    ends = {choice["index"]: choice["end_reason"] for choice in choices if choice["finish_reason"]}
    assert all(ends[index] == "cancelled" for index in range(SLOTS, 2 * SLOTS))
    assert max(lengths) > min(lengths) + LATE_STEPS
    for index, length in enumerate(lengths):
        if length == min(lengths) or length > min(lengths) + LATE_STEPS:
            assert ends[index] == ("stop" if length == min(lengths) else "cancelled")
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert alone[index]["choices"][0]["text"].startswith(text)
    assert tiny.metric(MADE) - made <= SLOTS * (min(lengths) + LATE_STEPS)


@both_modes
def test_request_cancelled_from_outside_answers_with_what_was_made(fake: Server, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hi", "n": 2, "max_tokens": ENDLESS, "stream": stream, "request_id": "mine"}
    with Wire(fake) as wire:
        wire.post("/v1/completions", body)
        fake.wait_metric("chorus_sequences_running", lambda value: value == 2)
        (card,) = fake.get("/v1/requests").json()["data"]
        assert card["request_id"] == "mine" and card["stream"] is stream
        done = fake.http.delete(f"/v1/requests/{card['id']}/choices/1")
        assert (done.status_code, done.json()) == (200, {"id": card["id"], "cancelled": True})
        fake.wait_metric("chorus_sequences_running", lambda value: value == 1)
        assert fake.http.delete(f"/v1/requests/{card['id']}").status_code == 200
        head = wire.read_head()
        assert head.headers["x-chorus-response-id"] == card["id"] and head.headers["x-request-id"] == "mine"
        if stream:
            events = wire.events()
            assert events[-1] == "[DONE]"
            ends = [c for event in events[:-1] for c in json.loads(event)["choices"] if c["finish_reason"]]
        else:
            ends = json.loads(b"".join(wire.pieces()))["choices"]
        assert {(end["index"], end["end_reason"], end["finish_reason"]) for end in ends} == {
            (0, "cancelled", "length"),
            (1, "cancelled", "length"),
        }
    check_error(fake.http.delete(f"/v1/requests/{card['id']}"), 404)
    fake.wait_idle()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"timeout": 0.3}, {}),
        ({}, {"X-Request-Timeout": "0.3"}),
        ({"timeout": 0.3}, {"X-Request-Timeout": "100"}),
        ({"timeout": 100}, {"X-Request-Timeout": "0.3"}),
    ],
    ids=str,
)
@both_modes
def test_the_smallest_deadline_wins(fake: Server, stream: bool, body: dict[str, Any], headers: dict[str, str]) -> None:
    request = {"model": MODEL, "prompt": "hi", "n": 2, "max_tokens": ENDLESS, "stream": stream} | body
    response = fake.http.post("/v1/completions", json=request, headers=headers)
    assert response.status_code == 200
    assert response.text.count('"end_reason":"deadline"') == 2
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
    fake.wait_idle()


BAD_TIMEOUTS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"timeout": 0}, {}, "timeout"),
    ({"timeout": -1}, {}, "timeout"),
    ({"timeout": "1"}, {}, "timeout"),
    ({}, {"X-Request-Timeout": "0"}, "X-Request-Timeout"),
    ({}, {"X-Request-Timeout": "-1"}, "X-Request-Timeout"),
    ({}, {"X-Request-Timeout": "nan"}, "X-Request-Timeout"),
    ({}, {"X-Request-Timeout": "1e3"}, "X-Request-Timeout"),
    ({}, {"X-Request-Timeout": ""}, "X-Request-Timeout"),
]


@pytest.mark.parametrize(("body", "headers", "param"), BAD_TIMEOUTS, ids=str)
def test_a_deadline_that_is_none_is_refused(
    one_fake: Server, body: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    request = {"model": MODEL, "prompt": "hi", "max_tokens": 1} | body
    check_error(one_fake.http.post("/v1/completions", json=request, headers=headers), 400, param)


def test_a_full_queue_says_when_to_come_again(one_fake: Server) -> None:
    """And is empty again once those that fill it are told to end."""
    body = {"model": MODEL, "prompt": "hi", "n": 68, "max_tokens": ENDLESS, "stream": True}
    with Wire(one_fake) as wire:
        wire.post("/v1/completions", body)
        assert wire.read_head().status == 200
        refused = one_fake.post("/v1/completions", body | {"n": 1})
        check_error(refused, 429, code="rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert 1000 <= int(refused.headers["retry-after-ms"]) <= 120_000
        (card,) = one_fake.get("/v1/requests").json()["data"]
        assert one_fake.http.delete(f"/v1/requests/{card['id']}").status_code == 200
        assert wire.events()[-1] == "[DONE]"
    one_fake.wait_idle()
    assert one_fake.post("/v1/completions", body | {"n": 1, "max_tokens": 1, "stream": False}).status_code == 200


def test_official_client_does_not_repeat_what_would_fail_again(scripted: Server) -> None:
    """x-should-retry: false on a choice that failed for its own reasons; the client would ask twice more."""
    from tests.e2e.scripts import FAIL_SEED

    asked = []

    def count(request: httpx.Request) -> None:
        asked.append(request)

    with (
        httpx.Client(event_hooks={"request": [count]}) as http,
        openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=2, http_client=http) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(model=MODEL, prompt="hi", seed=FAIL_SEED, max_tokens=9)
    assert len(asked) == 1
