"""A client that costs little: raw sockets, no parsing but a count, so that the server is what is measured."""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from tests.bench.metrics import BenchError, StreamTally

READ_BYTES = 2**18
TAIL_BYTES = 4096
"""Kept of each answer: its last event has the usage."""

_END = b"data: [DONE]\n\n"
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


class _Stream:
    def __init__(self, url: str, request: bytes) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname, address.port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.tally = StreamTally(time.perf_counter())
        self._tail = b""

    def read(self) -> bool:
        """Take what is there; True at the answer's end. Raises BenchError."""
        data = self.socket.recv(READ_BYTES)
        self.tally.arrivals.append(time.perf_counter())
        self.tally.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-TAIL_BYTES:] if len(data) < TAIL_BYTES else data[-TAIL_BYTES:]
        if _END in self._tail:
            self._finish()
            return True
        if not data or (len(self.tally.arrivals) == 1 and not data.startswith(b"HTTP/1.1 200")):
            raise BenchError(f"no stream, or one without an end: {self._tail[:300]!r}")
        return False

    def _finish(self) -> None:
        self.tally.ended = time.perf_counter()
        usages = _USAGE.findall(self._tail)
        if not usages:
            raise BenchError("the stream has no usage")
        self.tally.num_tokens = int(usages[-1])


def flood(url: str, bodies: list[dict[str, Any]]) -> list[StreamTally]:
    """Send all requests at once, each over a connection of its own, and read all answers. Raises BenchError."""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        streams = [_Stream(url, _request(url, body)) for body in bodies]
        for stream in streams:
            stack.enter_context(stream.socket)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.read():
                    selector.unregister(key.data.socket)
    return [stream.tally for stream in streams]


def _request(url: str, body: dict[str, Any]) -> bytes:
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
