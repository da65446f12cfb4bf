"""The answer on the wire, driven by an ASGI client whose every await the test controls."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from engine.api import (
    Capability,
    ChoiceFailed,
    EngineDead,
    EngineError,
    EngineNotReady,
    EngineOverloaded,
    InvalidConstraint,
    RequestTooLarge,
    UnsupportedByEngine,
)
from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.lifespan import Services
from service.metrics import Metrics
from service.settings import Settings
from service.tokenizer import ByteTokenizer

from .asgi import Client, Kind, answer, folded, host, make_job, outcomes, services_of, shortened, until

REFUSALS: list[EngineError] = [
    EngineOverloaded("full"),
    EngineNotReady("loading"),
    RequestTooLarge("long", "messages"),
    InvalidConstraint("bad", "response_format"),
    UnsupportedByEngine(Capability.CONSTRAINTS),
    EngineDead("dead"),
]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"n": 3, "prompts": 2},
        {"n": 4, "max_tokens": (1, 7, 3, 5)},
        {"n": 2, "stop": ("gh", "k")},
        {"n": 2, "stop": ("e",)},
    ],
    ids=str,
)
async def test_folded_stream_equals_the_body(kind: Kind, options: dict[str, Any]) -> None:
    options = {"max_tokens": (12,)} | options
    async with services_of(FakeEngine(EngineConfig(max_num_seqs=2))) as services:
        streamed = await answer(services, make_job(kind=kind, stream=True, usage=True, **options))
        whole = await answer(services, make_job(kind=kind, stream=False, **options))
    assert folded(streamed.data) == shortened(json.loads(whole.bodies[0]))
    assert whole.headers["content-length"] == str(len(whole.bodies[0]))
    assert outcomes(services) == {"ok": 2}


@pytest.mark.anyio
async def test_streams_headers_tell_proxies_not_to_buffer_and_come_before_any_text() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        client = await answer(services, make_job())
        whole = await answer(services, make_job(stream=False))
    assert client.messages[0]["type"] == "http.response.start"
    assert client.messages[0]["status"] == 200
    assert client.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-chorus-response-id": "id-1",
        "x-request-id": "req-1",
    }
    assert whole.headers["content-type"] == "application/json"
    assert whole.headers["x-chorus-response-id"] == "id-1"


@pytest.mark.anyio
async def test_headers_are_sent_in_the_first_silence_while_the_choices_still_wait_for_a_place() -> None:
    """Not before, so that a deadline in the queue can be a 503; not never, for proxies cut what is silent."""
    engine = FakeEngine(EngineConfig(max_num_seqs=1, stream_credit=4000))
    async with services_of(engine, ping_seconds=0.01) as services:
        client = Client()
        async with services.engine.submit(make_job(max_tokens=(4000,)).batch), anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(), client)
            await until(lambda: len(client.messages) > 1)
            assert client.messages[0]["type"] == "http.response.start" and client.bodies[0] == b": ping\n\n"
            assert services.engine.health().num_waiting == 1
            group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_success_is_said_once_at_the_very_end() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        client = await answer(services, make_job(2))
    assert client.data.count("[DONE]") == 1
    assert client.data[-1] == "[DONE]"
    assert [message["more_body"] for message in client.messages[1:]] == [True] * (len(client.messages) - 2) + [False]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_refusal_is_raised_before_the_first_byte(error: EngineError, stream: bool) -> None:
    engine = FakeEngine(EngineConfig())
    async with services_of(engine) as services:
        engine.refuse_next(error)
        client = Client()
        with pytest.raises(type(error)) as caught:
            await answer(services, make_job(stream=stream), client)
    assert caught.value is error
    assert client.messages == []
    assert outcomes(services) == {"refused": 1}


def fails_late(seed: int, position: int, num_prompt_tokens: int) -> int:
    return -1 if (seed, position) == (1, 3) else ord("a") + position % 26


@pytest.mark.anyio
async def test_late_failure_is_one_error_event_and_the_end() -> None:
    async with services_of(FakeEngine(EngineConfig(), rule=fails_late)) as services:
        client = await answer(services, make_job(3, max_tokens=(4000,)))
    *chunks, error = map(json.loads, client.data)
    assert error == {
        "error": {
            "message": "the model's output was not finite",
            "type": "server_error",
            "param": None,
            "code": "choice_failed",
        }
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert client.messages[-1]["more_body"] is False
    assert outcomes(services) == {"error": 1}


@pytest.mark.anyio
async def test_failure_of_a_body_that_is_not_streamed_is_raised_as_itself() -> None:
    async with services_of(FakeEngine(EngineConfig(), rule=fails_late)) as services:
        client = Client()
        with pytest.raises(ChoiceFailed):
            await answer(services, make_job(3, stream=False, max_tokens=(4000,)), client)
    assert client.messages == []
    assert outcomes(services) == {"error": 1}


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_death_of_the_engine_reaches_every_client(stream: bool) -> None:
    engine = FakeEngine(EngineConfig(stream_credit=1))
    clients = [Client() for _ in range(3)]
    failures: list[Exception] = []

    async def ask(client: Client) -> None:
        try:
            await answer(services, make_job(2, stream=stream, max_tokens=(4000,)), client)
        except EngineDead as error:
            failures.append(error)

    async with services_of(engine) as services, anyio.create_task_group() as group:
        for client in clients:
            group.start_soon(ask, client)
        await until(lambda: engine.health().generation_tokens > 20)
        engine.fail("out of memory")
    if stream:
        assert [json.loads(client.data[-1])["error"]["code"] for client in clients] == ["engine_dead"] * 3
    else:
        assert len(failures) == 3


STAGES = ["queued", "prefill", "decoding", "some ended"]


@pytest.mark.anyio
@pytest.mark.parametrize("yields", [True, False], ids=["send yields", "send never yields"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("stage", STAGES)
async def test_disconnect_stops_the_work_whatever_its_stage(stage: str, stream: bool, yields: bool) -> None:
    # those that hold the places stay ahead of no reader: else they would lend them
    credit = 4000 if stage == "queued" else 2
    engine = FakeEngine(EngineConfig(max_num_seqs=3, max_num_batched_tokens=1, stream_credit=credit))
    prompt = [1] * (2000 if stage == "prefill" else 3)
    limits = (2, 4000 - len(prompt)) if stage == "some ended" else (4000 - len(prompt),) * 2
    job = make_job(2, stream=stream, max_tokens=limits, prompt=prompt)
    stages: dict[str, Callable[[], bool]] = {
        "queued": lambda: engine.health().num_waiting == 2,
        "prefill": lambda: 0 < engine.health().prompt_tokens < 2000 and engine.health().num_running == 2,
        "decoding": lambda: engine.health().generation_tokens > 10,
        "some ended": lambda: engine.health().generation_tokens > 10 and engine.health().num_running == 1,
    }
    async with services_of(engine) as services:
        client = Client(yields=yields)
        async with anyio.create_task_group() as group:
            if stage == "queued":
                await group.start(hold_all_places, services)
            group.start_soon(answer, services, job, client)
            await until(stages[stage])
            client.gone.set()
            await until(lambda: outcomes(services) == {"cancelled": 1})
            assert engine.health().num_waiting == 0
            group.cancel_scope.cancel()
        assert engine.health().pages_held == 0
    assert not any(b"[DONE]" in body or b"error" in body for body in client.bodies)


async def hold_all_places(services: Services, *, task_status: TaskStatus[None]) -> None:
    async with services.engine.submit(make_job(3, max_tokens=(4000,)).batch):
        await until(lambda: services.engine.health().num_running == 3)
        task_status.started()
        await anyio.sleep_forever()


@pytest.mark.anyio
async def test_disconnect_of_one_client_is_not_noticed_by_another() -> None:
    engine = FakeEngine(EngineConfig(max_num_seqs=4))
    async with services_of(engine) as services:
        alone = await answer(services, make_job(2, max_tokens=(60,)))
        leaver, stayer = Client(), Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(3, max_tokens=(4000,)), leaver)
            group.start_soon(answer, services, make_job(2, max_tokens=(60,)), stayer)
            await until(lambda: len(stayer.bodies) > 3)
            leaver.gone.set()
        assert folded(stayer.data) == folded(alone.data)


@pytest.mark.anyio
async def test_send_that_never_yields_leaves_the_loop_to_others() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        client, other = Client(yields=False), Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(max_tokens=(4000,)), client)
            await until(lambda: bool(client.bodies))
            await answer(services, make_job(), other)
            assert "[DONE]" not in client.data
            client.gone.set()


@pytest.mark.anyio
async def test_slow_client_pauses_its_choices_and_then_gets_all_that_waits_in_one_send() -> None:
    engine = FakeEngine(EngineConfig(stream_credit=4))
    async with services_of(engine) as services:
        slow, quick = Client(), Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(2, max_tokens=(400,)), slow)
            await until(lambda: bool(slow.bodies))
            slow.hold = anyio.Event()
            made, num_sends = engine.health().generation_tokens, len(slow.bodies)
            await answer(services, make_job(max_tokens=(600,)), quick)
            # per choice: 4 updates in the engine's stream, 4 in its task, 4 before the writer, up to 8 on their way
            assert engine.health().generation_tokens - made <= 600 + 2 * 20
            slow.hold.set()
        assert len(folded(slow.data)["choices"][1]["text"]) == 400
        assert slow.bodies[num_sends + 1].count(b"data: ") >= 8


@pytest.mark.anyio
async def test_one_log_line_tells_all_but_the_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chorus.request")
    async with services_of(FakeEngine(EngineConfig())) as services:
        await answer(services, make_job(2, max_tokens=(5,)))
        await answer(services, make_job(2, stream=False))
        client = Client()
        client.gone.set()
        await answer(services, make_job(max_tokens=(4000,), stream=False), client)
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "chorus.request"]
    assert [(line["outcome"], line["status"]) for line in lines] == [("ok", 200), ("ok", 200), ("cancelled", 499)]
    assert {key: lines[0][key] for key in lines[0] if not key.endswith("_ms")} == {
        "response_id": "id-1",
        "request_id": "req-1",
        "key": None,
        "model": "m",
        "kind": "chat",
        "n": 2,
        "prompts": 1,
        "stream": True,
        "seed": 0,
        "outcome": "ok",
        "status": 200,
        "error": None,
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "cached_tokens": 0,
    }
    for line in lines[:2]:
        assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]


@pytest.mark.trio
async def test_the_log_line_tells_waiting_from_computing(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Times are by the system's clock, so a jumping one leaves them near zero; but a wait that never ended is none."""
    caplog.set_level(logging.INFO, "chorus.request")
    engine = FakeEngine(EngineConfig(max_num_seqs=1), step_seconds=40)
    async with services_without_limit(engine) as services, anyio.create_task_group() as group:
        group.start_soon(answer, services, make_job(max_tokens=(3,)))
        await anyio.sleep(1)
        client = Client()
        group.start_soon(answer, services, make_job(max_tokens=(3,)), client)
        await anyio.sleep(50)
        client.gone.set()
    left, served = [record.__dict__["fields"] for record in caplog.records if record.name == "chorus.request"]
    assert (left["queue_ms"], left["first_token_ms"]) == (None, None)
    assert served["queue_ms"] is not None and served["first_token_ms"] is not None


@pytest.mark.trio
async def test_silence_is_filled_with_comments_between_events(autojump_clock: object) -> None:
    async with services_without_limit(FakeEngine(EngineConfig(), step_seconds=40)) as services:
        client = await answer(services, make_job(max_tokens=(3,)))
    # 40 s between tokens and a comment after each 15 s of silence; never inside an event
    assert [body == b": ping\n\n" for body in client.bodies] == [False, True, True, False, True, True, False, False]
    assert folded(client.data)["choices"][0]["text"] == "def"


@asynccontextmanager
async def services_without_limit(engine: FakeEngine) -> AsyncIterator[Services]:
    services = Services(Settings(ping_seconds=15), engine, Metrics(engine), ByteTokenizer())
    async with anyio.create_task_group() as group:
        await group.start(host, engine)
        await engine.wait_ready()
        yield services
        engine.stop()
