"""A connection whose every byte a test decides, and a reader of what comes back."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tests.e2e.server import SETTLE_SECONDS, Server


@dataclass(frozen=True)
class Answer:
    """Headers have lower-case names. body: what followed, chunks joined."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """small_buffer: the kernel takes little for a reader that does not read, so that the server notices it soon."""

    def __init__(self, server: Server, *, small_buffer: bool = False) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(SETTLE_SECONDS)
        if small_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", server.port))
        self._buffer = b""
        self._body: Iterator[bytes] = iter(())
        self._text = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- leaving

    def close(self) -> None:
        """FIN."""
        self.socket.close()

    def reset(self) -> None:
        """RST, whatever is still unread."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # -- sending

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: Mapping[str, Any] | bytes, *headers: str) -> None:
        self.send(request_bytes("POST", path, body, *headers))

    def get(self, path: str) -> None:
        self.send(request_bytes("GET", path, b""))

    # -- reading

    def read_head(self) -> Answer:
        """Status and headers; what follows is for `read_body`, `pieces` or `events`."""
        head = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(head[0].split(" ")[1])
        self._body, self._text = self._decode(headers), b""
        return Answer(status, headers)

    def read(self) -> Answer:
        head = self.read_head()
        return Answer(head.status, head.headers, b"".join(self._body))

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes."""
        return self._body

    def next_event(self) -> str:
        """The next SSE event without its `data: `, or a comment with its colon; "" at the body's end."""
        while b"\n\n" not in self._text:
            piece = next(self._body, None)
            if piece is None:
                assert self._text == b"", f"the stream ended inside an event: {self._text!r}"
                return ""
            self._text += piece
        event, _, self._text = self._text.partition(b"\n\n")
        text = event.decode()  # strict: every event is whole characters
        assert text.startswith(("data: ", ":")), text
        return text.removeprefix("data: ")

    def events(self) -> list[str]:
        """All events that are left, comments without."""
        return [event for event in iter(self.next_event, "") if not event.startswith(":")]

    def at_end(self) -> bool:
        """Whether the server has closed the connection (waits for that, or for a byte)."""
        if self._buffer:
            return False
        try:
            self._buffer = self.socket.recv(65536)
        except ConnectionResetError:
            return True
        return not self._buffer

    def _decode(self, headers: Mapping[str, str]) -> Iterator[bytes]:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(self._until(b"\r\n").split(b";")[0], 16):
                yield self._exactly(size)
                assert self._exactly(2) == b"\r\n"
            assert self._until(b"\r\n") == b"", "no trailers are expected"
        elif "content-length" in headers:
            yield self._exactly(int(headers["content-length"]))
        else:
            while not self.at_end():
                yield self._buffer
                self._buffer = b""

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._fill()
        head, _, self._buffer = self._buffer.partition(end)
        return head

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _fill(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(f"the connection ended in the middle of an answer: {self._buffer!r}")
        self._buffer += data


def request_bytes(method: str, path: str, body: Mapping[str, Any] | bytes, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data
