"""What ends a running request from outside: its owner, its deadline, a reader that stands still, a hung engine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import anyio
import pytest

from engine.api import ChoiceFailed, EngineDead
from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.auth import Caller, Limits
from service.errors import ApiError
from service.job import GenerationJob
from service.lifespan import Services
from service.running import RunningRequest, deadline_passed

from .asgi import Client, answer, folded, make_job, outcomes, services_of, until

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])

ENDLESS = 4000


def only(services: Services, owner: str = "") -> RunningRequest:
    (running,) = services.running.of(owner)
    return running


def choices_of(client: Client) -> list[dict[str, Any]]:
    """Text and ends of all choices, from either kind of answer; a stream must have ended properly."""
    if client.headers["content-type"].startswith("text/event-stream"):
        choices: list[dict[str, Any]] = folded(client.data)["choices"]
        return choices
    return [choice | {"text": choice["message"]["content"]} for choice in json.loads(client.bodies[0])["choices"]]


@both_modes
async def test_a_request_that_is_cancelled_answers_with_what_was_made(stream: bool) -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        client = Client()
        async with anyio.create_task_group() as group:
            group.start_soon(
                answer, services, make_job(2, stream=stream, max_tokens=(3, ENDLESS), usage=stream), client
            )
            await until(lambda: services.engine.health().generation_tokens > 20)
            assert only(services).cancel()
        choices = choices_of(client)
        assert [choice["end_reason"] for choice in choices] == ["length", "cancelled"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
        assert choices[0]["text"] == "def" and choices[1]["text"].startswith("efghijkl")
        usage = json.loads(client.data[-2] if stream else client.bodies[0])["usage"]
        assert usage["completion_tokens"] == sum(len(choice["text"]) for choice in choices)
        assert outcomes(services) == {"cancelled": 1}
        assert services.running.of("") == []


@both_modes
async def test_one_choice_can_be_cancelled_and_the_others_go_on(stream: bool) -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        client = Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(3, stream=stream, max_tokens=(600, ENDLESS, 2)), client)
            await until(lambda: services.engine.health().num_running == 2)
            await until(lambda: bool(services.running.of("")) and only(services).cancel(2) is False)
            assert only(services).cancel(1)
        choices = choices_of(client)
        assert [choice["end_reason"] for choice in choices] == ["length", "cancelled", "length"]
        assert len(choices[0]["text"]) == 600 and 0 < len(choices[1]["text"]) < ENDLESS
        assert outcomes(services) == {"ok": 1}


@both_modes
async def test_a_request_is_cancelled_while_it_waits_for_a_place(stream: bool) -> None:
    async with services_of(FakeEngine(EngineConfig(max_num_seqs=1, stream_credit=ENDLESS))) as services:
        client = Client()
        async with services.engine.submit(make_job(max_tokens=(ENDLESS,)).batch), anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(2, stream=stream), client)
            await until(lambda: services.engine.health().num_waiting == 2)
            assert only(services).cancel()
            await until(lambda: services.engine.health().num_waiting == 0)
        assert [(choice["text"], choice["end_reason"]) for choice in choices_of(client)] == [("", "cancelled")] * 2


async def test_one_owner_does_not_see_anothers_requests() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services, anyio.create_task_group() as group:
        group.start_soon(answer, services, replace(make_job(max_tokens=(ENDLESS,)), caller=Caller("a")))
        group.start_soon(
            answer, services, replace(make_job(max_tokens=(ENDLESS,)), caller=Caller("b"), response_id="2")
        )
        await until(lambda: len(list(services.running)) == 2)
        assert services.running.find("id-1", "b") is None and services.running.find("2", "a") is None
        assert services.running.find("id-1", "a") is only(services, "a")
        group.cancel_scope.cancel()


def with_timeout(job: GenerationJob, seconds: float) -> GenerationJob:
    return replace(job, received_at=time.monotonic(), timeout=seconds)


@both_modes
async def test_at_the_deadline_the_answer_ends_with_what_there_is(stream: bool) -> None:
    """The engine would go on for ever as far as this test is concerned: the deadline alone ends it."""
    config = EngineConfig(max_num_seqs=2, max_model_len=10**9)
    async with services_of(FakeEngine(config)) as services:
        job = with_timeout(make_job(3, stream=stream, max_tokens=(2, 10**8, 10**8)), 0.1)
        choices = choices_of(await answer(services, job))
        assert [choice["end_reason"] for choice in choices] == ["length", "deadline", "deadline"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
        assert choices[0]["text"] == "de" and all(choice["text"] for choice in choices)
        assert outcomes(services) == {"ok": 1}


@both_modes
async def test_a_deadline_in_the_queue_is_503_and_costs_no_step(stream: bool) -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=10**9, stream_credit=10**9)
    async with services_of(FakeEngine(config)) as services:
        async with services.engine.submit(make_job(max_tokens=(10**8,)).batch):
            await until(lambda: services.engine.health().generation_tokens > 0)
            client = Client()
            with pytest.raises(ApiError) as caught:
                await answer(services, with_timeout(make_job(2, stream=stream), 0.01), client)
            assert (caught.value.info.status, caught.value.info.code) == (503, "deadline_exceeded")
            assert caught.value.info.headers["Retry-After"] == "1"
            assert client.messages == []
            assert services.engine.health().num_waiting == 0
            assert services.engine.health().prompt_tokens == 3
        assert outcomes(services) == {"error": 1}


async def test_a_deadline_in_the_queue_is_an_error_event_once_a_comment_has_been_sent() -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=10**9, stream_credit=10**9)
    engine, client = FakeEngine(config), Client()
    first = make_job(max_tokens=(10**8,))
    async with services_of(engine, ping_seconds=0.01) as services, engine.submit(first.batch):
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, with_timeout(make_job(2), 1000), client)
            await until(lambda: bool(client.bodies))
            only(services).fail(deadline_passed())
        (event,) = client.data
        assert json.loads(event)["error"]["code"] == "deadline_exceeded"


@both_modes
async def test_a_deadline_that_has_passed_already_is_503(stream: bool) -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        job = replace(make_job(stream=stream), received_at=time.monotonic() - 2, timeout=1)
        with pytest.raises(ApiError) as caught:
            await answer(services, job)
        assert (caught.value.info.status, caught.value.info.code) == (503, "deadline_exceeded")
        assert services.engine.health().num_steps == 0


async def test_a_reader_that_stands_still_is_cut_and_everything_freed() -> None:
    engine = FakeEngine(EngineConfig(stream_credit=4))
    async with services_of(engine, write_timeout=0.02) as services:
        client = Client()
        client.hold = anyio.Event()
        await answer(services, make_job(4, max_tokens=(ENDLESS,)), client)  # ends although nothing is ever taken
        assert engine.health().pages_held == 0 and engine.health().num_running == 0
        assert services.running.of("") == []
        assert outcomes(services) == {"cancelled": 1}
        assert client.messages == []


class BrokenClient(Client):
    """As hypercorn's send on asyncio, where the kernel has given the connection up."""

    async def send(self, message: Any) -> None:
        if self.messages:
            raise TimeoutError(110, "Connection timed out")
        await super().send(message)


