"""HTTP/1.1 as it comes over a socket: connections used again, pipelined, cut, lied to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.answers import check_error, fold, letters, read_body
from tests.e2e.fixtures import MODEL, WORKERS, fake_spec
from tests.e2e.server import Server, Servers, wait_until
from tests.e2e.wire import Wire, request_bytes

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "n": 2, "seed": 4, "max_tokens": 5}
EXPECTED = [letters(4, 3, 5), letters(5, 3, 5)]
PATH = "/v1/completions"
KEEP_ALIVE_SECONDS = 75
"""As `python -m service` sets it."""


def _chunked(*pieces: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def test_connection_serves_again_after_a_stream(fake: Server) -> None:
    with Wire(fake) as wire:
        for _ in range(3):
            wire.post(PATH, BODY | {"stream": True})
            assert wire.read_head().status == 200
            assert fold(wire.events(), 2).texts == EXPECTED
        wire.post(PATH, BODY)
        assert read_body(wire.read().body).texts == EXPECTED


@pytest.mark.parametrize("bad", [b"{", b'{"model": "nobody", "prompt": ""}', b'{"prompt": 1}'])
def test_connection_serves_again_after_a_refusal(fake: Server, bad: bytes) -> None:
    with Wire(fake) as wire:
        for _ in range(3):
            wire.post(PATH, bad)
            answer = wire.read()
            check_error(answer, 404 if b"nobody" in bad else 400)
            assert answer.headers.get("connection") != "close"
            wire.post(PATH, BODY)
            assert read_body(wire.read().body).texts == EXPECTED


def test_pipelined_requests_are_answered_in_their_order(fake: Server) -> None:
    bodies = [BODY | {"seed": seed, "stream": seed % 2 == 1} for seed in range(6)]
    with Wire(fake) as wire:
        wire.send(b"".join(request_bytes("POST", PATH, body) for body in bodies))
        for body in bodies:
            assert wire.read_head().status == 200
            whole = fold(wire.events(), 2) if body["stream"] else read_body(b"".join(wire.pieces()))
            assert whole.texts == [letters(body["seed"], 3, 5), letters(body["seed"] + 1, 3, 5)]
    fake.wait_idle()


def test_client_that_leaves_with_a_request_in_the_pipeline_leaves_nothing_behind(fake: Server) -> None:
    """Bytes behind the request hide the end of the connection until the server writes."""
    wire = Wire(fake)
    wire.send(request_bytes("POST", PATH, BODY | {"stream": True, "max_tokens": 500_000}) * 2)
    assert wire.read_head().status == 200
    wire.next_event()
    wire.close()
    fake.wait_idle()


def test_http_1_0_is_answered_and_its_connection_ends(fake: Server) -> None:
    for stream in (False, True):
        data = json.dumps(BODY | {"stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n"
        with Wire(fake) as wire:
            wire.send(head % len(data) + data)
            assert wire.read_head().status == 200
            whole = fold(wire.events(), 2) if stream else read_body(b"".join(wire.pieces()))
            assert whole.texts == EXPECTED
            assert wire.at_end()


def test_head_and_body_may_come_in_any_pieces(fake: Server) -> None:
    data = json.dumps(BODY).encode()
    with Wire(fake) as wire:
        for byte in request_bytes("POST", PATH, data):
            wire.send(bytes([byte]))
        assert read_body(wire.read().body).texts == EXPECTED
        wire.send(_chunked(*(data[k : k + 7] for k in range(0, len(data), 7))))
        assert read_body(wire.read().body).texts == EXPECTED


def test_client_that_waits_for_permission_gets_it(fake: Server) -> None:
    data = json.dumps(BODY).encode()
    with Wire(fake) as wire:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        wire.send(head % len(data))
        assert wire.read_head().status == 100
        wire.send(data)
        assert read_body(wire.read().body).texts == EXPECTED


def test_stream_has_the_headers_that_keep_proxies_from_holding_it_back(fake: Server) -> None:
    with Wire(fake) as wire:
        wire.post(PATH, BODY | {"stream": True}, "X-Request-Id: mine-1")
        head = wire.read_head()
        events = wire.events()
    assert head.headers["content-type"].startswith("text/event-stream")
    assert head.headers["cache-control"] == "no-cache"
    assert head.headers["x-accel-buffering"] == "no"
    assert head.headers["x-request-id"] == "mine-1"
    assert json.loads(events[0])["id"] == head.headers["x-chorus-response-id"]


def test_every_answer_echoes_the_request_id(fake: Server) -> None:
    with Wire(fake) as wire:
        for path, body in ((PATH, b"{"), (PATH, json.dumps(BODY).encode()), ("/nowhere", b"")):
            wire.post(path, body, "X-Request-Id: mine-2")
            answer = wire.read()
            assert answer.headers["x-request-id"] == "mine-2"
            assert answer.headers.get("x-chorus-response-id", "").startswith("cmpl-") == (answer.status == 200)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense",
    ],
    ids=["tls", "short", "negative", "two-lengths", "gzip", "bad-chunk", "bad-header", "long", "no-host", "h2"],
)
def test_what_is_no_http_ends_its_connection_and_nothing_else(fake: Server, data: bytes) -> None:
    with Wire(fake) as wire:
        with suppress(OSError):  # it may be gone before it has heard all
            wire.send(data)
            wire.socket.shutdown(1)
        received = b""
        while not wire.at_end():
            received, wire._buffer = received + wire._buffer, b""
    assert b"Traceback" not in received
    assert b" 500 " not in received.split(b"\r\n")[0]
    assert fake.get("/health/ready").status_code == 200
    assert fake.spec.launcher == "hypercorn" or "Traceback" not in fake.output()


@pytest.mark.parametrize(
    ("line", "header", "status"),
    [
        ("POST /v1/completions", "Content-Type: text/plain", 415),
        ("POST /v1/completions", "X-Request-Id: \x01", 400),
        ("POST /nowhere", "X-A: b", 404),
        ("PUT /v1/completions", "X-A: b", 405),
    ],
    ids=["media-type", "request-id", "url", "method"],
)
def test_answer_that_does_not_wait_for_the_body_says_that_the_connection_ends(
    fake: Server, line: str, header: str, status: int
) -> None:
    """Or else it goes on: a client must not send its next request into a connection that is about to end."""
    data = json.dumps(BODY).encode()
    with Wire(fake) as wire:
        wire.send(f"{line} HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        answer = wire.read()
        check_error(answer, status)
        if answer.headers.get("connection", "").lower() != "close":
            wire.send(data)
            wire.post(PATH, BODY)
            assert read_body(wire.read().body).texts == EXPECTED


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset], ids=["fin", "rst"])
@pytest.mark.parametrize("worker", [*WORKERS, "uvloop"])
def test_connection_that_its_client_closes_is_closed_by_the_server(
    servers: Servers, worker: str, leave: Callable[[Wire], None]
) -> None:
    """Long before its keep-alive time is over: else clients that come and go use up the descriptors."""
    server = servers.get(fake_spec("service", worker))

    def open_files() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    before = open_files()
    for _ in range(40):
        wire = Wire(server)
        wire.get("/health")
        assert wire.read().status == 200
        leave(wire)
    seconds = KEEP_ALIVE_SECONDS / 2
    wait_until(lambda: open_files() < before + 20, lambda: f"{before} open files, now {open_files()}", seconds)


@pytest.fixture(params=["asyncio", "trio"])
def strict(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """Small bodies only, and those soon."""
    limits = {"CHORUS_MAX_BODY_BYTES": 10_000, "CHORUS_BODY_TIMEOUT": "0.3"}
    return servers.get(fake_spec("service", request.param, **limits))


def test_body_that_trickles_in_is_refused_after_its_time_and_the_connection_ends(strict: Server) -> None:
    for head in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"):
        with Wire(strict) as wire:
            wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head)
            answer = wire.read()
            check_error(answer, 400)
            assert answer.headers["connection"].lower() == "close"
            assert wire.at_end()


def test_body_too_large_is_refused_whatever_its_length_is_said_to_be(strict: Server) -> None:
    big = json.dumps(BODY | {"prompt": "x" * 20_000}).encode()
    for request in (request_bytes("POST", PATH, big), _chunked(big), _chunked(*([b"x" * 1000] * 30))):
        with Wire(strict) as wire:
            wire.send(request)
            answer = wire.read()
            check_error(answer, 413)
            assert answer.headers["connection"].lower() == "close"
            assert wire.at_end()
    exact = json.dumps(BODY | {"user": ""}).encode()
    padded = exact.replace(b'"user": ""', b'"user": "%b"' % (b"u" * (10_000 - len(exact))))
    with Wire(strict) as wire:
        wire.post(PATH, padded)
        assert read_body(wire.read().body).texts == EXPECTED


def test_length_that_is_too_small_makes_a_bad_request_and_leaves_the_server_well(fake: Server) -> None:
    """What is left over is read as the next request, which it is not."""
    data = json.dumps(BODY).encode()
    with Wire(fake) as wire:
        wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n" + data)
        check_error(wire.read(), 400)
    fake.wait_idle()
    assert fake.get("/health/ready").status_code == 200
