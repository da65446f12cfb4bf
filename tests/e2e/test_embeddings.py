"""Embeddings over a real socket: who leaves has nothing more computed, and generation goes on beside them."""

from __future__ import annotations

import json
import socket
import threading

from tests.e2e.fixtures import EMBEDDER, MODEL
from tests.e2e.server import Server

LONG_LIST = {"model": EMBEDDER, "input": ["word " * 100] * 2000}
"""Minutes of work, on any machine that runs tests."""

WAITING = "chorus_embedding_inputs_waiting"


def send(server: Server) -> socket.socket:
    """The long list, from a client that reads nothing yet."""
    body = json.dumps(LONG_LIST).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def test_client_that_leaves_has_nothing_more_computed(tiny: Server) -> None:
    cancelled = 'chorus_embedding_requests_total{outcome="cancelled"}'
    before, computed = tiny.metric(cancelled), tiny.metric("chorus_embedding_tokens_total")
    with send(tiny):
        tiny.wait_metric("chorus_embedding_tokens_total", lambda tokens: tokens > computed)
    tiny.wait_metric(WAITING, lambda inputs: inputs == 0)
    tiny.wait_metric(cancelled, lambda count: count == before + 1)
    assert tiny.metric("chorus_embedding_tokens_total") - computed < 2000 * 102
    assert tiny.post("/v1/embeddings", {"model": EMBEDDER, "input": "hi"}).status_code == 200


def test_chats_and_short_lists_are_answered_beside_a_long_one(one_tiny: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True}
    statuses: list[int] = []

    def ask(path: str, body: dict[str, object]) -> None:
        statuses.append(one_tiny.post(path, body).status_code)

    with send(one_tiny):
        one_tiny.wait_metric(WAITING, lambda inputs: inputs > 0)
        asked = [("/v1/chat/completions", chat), ("/v1/embeddings", {"model": EMBEDDER, "input": ["a", "b"]})]
        threads = [threading.Thread(target=ask, args=one) for one in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one_tiny.metric(WAITING) > 0, "the long list was to last longer"
    one_tiny.wait_metric(WAITING, lambda inputs: inputs == 0)
    assert statuses == [200, 200]