@both_modes
async def test_a_connection_that_the_kernel_has_given_up_is_a_client_that_left(stream: bool) -> None:
    """Else it would be counted, and logged with a traceback, as an error of the server's."""
    engine = FakeEngine(EngineConfig())
    async with services_of(engine) as services:
        await answer(services, make_job(2, stream=stream, max_tokens=(300,)), BrokenClient())
        assert outcomes(services) == {"cancelled": 1}
        assert engine.health().num_running == 0


class ShieldedClient(Client):
    """As hypercorn's send on trio: nobody can cancel it."""

    async def send(self, message: Any) -> None:
        with anyio.CancelScope(shield=True):
            await super().send(message)


async def test_a_send_that_cannot_be_cancelled_does_not_keep_the_engines_memory() -> None:
    engine = FakeEngine(EngineConfig(stream_credit=4))
    async with services_of(engine, write_timeout=0.02) as services:
        client = ShieldedClient()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(4, max_tokens=(ENDLESS,)), client)
            await until(lambda: bool(client.messages))
            client.hold = anyio.Event()
            await until(lambda: engine.health().num_running == 0)
            assert engine.health().pages_held == 0
            client.hold.set()  # the socket dies


async def test_a_reader_that_is_slow_but_takes_something_is_not_cut() -> None:
    async with services_of(FakeEngine(EngineConfig()), write_timeout=30) as services:
        client = Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(max_tokens=(50,)), client)
            for _ in range(5):
                await until(lambda: bool(client.messages))
                client.hold = anyio.Event()
                await anyio.lowlevel.checkpoint()
                client.hold.set()
        assert len(folded(client.data)["choices"][0]["text"]) == 50


