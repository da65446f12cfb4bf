"""Servers that refuse, fail, or are not there: what is tried again, where, and what the client is told."""

from __future__ import annotations

import anyio
import pytest

from engine.api import (
    ChoiceFailed,
    EndReason,
    EngineError,
    EngineNotReady,
    EngineOverloaded,
    RequestRejected,
    RequestTooLarge,
)
from tests.engine.upstream.scripted import Wire, ask, chat, completion, fleet, read, until

pytestmark = pytest.mark.anyio


async def well(wire: Wire) -> None:
    await wire.head()
    await wire.said("fine", finish="stop")
    await wire.end()


def refusing(status: int, body: object, **headers: str):  # type: ignore[no-untyped-def]
    async def answer(wire: Wire) -> None:
        await wire.refuse(status, body, **headers)

    return answer


async def cut_at_once(wire: Wire) -> None:
    await wire.cut()


@pytest.mark.parametrize(
    ("status", "body", "error", "told"),
    [
        (400, {"error": {"message": "m", "param": "stop", "code": "bad"}}, RequestRejected, ("m", "stop", "bad")),
        (400, {"object": "error", "message": "m", "param": None, "code": 400}, RequestRejected, ("m", None, None)),
        (422, {"detail": "m"}, RequestRejected, ("m", None, None)),
        (413, "?", RequestRejected, ("the upstream has answered with status 413", None, None)),
        (
            400,
            {"error": {"message": "m", "param": "messages", "code": "context_length_exceeded"}},
            RequestTooLarge,
            ("m", "messages", None),
        ),
    ],
)
async def test_what_is_wrong_with_a_request_is_told_in_the_servers_words_and_tried_once(
    status: int, body: object, error: type[EngineError], told: tuple[str, str | None, str | None]
) -> None:
    async with fleet(refusing(status, body), refusing(status, body)) as (engine, servers):
        with pytest.raises(error) as caught:
            await ask(engine, chat())
        raised = caught.value
        assert (str(raised), getattr(raised, "param", None), getattr(raised, "code", None)) == told
        assert sum(len(server.bodies) for server in servers) == 1
        assert not any(upstream.is_open for upstream in engine.health().upstreams)


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, EngineOverloaded), (503, EngineNotReady), (502, EngineNotReady), (500, ChoiceFailed), (401, ChoiceFailed)],
)
async def test_a_server_that_cannot_now_gives_way_to_another(status: int, error: type[EngineError]) -> None:
    body = {"error": {"message": "not now"}}
    async with fleet(refusing(status, body, retry_after="7"), well) as (engine, servers):
        for number in range(4):  # some of them lead to the first, whose way goes on to the second
            assert [text for text, _ in await ask(engine, chat(text=f"prompt {number}"))] == ["fine"]
        servers[1].answer = servers[0].answer
        with pytest.raises(error) as caught:
            await ask(engine, chat(text="prompt 0"))
        if isinstance(caught.value, EngineOverloaded | EngineNotReady):
            assert caught.value.retry_after == 7
            assert str(caught.value) == "not now"


async def test_one_choice_that_is_refused_refuses_all_and_lets_go_of_the_rest() -> None:
    closed: list[int] = []
    others = anyio.Semaphore(0)

    async def answer(wire: Wire) -> None:
        if wire.body["seed"] == 8:
            for _ in range(2):
                await others.acquire()
            await wire.refuse(429, {"error": {"message": "full"}})
            return
        await wire.head()
        others.release()
        await wire.wait_closed()
        closed.append(wire.body["seed"])

    async with fleet(answer) as (engine, _):
        with pytest.raises(EngineOverloaded, match="full"):
            await ask(engine, chat(3))
        await until(lambda: sorted(closed) == [7, 9])
        assert engine.health().num_running + engine.health().num_waiting == 0


async def test_a_choice_that_is_refused_while_others_speak_fails_with_that_reason() -> None:
    begun = anyio.Event()

    async def answer(wire: Wire) -> None:
        if wire.body["seed"] == 8:
            await begun.wait()
            await wire.refuse(429, {"error": {"message": "full"}})
        else:
            await well(wire)

    async with fleet(answer) as (engine, _), engine.submit([chat(2)]) as submission:
        assert (await read(submission.choices[0]))[0] == "fine"
        begun.set()
        _, last = await read(submission.choices[1])
        assert last.end_reason is EndReason.ERROR and isinstance(last.cause, EngineOverloaded)


