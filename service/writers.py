"""What a client gets: server-sent events while they come, or one JSON body at the end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import msgspec
from litestar.types import Send
from msgspec import Struct

from service.choice_text import ChoiceEvent
from service.errors import error_body
from service.logs import log_unexpected
from service.presenter import Presenter

logger = logging.getLogger("chorus.request")
encoder = msgspec.json.Encoder()

_DONE = b"data: [DONE]\n\n"
_HOLE = "\0"
"""No other value of a chunk is this string."""

Start = Callable[[Send, int | None], Awaitable[None]]
"""Sends status and headers; the number is the body's length where that is known."""


class Writer(Protocol):
    """Write every batch of events, end. failure: what ended the events early; raised where nothing was sent before."""

    async def write(self, batch: list[ChoiceEvent]) -> None: ...

    async def end(self, failure: Exception | None) -> None: ...


class StreamWriter:
    """Server-sent events; all that waits goes out in one send. A failure ends it, without [DONE].

    Status and headers go out with the first event, or the first silence: what goes wrong in the queue is an HTTP error.
    """

    def __init__(self, start: Start, presenter: Presenter, send: Send, request_id: str | None) -> None:
        self._start = start
        self._presenter = presenter
        self._send = send
        self._request_id = request_id
        self._has_started = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    async def write(self, batch: list[ChoiceEvent]) -> None:
        # a comment in times of silence keeps proxies from cutting the stream, and lets a hidden disconnect show
        body = b"".join(self._encoded(batch)) if batch else b": ping\n\n"
        if body:
            await self._send_body(body, more=True)

    def _encoded(self, batch: list[ChoiceEvent]) -> Iterator[bytes]:
        presenter = self._presenter
        for event in batch:
            if presenter.adds_only_text(event):
                presenter.count(event)
                before, after = self._frames.get(event.index) or self._frame(event.index)
                yield before
                yield encoder.encode(event.text)
                yield after
            else:
                for chunk in presenter.chunks(event):
                    yield self._sse(chunk)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in the chunks of a choice that bring nothing else."""
        chunk = self._sse(self._presenter.text_chunk(index, _HOLE))
        before, _, after = chunk.partition(encoder.encode(_HOLE))
        self._frames[index] = before, after
        return before, after

    async def end(self, failure: Exception | None) -> None:
        if failure is None:
            body = b"".join(map(self._sse, self._presenter.last_chunks()))
            body += _DONE if self._presenter.says_done else b""
        elif not self._has_started:
            raise failure
        else:
            info = error_body(failure).identified(self._request_id)
            if info.unexpected:
                log_unexpected(logger, "unexpected error in a stream", failure, request_id=self._request_id)
            body = b"".join(map(self._sse, self._presenter.failure_chunks(info)))
        await self._send_body(body, more=False)

    def _sse(self, chunk: Struct) -> bytes:
        name = self._presenter.event_name(chunk)
        before = b"" if name is None else b"event: " + name.encode() + b"\n"
        return before + b"data: " + encoder.encode(chunk) + b"\n\n"

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if not self._has_started:
            self._has_started = True
            await self._start(self._send, None)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class BodyWriter:
    """One JSON body, or the failure raised."""

    def __init__(self, start: Start, presenter: Presenter, send: Send) -> None:
        self._start = start
        self._presenter = presenter
        self._send = send

    async def write(self, batch: list[ChoiceEvent]) -> None:
        for event in batch:
            self._presenter.collect(event)

    async def end(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure
        body = encoder.encode(self._presenter.body())
        await self._start(self._send, len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
