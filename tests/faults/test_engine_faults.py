"""Faults of the engine, injected below the real engine thread, and what clients and probes see of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

import engine.thread
from service.settings import Settings
from tests.service.apps import SETTINGS, check_error
from tests.service.asgi import make_job, until
from tests.service.inloop import app_and_client

from .runners import FAULTY_SEED, FaultyRunner, GatedRunner, LetterRunner, NotANumberRunner, engine_of

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "org/m", "prompt": "hello", "max_tokens": 6, "seed": 1}
LIMITED = Settings(engine="fake", served_model_name="org/m", step_timeout=60)


def raises(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Of a whole answer, or of a stream whose headers were sent."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last, end = response.text.split("\n\n")
        assert end == "" and not any("[DONE]" in chunk or '"finish_reason":"' in chunk for chunk in chunks)
        error: dict[str, Any] = json.loads(last.removeprefix("data: "))["error"]
        return error
    return check_error(response, status)


@both_modes
async def test_a_step_that_raises_ends_every_request_with_an_error_and_liveness_with_503(stream: bool) -> None:
    runner = FaultyRunner(raises(RuntimeError("secret detail")))
    deaths: list[str] = []
    async with app_and_client(SETTINGS, engine_of(runner)) as (app, client):

        async def on_death() -> None:
            deaths.append("dead")

        app.state.services.on_death = on_death
        answers: list[httpx.Response] = []

        async def ask(seed: int) -> None:
            body = BODY | {"seed": seed, "stream": stream, "n": 2, "max_tokens": 500}
            answers.append(await client.post(PATH, json=body))

        async with anyio.create_task_group() as group:
            for seed in (1, 50, FAULTY_SEED):
                group.start_soon(ask, seed)
        for response in answers:
            error = error_of(response, 503)
            assert error["code"] == "engine_dead" and "secret" not in error["message"]
        for path in ("/health/live", "/health/ready", "/health"):
            check_error(await client.get(path), 503, code="engine_dead")
        refused = await client.post(PATH, json=BODY)
        check_error(refused, 503, code="engine_dead")
        assert refused.headers["x-should-retry"] == "false"
        await until(lambda: bool(deaths))


@both_modes
async def test_out_of_memory_fails_the_requests_of_that_step_and_the_engine_goes_on(stream: bool) -> None:
    runner = FaultyRunner(raises(MemoryError("secret detail")))
    async with app_and_client(SETTINGS, engine_of(runner)) as (app, client):
        alone = (await client.post(PATH, json=BODY)).json()["choices"]
        failed = await client.post(PATH, json=BODY | {"seed": FAULTY_SEED, "stream": stream})
        error = error_of(failed, 500)
        assert error["code"] == "choice_failed" and "memory" in error["message"] and "secret" not in error["message"]
        assert (await client.post(PATH, json=BODY)).json()["choices"] == alone
        assert (await client.get("/health/live")).status_code == 200
        await until(lambda: app.state.services.engine.health().pages_held == 0)


@both_modes
async def test_logits_that_are_no_numbers_fail_their_choice_and_with_it_its_request_alone(stream: bool) -> None:
    async with app_and_client(SETTINGS, engine_of(NotANumberRunner())) as (app, client):
        alone = (await client.post(PATH, json=BODY | {"n": 2})).json()["choices"]
        answers: dict[int, httpx.Response] = {}

        async def ask(seed: int, body: dict[str, Any]) -> None:
            answers[seed] = await client.post(PATH, json=BODY | {"seed": seed, "n": 2} | body)

        async with anyio.create_task_group() as group:
            group.start_soon(ask, 1, {})
            # long: its sibling shall not have ended before the failure is seen
            group.start_soon(ask, FAULTY_SEED, {"stream": stream, "max_tokens": 100})
            group.start_soon(ask, FAULTY_SEED - 1, {"fan_out": {"on_error": "isolate"}})
        assert answers[1].json()["choices"] == alone
        failed = error_of(answers[FAULTY_SEED], 500)
        assert failed["code"] == "choice_failed"
        isolated = answers[FAULTY_SEED - 1].json()["choices"]
        assert [choice["end_reason"] for choice in isolated] == ["length", "error"]
        assert len(isolated[1]["text"]) == 3 and isolated[1]["error"]["code"] == "choice_failed"
        await until(lambda: app.state.services.engine.health().pages_held == 0)


async def test_a_request_that_no_pool_could_hold_is_refused_and_a_crowd_gets_through_a_small_one() -> None:
    runner = LetterRunner(num_pages=8)
    async with app_and_client(SETTINGS, engine_of(runner)) as (app, client):
        check_error(await client.post(PATH, json=BODY | {"max_tokens": 300}), 400, "max_tokens")
        alone = (await client.post(PATH, json=BODY | {"max_tokens": 100})).json()["choices"][0]["text"]
        texts = []

        async def ask() -> None:
            response = await client.post(PATH, json=BODY | {"max_tokens": 100, "n": 3})
            texts.append(response.json()["choices"][0]["text"])

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        assert texts == [alone] * 5
        await until(lambda: app.state.services.engine.health().pages_held == 0)


@both_modes
async def test_a_step_that_hangs_turns_probes_red_and_fails_what_is_open_until_it_comes_back(stream: bool) -> None:
    runner = GatedRunner()
    async with app_and_client(replace(LIMITED), engine_of(runner, release_timeout=0.05)) as (app, client):
        services = app.state.services
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await client.post(PATH, json=BODY | {"stream": stream}))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: runner.entered)
            assert (await client.get("/health/live")).status_code == 200
            hang_after(services, 0.0)
        error = error_of(answers[0], 503)
        assert error["code"] == "engine_dead" and "no progress" in error["message"]
        for path in ("/health/live", "/health/ready"):
            check_error(await client.get(path), 503)
        check_error(await client.post(PATH, json=BODY), 503)
        hang_after(services, 60)
        runner.release(for_good=True)
        await until(lambda: services.engine.health().last_step_age is None)
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.post(PATH, json=BODY)).status_code == 200


def hang_after(services: Any, seconds: float) -> None:
    """Settings are frozen, and waiting for a minute would be a slow test."""
    object.__setattr__(services.settings, "step_timeout", seconds)


async def test_a_long_prefill_is_never_taken_for_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten chunks of 40 s each: more than the limit together, no chunk alone. The clock is the test's."""
    clock = SimpleNamespace(now=0.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(engine.thread, "time", fake_time)
    runner = GatedRunner()
    async with app_and_client(LIMITED, engine_of(runner, max_num_batched_tokens=64)) as (_, client):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.post(PATH, json=BODY | {"prompt": "x" * 640, "max_tokens": 1}))
            for _ in range(10):
                await until(lambda: runner.entered)
                clock.now += 40
                assert (await client.get("/health/live")).status_code == 200
                runner.release()
        group_size = runner.max_rows
        assert group_size == 64
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.post(PATH, json=BODY))
            await until(lambda: runner.entered)
            clock.now += 61  # the control: one step that takes longer than the limit
            check_error(await client.get("/health/live"), 503)
            runner.release(for_good=True)
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.parametrize("method", ["render_chat", "encode"])
async def test_a_tokenizer_or_template_that_raises_fails_its_request_alone(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with app_and_client(SETTINGS) as (app, client):
        path, prompt = (PATH, {"prompt": "hi"})
        if method == "render_chat":
            path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
        body = {"model": "org/m", "max_tokens": 2, **prompt}

        def broken(*_: Any, **__: Any) -> None:
            raise RecursionError

        monkeypatch.setattr(type(app.state.services.tokenizer), method, broken)
        check_error(await client.post(path, json=body), 500)
        monkeypatch.undo()
        assert (await client.post(path, json=body)).status_code == 200


async def test_debug_steps_tell_what_ran_where_debugging_is_on() -> None:
    async with app_and_client(SETTINGS, engine_of(LetterRunner())) as (_, client):
        check_error(await client.get("/debug/steps"), 404)
    debugging = Settings(engine="fake", served_model_name="org/m", debug=True)
    async with app_and_client(debugging, engine_of(LetterRunner())) as (_, client):
        await client.post(PATH, json=BODY | {"n": 4})
        steps = (await client.get("/debug/steps")).json()["data"]
        assert [step["number"] for step in steps] == list(range(1, 7))
        assert steps[0]["num_prefill_rows"] == 5 and steps[1]["num_decode_rows"] == 4
        assert all(step["seconds"] >= 0 and step["segment_rows"] for step in steps)


async def test_readers_that_all_stand_still_are_no_hang() -> None:
    """Nothing can be done then, and nothing is wrong with the engine: liveness must not restart it."""
    engine = engine_of(LetterRunner(), stream_credit=4)
    async with app_and_client(replace(LIMITED, step_timeout=0.001), engine) as (app, client):
        job = make_job(2, max_tokens=(400,))
        async with app.state.services.engine.submit(job.batch):
            await until(lambda: app.state.services.engine.health().generation_tokens == 8)
            await until(lambda: app.state.services.engine.health().last_step_age is None)
            for _ in range(20):
                await anyio.sleep(0.002)
                assert (await client.get("/health/live")).status_code == 200
