"""One job answered to an ASGI client whose every await the test controls, over a running fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from engine.api import EngineDead, Request, SamplingParams, TokenPrompt
from engine.fake import FakeEngine
from service.choice_text import TextRules
from service.event_stream import GenerationResponse
from service.job import GenerationJob
from service.lifespan import Services
from service.metrics import Metrics
from service.settings import Settings
from service.tokenizer import ByteTokenizer

Kind = Literal["chat", "completion"]


class Client:
    """hold: sends wait for it. yields: whether `send` is a checkpoint (hypercorn's is none after a reset)."""

    def __init__(self, *, yields: bool = True) -> None:
        self.messages: list[Any] = []
        self.gone = anyio.Event()
        self.hold: anyio.Event | None = None
        self._yields = yields

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._yields:
            await checkpoint()
            if self.hold is not None:
                await self.hold.wait()
        self.messages.append(message)

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def data(self) -> list[str]:
        """The data of each SSE event; comments are left out."""
        events = b"".join(self.bodies).decode().split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith(("data: ", ": ping")) for event in events)
        return [event.removeprefix("data: ") for event in events if event.startswith("data: ")]


def make_job(
    n: int = 1,
    *,
    kind: Kind = "chat",
    stream: bool = True,
    max_tokens: Sequence[int] = (5,),
    prompt: Sequence[int] = (1, 2, 3),
    prompts: int = 1,
    stop: tuple[str, ...] = (),
    usage: bool = False,
) -> GenerationJob:
    """max_tokens: one for all choices, or one each."""
    limits = max_tokens if len(max_tokens) == n else [max_tokens[0]] * n
    choices = tuple(SamplingParams(seed=k, max_tokens=limit) for k, limit in enumerate(limits))
    batch = (Request("m", TokenPrompt(tuple(prompt)), choices),) * prompts
    return GenerationJob(kind, "id-1", 1, "m", batch, n, TextRules(stop=stop), stream, usage, "req-1")


@asynccontextmanager
async def services_of(engine: FakeEngine, **settings: Any) -> AsyncIterator[Services]:
    """A running engine; when all is over it must hold nothing."""
    services = Services(Settings(**settings), engine, Metrics(engine), ByteTokenizer())
    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            await group.start(host, engine)
            await engine.wait_ready()
            yield services
        health = engine.health()
        assert (health.num_running, health.num_waiting, health.pages_held) == (0, 0, 0)
        engine.stop()


async def host(engine: FakeEngine, *, task_status: TaskStatus[None]) -> None:
    """As the app does: its death is for the requests to tell."""
    with suppress(EngineDead):
        await engine.run(task_status=task_status)


async def answer(services: Services, job: GenerationJob, client: Client | None = None) -> Client:
    client = client or Client()
    await GenerationResponse(job, services)({}, client.receive, client.send)  # type: ignore[arg-type]
    return client


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await checkpoint()


def folded(data: Sequence[str]) -> dict[str, Any]:
    """A stream's events as the body that it stands for."""
    assert data[-1] == "[DONE]"
    chunks = [json.loads(one) for one in data[:-1]]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = choices.setdefault(choice["index"], {"text": ""})
        whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for key in ("finish_reason", "stop_reason", "end_reason"):
            whole[key] = choice.get(key)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1].get("usage")}


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            **{key: choice[key] for key in ("finish_reason", "stop_reason", "end_reason")},
        }
        for choice in body["choices"]
    ]
    return {"choices": choices, "usage": body["usage"]}


def outcomes(services: Services) -> dict[str, float]:
    lines = services.metrics.render().decode().splitlines()
    counts = {
        line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("chorus_requests_total{")
    }
    return {outcome: count for outcome, count in counts.items() if count}
