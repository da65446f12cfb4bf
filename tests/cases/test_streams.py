"""C08 to C14, C18, C19: what is on the wire, and what a departure stops."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.answers import ask, ask_streamed, check_envelope, check_error, path_of
from tests.e2e.fixtures import TINY_ENDLESS
from tests.e2e.scripts import FAIL_SEED, SCRIPT_SEED, SCRIPTS
from tests.e2e.server import Server
from tests.e2e.wire import Wire


def completion(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "prompt": "hi there", "max_tokens": 8, "ignore_eos": True, **fields}


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": server.model, "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


def events(server: Server, body: dict[str, Any]) -> list[str]:
    with Wire(server) as wire:
        wire.post(path_of(body), body)
        head = wire.read_head()
        assert head.status == 200 and head.headers["content-type"].startswith("text/event-stream")
        return wire.events()


@pytest.mark.parametrize("make", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_c08_usage_is_one_last_chunk_and_only_when_asked_for(
    one_fake: Server, make: Any, n: int, options: dict[str, Any] | None
) -> None:
    *chunks, done = events(one_fake, make(one_fake, n=n, stream=True, stream_options=options))
    assert done == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    empty = [index for index, chunk in enumerate(decoded) if chunk["choices"] == []]
    if options and options.get("include_usage"):
        assert empty == [len(decoded) - 1]
        assert decoded[-1]["usage"]["completion_tokens"] == 8 * n
        assert all(chunk["usage"] is None for chunk in decoded[:-1])
    else:
        assert empty == [] and all("usage" not in chunk for chunk in decoded)


def test_c08_stream_options_without_a_stream_are_a_400(one_fake: Server) -> None:
    body = completion(one_fake, stream_options={"include_usage": True})
    check_error(one_fake.post("/v1/completions", body), 400, "stream_options")


@pytest.mark.parametrize("bad", [{"n": 0}, {"temperature": 3}, {"max_tokens": -1}, {"stop": ["x"] * 17}, {"what": 1}])
def test_c09_a_bad_request_never_starts_a_stream(one_fake: Server, bad: dict[str, Any]) -> None:
    check_error(one_fake.post("/v1/completions", completion(one_fake, stream=True, **bad)), 400, next(iter(bad)))


def test_c09_a_late_failure_is_an_error_event_and_then_the_end(scripted: Server) -> None:
    seen = events(scripted, completion(scripted, seed=FAIL_SEED, n=2, max_tokens=5000, stream=True))
    assert "[DONE]" not in seen
    check_envelope(json.loads(seen[-1]))
    assert not any('"finish_reason":"' in event for event in seen)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_c10_characters_split_over_tokens_come_whole_or_not_at_all(scripted: Server, max_tokens: int) -> None:
    """Two choices with their cuts at different places; a token is a byte."""
    body = completion(scripted, seed=SCRIPT_SEED, max_tokens=max_tokens, n=2, ignore_eos=False)
    folded = ask_streamed(scripted, body)
    assert folded.choices == ask(scripted, body).choices
    assert folded.texts == [script[:max_tokens].decode(errors="ignore") for script in SCRIPTS[:2]]


def test_c10_invalid_bytes_do_not_stall_the_stream(scripted: Server) -> None:
    body = completion(scripted, seed=SCRIPT_SEED + 2, max_tokens=40, ignore_eos=False)
    [choice] = ask_streamed(scripted, body).choices
    assert choice.text.endswith("!") and choice.text == SCRIPTS[2].decode(errors="replace")
    assert choice.finish_reason == "stop"


def test_c11_silence_is_filled_with_comments(one_fake: Server) -> None:
    """Every place is taken, so the stream waits; its headers and comments come all the same."""
    with Wire(one_fake) as busy, Wire(one_fake) as waiting:
        # not streamed: one that is gives its places away as soon as its reader is behind
        busy.post("/v1/completions", completion(one_fake, n=4, max_tokens=100_000))
        one_fake.wait_metric("chorus_sequences_running", lambda value: value == 4)
        waiting.post("/v1/completions", completion(one_fake, stream=True))
        head = waiting.read_head()
        assert head.headers["cache-control"] == "no-cache" and head.headers["x-accel-buffering"] == "no"
        assert waiting.next_event().startswith(":")
    one_fake.wait_idle()


def test_c12_aborted_fan_outs_leave_nothing_behind(one_tiny: Server) -> None:
    body = completion(one_tiny, n=4, max_tokens=TINY_ENDLESS, stream=True)
    for number in range(60):
        wire = Wire(one_tiny)
        wire.post("/v1/completions", body)
        wire.read_head()
        for _ in range(number % 4):
            wire.next_event()
        wire.reset()
    one_tiny.wait_idle()


def test_c13_a_departure_from_the_queue_disturbs_nobody(cramped: Server) -> None:
    steady = completion(cramped, n=4, seed=9, max_tokens=40)
    alone = ask(cramped, steady).texts
    prefilled = cramped.metric("chorus_prompt_tokens_total")
    with Wire(cramped) as first:
        first.post("/v1/completions", steady)
        for _ in range(5):
            queued = Wire(cramped)
            queued.post("/v1/completions", completion(cramped, prompt="z" * 200, max_tokens=20))
            queued.close()
        answer = first.read().json()
    assert [choice["text"] for choice in answer["choices"]] == alone
    cramped.wait_idle()
    assert cramped.metric("chorus_prompt_tokens_total") - prefilled < 5 * 200, "those that had left were computed"


def test_c14_a_departure_in_prefill_stops_it_before_its_end(one_tiny: Server) -> None:
    """64 tokens a step, 20,000 to compute: what is left of them must not be."""
    before = one_tiny.metric("chorus_prompt_tokens_total")
    wire = Wire(one_tiny)
    wire.post("/v1/completions", completion(one_tiny, prompt="w" * 20_000, max_tokens=5))
    one_tiny.wait_metric("chorus_prompt_tokens_total", lambda value: value > before)
    wire.reset()
    one_tiny.wait_idle()
    assert one_tiny.metric("chorus_prompt_tokens_total") - before < 20_000
    ask(one_tiny, completion(one_tiny, max_tokens=1))


@pytest.mark.parametrize("stop", [["ta ga"], ["alpha"], ["a"], ["beta gamma", "gamma"], ["gamma"], ["zzz"]])
def test_c18_text_ends_right_before_the_first_stop_string(scripted: Server, stop: list[str]) -> None:
    song = SCRIPTS[3].decode()
    body = completion(scripted, seed=SCRIPT_SEED + 3, max_tokens=len(song), stop=stop)
    found = min((song.find(text) for text in stop if text in song), default=None)
    folded = ask_streamed(scripted, body)
    assert folded.choices == ask(scripted, body).choices
    [choice] = folded.choices
    assert choice.text == song[:found]
    assert choice.finish_reason == ("length" if found is None else "stop")


def test_c18_a_stop_string_may_end_inside_a_run_of_characters_of_many_bytes(scripted: Server) -> None:
    script = SCRIPTS[4].decode()
    body = completion(scripted, seed=SCRIPT_SEED + 4, max_tokens=64, stop=["界x世"])
    assert ask_streamed(scripted, body).texts == [script[: script.find("界x世")]]


@pytest.mark.parametrize("stop", [["x"] * 17, ["y"] * 100_000, ["z" * 2**20], [""]])
def test_c19_stop_lists_are_bounded(one_fake: Server, stop: list[str]) -> None:
    check_error(one_fake.post("/v1/completions", completion(one_fake, stop=stop)), 400)