@both_modes
async def test_an_engine_that_hangs_fails_every_request(stream: bool) -> None:
    """The watch itself is tested with the app; here what it does to a request."""
    hang = anyio.Event()
    engine = FakeEngine(EngineConfig(), pause=hang.wait)
    async with services_of(engine) as services:
        client = Client()
        failures: list[Exception] = []

        async def ask() -> None:
            try:
                await answer(services, make_job(2, stream=stream), client)
            except EngineDead as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: bool(client.bodies) if stream else engine.health().generation_tokens > 0)
            only(services).fail(EngineDead("it hangs"))
        if stream:
            assert json.loads(client.data[-1])["error"] == {
                "message": "it hangs",
                "type": "server_error",
                "param": None,
                "code": "engine_dead",
            }
        else:
            assert [str(failure) for failure in failures] == ["it hangs"]
        hang.set()
        assert outcomes(services) == {"error": 1}


async def test_limits_of_requests_at_once_and_tokens_are_429_before_anything_is_queued() -> None:
    caller = Caller("a", limits=Limits(max_concurrent=1))
    async with services_of(FakeEngine(EngineConfig())) as services, anyio.create_task_group() as group:
        group.start_soon(answer, services, replace(make_job(max_tokens=(ENDLESS,)), caller=caller))
        await until(lambda: bool(services.running.of("a")))
        with pytest.raises(ApiError) as caught:
            await answer(services, replace(make_job(), caller=caller))
        assert caught.value.info.status == 429 and caught.value.info.headers["Retry-After"] == "1"
        await answer(services, make_job())  # others are not concerned
        only(services, "a").cancel()
        await until(lambda: not services.running.of("a"))
        await answer(services, replace(make_job(), caller=caller))
        poor = Caller("p", limits=Limits(tokens_per_minute=6))
        await answer(services, replace(make_job(max_tokens=(5,)), caller=poor))
        with pytest.raises(ApiError) as caught:
            await answer(services, replace(make_job(), caller=poor))  # 3 + 5 are spent, of 6
        assert 40 <= int(caught.value.info.headers["Retry-After"]) <= 60
        assert outcomes(services)["refused"] == 2


async def test_metrics_say_why_choices_ended_and_count_what_was_cut_short() -> None:
    async with services_of(FakeEngine(EngineConfig(), rule=lambda seed, *_: -1 if seed == 3 else 97)) as services:
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(3, max_tokens=(2, ENDLESS, ENDLESS)))
            await until(lambda: services.engine.health().generation_tokens > 20)
            only(services).cancel()
        client = Client()
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, make_job(2, max_tokens=(ENDLESS,)), client)
            await until(lambda: bool(client.bodies))
            client.gone.set()
        with pytest.raises(ChoiceFailed):
            await answer(services, make_job(4, stream=False, max_tokens=(ENDLESS,)))
        lines = services.metrics.render().decode().splitlines()
        ends = {line.split('"')[1]: int(float(line.split()[-1])) for line in lines if "ended_total{" in line}
        assert ends == {"stop": 0, "length": 1, "deadline": 0, "cancelled": 4, "error": 4}
        made = next(float(line.split()[-1]) for line in lines if line.startswith("chorus_generation_tokens_total"))
        assert made == services.engine.health().generation_tokens