async def test_nothing_is_tried_again_once_something_has_been_said() -> None:
    async def answer(wire: Wire) -> None:
        await wire.head()
        await wire.said("a")
        await wire.cut()

    async with fleet(answer, answer) as (engine, servers):
        ((text, last),) = await ask(engine, chat())
        assert (text, last.end_reason) == ("a", EndReason.ERROR)
        assert "lost" in str(last.error)
        assert sum(len(server.bodies) for server in servers) == 1


@pytest.mark.parametrize("with_head", [False, True])
async def test_a_connection_that_is_lost_before_that_is_tried_elsewhere(with_head: bool) -> None:
    async def answer(wire: Wire) -> None:
        if with_head:
            await wire.head()
            await wire.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await wire.cut()

    async with fleet(answer, well) as (engine, _):
        for number in range(4):
            assert [text for text, _ in await ask(engine, chat(text=f"prompt {number}"))] == ["fine"]


@pytest.mark.parametrize("error", [{"message": "boo", "code": 429}, {"message": "boo", "type": "rate_limit_error"}])
async def test_an_error_in_the_stream_is_a_refusal_while_nothing_has_been_said(error: object) -> None:
    async def answer(wire: Wire) -> None:
        await wire.head()
        await wire.event({"error": error})
        await wire.end()

    async with fleet(answer) as (engine, _), engine.submit([chat()]) as submission:
        _, last = await read(submission.choices[0])
        assert isinstance(last.cause, EngineOverloaded) and str(last.cause) == "boo"


async def test_a_connection_that_was_given_up_meanwhile_is_made_anew() -> None:
    async def once_cut(wire: Wire) -> None:
        await (cut_at_once(wire) if len(servers[0].bodies) == 1 else well(wire))

    async with fleet(once_cut) as (engine, servers):
        assert [text for text, _ in await ask(engine, chat())] == ["fine"]
        assert len(servers[0].bodies) == 2
        servers[0].answer = cut_at_once
        with pytest.raises(EngineNotReady):
            await ask(engine, chat())
        assert len(servers[0].bodies) == 4


async def test_tries_are_bounded() -> None:
    async with fleet(*[cut_at_once] * 5, max_retries=2) as (engine, servers):
        with pytest.raises(EngineNotReady):
            await ask(engine, chat())
        assert sum(len(server.bodies) for server in servers) == 3


async def test_a_server_that_keeps_failing_gets_nothing_until_it_has_had_time_to_recover() -> None:
    async with fleet(refusing(500, {}), well, max_retries=1) as (engine, servers):
        for number in range(40):
            await ask(engine, chat(text=f"prompt {number}"))
        assert len(servers[0].bodies) == 3
        (first, second) = engine.health().upstreams
        assert (first.is_open, second.is_open) == (True, False)
        assert first.requests["failed"] == 3 and second.requests["ok"] == 40


async def test_while_none_is_up_that_is_the_reason_and_it_is_ready_again_by_itself() -> None:
    async with fleet(well) as (engine, servers):
        servers[0].is_well = False
        await until(lambda: engine.health().reason is not None)
        assert "answers with status 503" in str(engine.health().reason)
        with pytest.raises(EngineNotReady, match="no upstream is up"):
            await ask(engine, chat())
        servers[0].is_well = True
        await until(lambda: engine.health().reason is None)
        assert [text for text, _ in await ask(engine, chat())] == ["fine"]


async def test_a_model_that_no_server_has_is_said_to_be_missing() -> None:
    from engine.config import EngineConfig, UpstreamConfig
    from engine.upstream.engine import UpstreamEngine

    async with fleet(well) as (_, servers), anyio.create_task_group() as group:
        engine = UpstreamEngine(EngineConfig(), UpstreamConfig((servers[0].url,), model="other", poll_seconds=0.02))
        await group.start(lambda task_status: engine.run(task_status=task_status))
        await until(lambda: "it has no model other" in str(engine.health().reason))
        engine.stop()


async def test_an_upstream_that_nobody_listens_at_is_down_at_the_first_request() -> None:
    async with fleet(well, well, poll_seconds=60) as (engine, servers):
        await until(lambda: sum(server.num_connections for server in servers) >= 2)
        for upstream in engine._fleet.upstreams[:1]:
            engine._fleet._by_url[upstream.url] = upstream
            upstream.url = "http://127.0.0.1:9"  # where nobody listens
        for number in range(6):
            assert [text for text, _ in await ask(engine, completion(text=f"prompt {number}"))]
        assert [upstream.is_up for upstream in engine.health().upstreams] == [False, True]
