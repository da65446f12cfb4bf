"""SIGTERM to `python -m service`: what runs may finish, all else is told, and the process ends as it promised."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.e2e.answers import check_envelope, check_error, fold, letters, read_body
from tests.e2e.fixtures import MODEL, SLOTS, SMALL_STEPS, TINY, WORKERS, fake_spec
from tests.e2e.scripts import HANG_SEED
from tests.e2e.server import Server, spec, wait_until
from tests.e2e.wire import Wire

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "seed": 4, "max_tokens": 30}

on_both = pytest.mark.parametrize("worker", WORKERS)


@contextmanager
def _paced(worker: str, drain_seconds: str) -> Iterator[Server]:
    """30 tokens take some time here, so that a signal finds the requests still running."""
    pace = {"FAULTY_STEP_SECONDS": "0.05", "CHORUS_DRAIN_SECONDS": drain_seconds}
    with Server.start(fake_spec("faulty-service", worker, **pace)).wait_ready() as server:
        yield server


def _refuses_connections(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.settimeout(5)
        return attempt.connect_ex(("127.0.0.1", port)) != 0


@on_both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_that_run_finish_and_new_ones_are_refused(worker: str, number: signal.Signals) -> None:
    with _paced(worker, "60") as server, Wire(server) as streamed, Wire(server) as whole, Wire(server) as idle:
        streamed.post(PATH, BODY | {"stream": True, "n": 2})
        whole.post(PATH, BODY)
        idle.get("/health/ready")
        assert idle.read().status == 200
        assert streamed.read_head().status == 200
        first = streamed.next_event()
        server.wait_metric("chorus_sequences_running", lambda value: value == 3)
        server.signal(number)
        with Wire(server) if not _refuses_connections(server.port) else idle as late:
            late.post(PATH, BODY)
            assert not _accepted(late)
        assert fold([first, *streamed.events()], 2).texts == [letters(4, 3, 30), letters(5, 3, 30)]
        assert read_body(whole.read().body).texts == [letters(4, 3, 30)]
        assert server.wait() == 0
        assert _refuses_connections(server.port)
        assert "Traceback" not in server.output()


def _accepted(late: Wire) -> bool:
    """A request during the drain is either never read, or answered 503."""
    try:
        answer = late.read()
    except (EOFError, ConnectionError):
        return False
    check_error(answer, 503)
    return False


@on_both
def test_readiness_is_503_on_a_connection_that_was_open_before(worker: str) -> None:
    with _paced(worker, "60") as server, Wire(server) as streamed, Wire(server) as idle:
        streamed.post(PATH, BODY | {"stream": True})
        assert streamed.read_head().status == 200
        idle.get("/health/ready")
        assert idle.read().status == 200
        server.signal()
        wait_until(lambda: '"event":"stop"' in server.output(), "the signal has been seen")
        try:
            idle.get("/health/ready")
            check_error(idle.read(), 503)
        except (EOFError, ConnectionError):
            pass  # it was closed at once, which says the same
        assert fold(streamed.events(), 1).texts == [letters(4, 3, 30)]
        assert server.wait() == 0


@on_both
def test_what_the_drain_limit_cuts_ends_with_an_error(worker: str) -> None:
    """Running, queued, streamed or not: nobody is left with an answer that only looks complete."""
    endless = BODY | {"max_tokens": 500_000}
    with _paced(worker, "0.2") as server, ExitStack() as stack:
        wires = {
            (queued, stream): stack.enter_context(Wire(server)) for queued in (False, True) for stream in (False, True)
        }
        wires[False, False].post(PATH, endless | {"n": SLOTS - 1})
        wires[False, True].post(PATH, endless | {"stream": True})
        server.wait_metric("chorus_sequences_running", lambda value: value == SLOTS)
        for stream in (False, True):
            wires[True, stream].post(PATH, endless | {"stream": stream})
        server.wait_metric("chorus_sequences_waiting", lambda value: value == 2)
        server.signal()
        for (_, stream), wire in wires.items():
            if stream:
                assert wire.read_head().status == 200
                *before, last = wire.events()
                check_envelope(json.loads(last))
                assert not any('"finish_reason":"' in event for event in before)
            else:
                check_error(wire.read(), 503)
            wire.close()
        assert server.wait() == 0


@on_both
def test_second_signal_ends_it_now(worker: str) -> None:
    with _paced(worker, "600") as server, Wire(server) as streamed:
        streamed.post(PATH, BODY | {"stream": True, "max_tokens": 500_000})
        assert streamed.read_head().status == 200
        streamed.next_event()
        server.signal()
        while '"event":"stop"' not in server.output():
            streamed.next_event()
        server.signal()
        check_envelope(json.loads(streamed.events()[-1]))
        assert server.wait() in (0, 1)
        assert _refuses_connections(server.port)


@on_both
def test_reader_that_stalls_cannot_hold_the_exit(worker: str) -> None:
    limits = {"CHORUS_DRAIN_SECONDS": "0.2", "CHORUS_RELEASE_TIMEOUT": "0.2"}
    with (
        Server.start(fake_spec("service", worker, **limits)).wait_ready() as server,
        Wire(server, small_buffer=True) as stuck,
    ):
        stuck.post(PATH, BODY | {"stream": True, "max_tokens": 500_000})
        server.wait_stalled()
        server.signal()
        assert server.wait() in (0, 1)


@pytest.mark.timeout(180)
@on_both
def test_hung_engine_cannot_hold_the_exit(worker: str, tiny_folder: Any) -> None:
    """A step that never returns: nothing waits for it beyond its bound."""
    settings = {**TINY, **SMALL_STEPS, "CHORUS_MODEL": tiny_folder}
    settings |= {"CHORUS_DRAIN_SECONDS": "0.2", "CHORUS_RELEASE_TIMEOUT": "0.2"}
    with Server.start(spec("faulty-service", worker, settings)).wait_ready() as server, Wire(server) as wire:
        wire.post(PATH, BODY | {"seed": HANG_SEED, "ignore_eos": True, "stream": True})
        assert wire.read_head().status == 200
        wire.next_event()
        server.signal()
        assert server.wait() in (0, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("worker", "model"), [("asyncio", "tiny"), ("trio", "tiny"), ("asyncio", "default")])
def test_real_engine_ends_with_0_after_it_has_served(worker: str, model: str, tiny_folder: Any) -> None:
    """Its threads are gone, or at least do not abort the interpreter's end."""
    settings = {**TINY, **SMALL_STEPS, "CHORUS_MODEL": tiny_folder}
    if model == "default":
        settings = {"CHORUS_SERVED_MODEL_NAME": MODEL}
    with Server.start(spec("service", worker, settings)).wait_ready() as server, Wire(server) as wire:
        wire.post(PATH, BODY | {"stream": True, "n": 2, "max_tokens": 200})
        assert wire.read_head().status == 200
        server.signal()
        fold(wire.events(), 2)
        assert server.wait() == 0
        assert not any(
            word in server.output() for word in ("Traceback", "terminate", '"level":"critical"', '"level":"error"')
        )
