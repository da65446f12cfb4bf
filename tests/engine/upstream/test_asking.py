"""What is asked of a server: no more than the client asked for, on as few connections as will do."""

from __future__ import annotations

import pytest

from engine.api import EndReason
from tests.engine.upstream.scripted import Wire, ask, chat, completion, fleet, read, until

pytestmark = pytest.mark.anyio

STANDARD = {"model", "messages", "prompt", "seed", "stream", "stream_options"}


async def well(wire: Wire) -> None:
    await wire.head()
    await wire.said("fine", finish="stop")
    await wire.event("[DONE]")
    await wire.end()


async def test_a_plain_request_has_openais_own_fields_and_no_others() -> None:
    async with fleet(well, api_key="secret") as (engine, servers):
        await ask(engine, chat(2))
        await ask(engine, completion(max_tokens=5))
        assert [set(body) - STANDARD for body in servers[0].bodies] == [set(), set(), {"max_tokens"}]
        assert servers[0].paths == ["/v1/chat/completions"] * 2 + ["/v1/completions"]
        assert sorted(body["seed"] for body in servers[0].bodies[:2]) == [7, 8]
        assert all("n" not in body and body["model"] == "served" for body in servers[0].bodies)
        assert {headers["authorization"] for headers in servers[0].headers} == {"Bearer secret"}


async def test_what_the_client_sent_goes_before_what_its_choices_say() -> None:
    async with fleet(well) as (engine, servers):
        await ask(engine, chat(temperature=1.0, top_k=3, tools=[{"type": "function"}], max_completion_tokens=4))
        body = servers[0].bodies[0]
        assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (1.0, 3, 4)
        assert body["tools"] == [{"type": "function"}]


async def test_connections_of_answers_that_ended_are_used_again_and_others_are_closed() -> None:
    closed = 0

    async def endless(wire: Wire) -> None:
        nonlocal closed
        await wire.head()
        await wire.said("a")
        await wire.wait_closed()
        closed += 1

    async with fleet(well, poll_seconds=60) as (engine, servers):
        await ask(engine, chat())
        before = servers[0].num_connections
        for _ in range(5):
            await ask(engine, chat())
        assert servers[0].num_connections == before
        servers[0].answer = endless
        async with engine.submit([chat(3)]) as submission:
            first, second, _ = submission.choices
            await second.__anext__()
            second.abort(EndReason.STOP)
            assert (await read(second))[1].end_reason is EndReason.STOP
            await until(lambda: closed == 1)
            assert (await first.__anext__()).text == "a"
        await until(lambda: closed == 3)
        servers[0].answer = well
        assert [text for text, _ in await ask(engine, chat())] == ["fine"]


async def test_prompts_that_begin_alike_go_to_one_server_and_others_are_spread() -> None:
    async with fleet(well, well, well) as (engine, servers):
        for turn in range(5):
            await ask(engine, completion(text="the same beginning " * 100 + f"turn {turn}"))
        assert sorted(len(server.bodies) for server in servers) == [0, 0, 5]
        for number in range(90):
            await ask(engine, completion(text=f"{number} prompt"))
        assert all(len(server.bodies) >= 10 for server in servers)


async def test_a_server_with_more_than_its_share_passes_its_prompts_on() -> None:
    async def endless(wire: Wire) -> None:
        await wire.head()
        await wire.said("a")
        await wire.wait_closed()

    async with fleet(endless, endless, endless) as (engine, _):
        async with engine.submit([chat() for _ in range(60)]):
            loads = [upstream.num_choices for upstream in engine.health().upstreams]
        assert sum(loads) == 60 and max(loads) <= 60 / 3 * 1.25 + 9
