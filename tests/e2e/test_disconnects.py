"""A client that goes away, at any stage of its request and in either way, leaves nothing behind, disturbs nobody."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.answers import ask, fold, letters, path_of, read_body
from tests.e2e.fixtures import ENDLESS, MODEL, SLOTS, TINY_ENDLESS, fake_spec
from tests.e2e.scripts import SCRIPT_SEED
from tests.e2e.server import Server, Servers, wait_until
from tests.e2e.wire import Wire

PROMPT_TOKENS = "chorus_prompt_tokens_total"
MADE_TOKENS = "chorus_generation_tokens_total"
RUNNING = "chorus_sequences_running"
WAITING = "chorus_sequences_waiting"
ENDED = 'chorus_requests_total{outcome="cancelled"}'

NEIGHBOUR = {"model": MODEL, "prompt": "neighbour", "n": 2, "seed": 77, "max_tokens": 60, "ignore_eos": True}

leaving = pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["fin", "rst"])
both_modes = pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
Leave = Callable[[Wire], None]


def _endless(server: Server, **more: Any) -> dict[str, Any]:
    max_tokens = ENDLESS if _is_fake(server) else TINY_ENDLESS
    return {"model": MODEL, "prompt": "go on", "seed": 1, "ignore_eos": True, "max_tokens": max_tokens} | more


def _is_fake(server: Server) -> bool:
    return ("CHORUS_ENGINE", "fake") in server.spec.settings


@contextmanager
def _undisturbed_neighbour(server: Server) -> Iterator[None]:
    """A stream that is open meanwhile, and gets the answer that it gets alone."""
    alone = ask(server, NEIGHBOUR).choices
    with Wire(server) as wire:
        wire.post(path_of(NEIGHBOUR), NEIGHBOUR | {"stream": True})
        assert wire.read_head().status == 200
        first = wire.next_event()
        yield
        assert fold([first, *wire.events()], 2).choices == alone


def _leave_when(
    server: Server, body: dict[str, Any], leave: Leave, metric: str, condition: Callable[[float], bool]
) -> None:
    wire = Wire(server)
    wire.post(path_of(body), body)
    try:
        server.wait_metric(metric, condition)
    finally:
        leave(wire)


@leaving
@both_modes
def test_leaving_while_decoding_stops_every_choice(either: Server, stream: bool, leave: Leave) -> None:
    with _undisturbed_neighbour(either):
        made = either.metric(MADE_TOKENS)
        body = _endless(either, n=2, stream=stream)
        _leave_when(either, body, leave, MADE_TOKENS, lambda value: value > made + 10)


@leaving
@both_modes
def test_leaving_in_the_middle_of_prefill_stops_it(either: Server, stream: bool, leave: Leave) -> None:
    with _undisturbed_neighbour(either):
        computed = either.metric(PROMPT_TOKENS)
        prompt = [97] * (200_000 if _is_fake(either) else 20_000)
        body = _endless(either, prompt=prompt, max_tokens=10_000, stream=stream)
        _leave_when(either, body, leave, PROMPT_TOKENS, lambda value: value > computed + 64)


@leaving
@both_modes
def test_leaving_the_queue_takes_the_request_out_of_it(either: Server, stream: bool, leave: Leave) -> None:
    with Wire(either) as blocker:
        blocker.post("/v1/completions", _endless(either, n=SLOTS))
        either.wait_metric(RUNNING, lambda value: value == SLOTS)
        body = _endless(either, n=3, prompt="x" * 50, stream=stream)
        _leave_when(either, body, leave, WAITING, lambda value: value == 3)
        either.wait_metric(WAITING, lambda value: value == 0)
        assert either.metric(RUNNING) == SLOTS, "the blocker is not the one that left"


@leaving
def test_leaving_a_stream_in_the_middle_of_its_events_stops_it(either: Server, leave: Leave) -> None:
    with _undisturbed_neighbour(either):
        wire = Wire(either)
        wire.post("/v1/chat/completions", _chat(_endless(either, n=2, stream=True)))
        assert wire.read_head().status == 200
        for _ in range(5):
            assert "chat.completion.chunk" in wire.next_event()
        leave(wire)


@leaving
def test_leaving_before_the_body_is_complete_starts_nothing(either: Server, leave: Leave) -> None:
    computed = either.metric(PROMPT_TOKENS)
    wire = Wire(either)
    wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    leave(wire)
    either.wait_idle()
    assert either.metric(PROMPT_TOKENS) == computed


@leaving
@both_modes
def test_leaving_when_some_choices_have_ended_stops_the_others(scripted: Server, stream: bool, leave: Leave) -> None:
    """Choice 0 writes its script and ends; the others go on for ever."""
    body = _endless(scripted, n=3, seed=SCRIPT_SEED + 6, ignore_eos=False, stream=stream)
    wire = Wire(scripted)
    wire.post("/v1/completions", body)
    scripted.wait_metric(RUNNING, lambda value: value == 2)
    leave(wire)
    scripted.wait_idle()


@leaving
def test_leaving_a_model_when_some_choices_have_ended_stops_the_others(tiny: Server, leave: Leave) -> None:
    """The stop token is likely for none, so that choices end one by one."""
    body = _endless(tiny, n=SLOTS, ignore_eos=False, stream=True)
    wire = Wire(tiny)
    wire.post("/v1/completions", body)
    assert wire.read_head().status == 200
    wait_until(lambda: json.loads(wire.next_event())["choices"][0]["finish_reason"] is not None, "one choice has ended")
    leave(wire)
    tiny.wait_idle()


@both_modes
def test_half_closed_connection_counts_as_gone(fake: Server, stream: bool) -> None:
    """As hypercorn sees it; what matters is that nothing stays."""
    cancelled = fake.metric(ENDED)
    with Wire(fake) as wire:
        wire.post("/v1/completions", _endless(fake, n=2, stream=stream))
        fake.wait_metric(RUNNING, lambda value: value == 2)
        wire.socket.shutdown(1)
        fake.wait_idle()
    assert fake.metric(ENDED) == cancelled + 1


def test_reader_that_stops_in_the_middle_holds_up_nobody(either: Server) -> None:
    """It gets the whole of its answer when it goes on, and the others theirs meanwhile."""
    alone = ask(either, NEIGHBOUR).choices
    body = NEIGHBOUR | {"max_tokens": 3000 if _is_fake(either) else 400, "stream": True}
    with Wire(either, small_buffer=True) as slow:
        slow.post(path_of(body), body)
        assert slow.read_head().status == 200
        first = slow.next_event()
        for _ in range(3):
            assert ask(either, NEIGHBOUR).choices == alone
        folded = fold([first, *slow.events()], 2)
    assert folded.choices == ask(either, body | {"stream": False}).choices


def test_reader_that_never_reads_again_is_cleaned_up_when_it_leaves(fake: Server) -> None:
    with Wire(fake, small_buffer=True) as stuck:
        stuck.post("/v1/completions", _endless(fake, n=SLOTS, stream=True))
        fake.wait_metric(RUNNING, lambda value: value == SLOTS)
        fake.wait_stalled()
    fake.wait_idle()


def test_survivors_of_random_departures_get_what_they_get_alone(either: Server) -> None:
    """Seeded requests, streamed and not; about half of their clients leave at random places."""
    chance = random.Random(4)
    bodies = [
        NEIGHBOUR | {"seed": 200 + k, "n": 1 + k % 2, "max_tokens": 10 + 5 * (k % 7), "stream": k % 3 > 0}
        for k in range(32 if _is_fake(either) else 16)
    ]
    wires = [Wire(either) for _ in bodies]
    survivors = []
    for wire, body in zip(wires, bodies, strict=True):
        wire.post(path_of(body), body)
        if chance.random() < 0.5:
            survivors.append((wire, body))
        elif body["stream"] and chance.random() < 0.7:
            wire.read_head()
            wire.next_event()
            (wire.reset if chance.random() < 0.5 else wire.close)()
        else:
            (wire.reset if chance.random() < 0.5 else wire.close)()
    answers = []
    for wire, body in survivors:
        with wire:
            head = wire.read_head()
            assert head.status == 200
            whole = fold(wire.events(), body["n"]) if body["stream"] else read_body(b"".join(wire.pieces()))
            answers.append(whole.choices)
    either.wait_idle()
    for (_, body), found in zip(survivors, answers, strict=True):
        assert found == ask(either, body | {"stream": False}).choices


@pytest.mark.parametrize("same_prompt", [False, True])
@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_nothing_of_a_request_that_left_the_queue_was_computed(
    servers: Servers, worker: str, same_prompt: bool
) -> None:
    """One place, whose owner always keeps up: no other can have been started."""
    one_place = {"CHORUS_MAX_NUM_SEQS": 1, "CHORUS_MAX_QUEUED_SEQS": 8, "CHORUS_STREAM_CREDIT": 10**6}
    server = servers.get(fake_spec("service", worker, **one_place))
    num_tokens = 20_000
    with Wire(server) as owner:
        owner.post("/v1/completions", {"model": MODEL, "prompt": "abc", "seed": 5, "max_tokens": num_tokens})
        server.wait_metric(RUNNING, lambda value: value == 1)
        computed = server.metric(PROMPT_TOKENS)
        for leave in (Wire.close, Wire.reset):
            queued = {"model": MODEL, "prompt": "abc" if same_prompt else "other", "n": 2}
            _leave_when(server, queued, leave, WAITING, lambda value: value == 2)
            server.wait_metric(WAITING, lambda value: value == 0)
        answer = owner.read().json()
    assert answer["choices"][0]["text"] == letters(5, 3, num_tokens)
    assert server.metric(PROMPT_TOKENS) == computed
    server.wait_idle()


def test_memory_does_not_grow_with_the_clients_that_left(one_fake: Server) -> None:
    body = _endless(one_fake, n=4, stream=True)

    def leave_early() -> None:
        with Wire(one_fake) as wire:
            wire.post(path_of(body), body)
            assert wire.read_head().status == 200
            for _ in range(3):
                wire.next_event()

    for _ in range(100):
        leave_early()
    one_fake.wait_idle()
    before = one_fake.resident_bytes()
    for _ in range(200):
        leave_early()
    one_fake.wait_idle()
    assert one_fake.resident_bytes() - before < 30 * 2**20


def test_fake_neighbour_is_what_the_rule_says(fake: Server) -> None:
    """So that the comparisons above are not of one wrong answer with another."""
    assert ask(fake, NEIGHBOUR).texts == [letters(77, 9, 60), letters(78, 9, 60)]


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": body["prompt"]}]}
