"""The raw client against a server that answers with given bytes, cut anywhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bench.flood import flood
from tests.bench.metrics import BenchError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = b'data: {"a": 1}\n\ndata: {"usage": {"completion_tokens":7}}\n\ndata: [DONE]\n\n'


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """A server for one connection that sends the pieces and closes."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(2**16)
            for piece in pieces:
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_an_answer_is_counted_by_its_usage() -> None:
    with answering(HEAD + ANSWER) as url:
        (tally,) = flood(url, [{}])
    assert (tally.num_tokens, tally.num_events) == (7, 3)
    assert tally.started < tally.arrivals[0] <= tally.ended


@pytest.mark.parametrize("pieces", [(b"HTTP/1.1 503 No\r\n\r\n" + ANSWER[:20],), (HEAD, ANSWER[:-20])])
def test_a_refusal_or_a_stream_without_an_end_is_no_figure(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces) as url, pytest.raises(BenchError):
        flood(url, [{}])
