"""A client that takes nothing of its answer, on a real socket: cut after the write timeout, with everything freed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fixtures import ENDLESS, FAKE, MODEL
from tests.e2e.server import Server, spec, wait_until
from tests.e2e.wire import Wire

BODY = {"model": MODEL, "prompt": "hi", "n": 2, "max_tokens": ENDLESS, "stream": True}


@pytest.fixture(params=["asyncio", "trio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    settings = {**FAKE, "CHORUS_WRITE_TIMEOUT": "1", "CHORUS_REQUEST_TIMEOUT": "300"}
    with Server.start(spec("service", request.param, settings)).wait_ready() as running:
        yield running


def num_sockets(server: Server) -> int:
    folder = Path(f"/proc/{server.process.pid}/fd")
    return sum(os.readlink(folder / name).startswith("socket:") for name in os.listdir(folder))


def test_a_reader_that_takes_nothing_is_cut_and_its_places_connection_and_memory_are_freed(server: Server) -> None:
    before = num_sockets(server)
    with Wire(server, small_buffer=True) as stuck:
        stuck.post("/v1/completions", BODY)
        server.wait_metric("chorus_sequences_running", lambda value: value == 2)
        server.wait_idle()  # although the client is still there and reads nothing
        wait_until(lambda: num_sockets(server) <= before, "the connection is closed")
        wait_until(lambda: server.metric('chorus_requests_total{outcome="cancelled"}') == 1, "it is counted")
    assert server.post("/v1/completions", BODY | {"stream": False, "max_tokens": 3}).status_code == 200
    assert "Traceback" not in server.output()


def test_a_reader_that_comes_back_in_time_loses_nothing(server: Server) -> None:
    body = BODY | {"max_tokens": 5000, "n": 1, "seed": 1}
    whole = server.post("/v1/completions", body | {"stream": False}).json()["choices"][0]["text"]
    with Wire(server, small_buffer=True) as slow:
        slow.post("/v1/completions", body)
        assert slow.read_head().status == 200
        events = slow.events()
    assert events[-1] == "[DONE]"
    assert len(whole) == 5000
