"""A server of one's own making on a real socket: what it says, and when, is the test's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import h11
from anyio.abc import SocketAttribute, SocketStream

from engine.api import ChatPrompt, ChoiceStream, ChoiceUpdate, Request, SamplingParams, TextPrompt
from engine.config import EngineConfig, UpstreamConfig
from engine.upstream.engine import UpstreamEngine

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Wire:
    """One request's connection, to answer on. gone: set once the client has closed it."""

    def __init__(self, stream: SocketStream, body: dict[str, Any]) -> None:
        self._stream = stream
        self.body = body
        self.headers: dict[str, str] = {}

    async def head(self) -> None:
        await self._stream.send(HEAD)

    async def chunk(self, data: bytes) -> None:
        """Bytes of the body, as they are."""
        await self._stream.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, value: object) -> None:
        data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        await self.chunk(f"data: {data}\n\n".encode())

    async def said(self, *texts: str, finish: str | None = None) -> None:
        """Content of a chat, an event for each text."""
        for text in texts:
            await self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        if finish is not None:
            await self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})

    async def end(self) -> None:
        await self._stream.send(END)

    async def refuse(self, status: int, body: object, **headers: str) -> None:
        data = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}", *(f"{k}: {v}" for k, v in headers.items())]
        await self._stream.send("\r\n".join(lines).replace("_", "-").encode() + b"\r\n\r\n" + data)

    async def cut(self) -> None:
        await self._stream.aclose()

    async def wait_closed(self) -> None:
        """Until the client has let go of the connection."""
        try:
            while await self._stream.receive():
                pass
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass


Answering = Callable[[Wire], Awaitable[None]]


@dataclass
class Scripted:
    """answer: what it does with each POST. is_well: whether it lists its model. connections, bodies: all that came."""

    answer: Answering
    is_well: bool = True
    url: str = ""
    num_connections: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def serve(self, stream: SocketStream) -> None:
        self.num_connections += 1
        try:
            async with stream:
                await self._serve_requests(stream)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.RemoteProtocolError):
            pass

    async def _serve_requests(self, stream: SocketStream) -> None:
        connection = h11.Connection(h11.SERVER)
        while True:
            request, body = await _read(connection, stream)
            if request.method == b"GET":
                await self._answer_get(request, Wire(stream, {}))
            else:
                self.bodies.append(json.loads(body))
                self.paths.append(request.target.decode())
                self.headers.append({name.decode(): value.decode() for name, value in request.headers})
                await self.answer(Wire(stream, self.bodies[-1]))
            connection = h11.Connection(h11.SERVER)  # the answer did not go through the old one

    async def _answer_get(self, request: h11.Request, wire: Wire) -> None:
        if request.target == b"/v1/models" and self.is_well:
            await wire.refuse(200, {"data": [{"id": "served"}]})
        else:
            await wire.refuse(404 if self.is_well else 503, {})


async def _read(connection: h11.Connection, stream: SocketStream) -> tuple[h11.Request, bytes]:
    request, body = None, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive())
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            assert isinstance(event, h11.EndOfMessage) and request is not None, event
            return request, body


@asynccontextmanager
async def fleet(*answers: Answering, **config: Any) -> AsyncIterator[tuple[UpstreamEngine, list[Scripted]]]:
    """A running engine in front of one server for each; all are up."""
    servers = [Scripted(answer) for answer in answers]
    limits = EngineConfig(served_model_name="", max_num_seqs=64, max_queued_seqs=64)
    async with AsyncExitStack() as listeners, anyio.create_task_group() as group:
        with anyio.fail_after(20):
            for server in servers:
                listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
                await listeners.enter_async_context(listener)
                server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
                group.start_soon(listener.serve, server.serve)
            urls = tuple(server.url for server in servers)
            engine = UpstreamEngine(limits, UpstreamConfig(urls, **{"poll_seconds": 0.02, **config}))
            await group.start(lambda task_status: engine.run(task_status=task_status))
            await engine.wait_ready()
            await until(lambda: all(upstream.is_up for upstream in engine.health().upstreams))
            yield engine, servers
            engine.stop()
            group.cancel_scope.cancel()


def chat(n: int = 1, text: str = "hi", **sent: object) -> Request:
    choices = tuple(SamplingParams(seed=7 + k) for k in range(n))
    return Request("m", ChatPrompt(({"role": "user", "content": text},)), choices, sent=sent)


def completion(n: int = 1, text: str = "hi", **params: Any) -> Request:
    return Request("m", TextPrompt(text), tuple(SamplingParams(seed=7 + k, **params) for k in range(n)))


async def read(stream: ChoiceStream) -> tuple[str, ChoiceUpdate]:
    """A choice's text and last update."""
    updates = [update async for update in stream]
    return "".join(update.text for update in updates), updates[-1]


async def ask(engine: UpstreamEngine, request: Request) -> list[tuple[str, ChoiceUpdate]]:
    async with engine.submit([request]) as submission:
        return [await read(stream) for stream in submission.choices]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 nothing announces it
        await anyio.sleep(0.001)


def answering(steps: Sequence[object]) -> Answering:
    """The events of `steps`, and the end."""

    async def answer(wire: Wire) -> None:
        await wire.head()
        for step in steps:
            await wire.event(step)
        await wire.end()

    return answer
