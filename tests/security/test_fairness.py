"""Between keys, from the HTTP header to the scheduler."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from engine.plan import SampledToken, StepPlan
from tests.faults.runners import LetterRunner, engine_of
from tests.service.apps import SETTINGS
from tests.service.asgi import until
from tests.service.inloop import app_and_client, key


class PacedRunner(LetterRunner):
    """A wave of 60 tokens takes over a second: many times what a request needs from its header to the scheduler."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        time.sleep(0.02)
        return super().execute(plan)


BODY: dict[str, Any] = {"model": "org/m", "prompt": "hello", "seed": 1}


@pytest.mark.anyio
async def test_a_key_that_fills_the_engine_does_not_make_another_wait(tmp_path: Path) -> None:
    """Four run at once and one key has 128 in the queue: another's single choice takes the first place that is free."""
    path = tmp_path / "keys"
    path.write_text("sk-greedy\nsk-modest\n")
    settings = replace(SETTINGS, api_keys_file=path, max_num_seqs=4)
    engine = engine_of(PacedRunner(num_pages=64), max_num_seqs=4)
    async with app_and_client(settings, engine) as (app, client), anyio.create_task_group() as group:

        async def fill() -> None:
            await client.post("/v1/completions", json=BODY | {"n": 128, "max_tokens": 60}, headers=key("sk-greedy"))

        group.start_soon(fill)
        services = app.state.services
        await until(lambda: services.engine.health().generation_tokens > 8)
        body = BODY | {"max_tokens": 1, "fan_out": {"details": True}}
        answer = await client.post("/v1/completions", json=body, headers=key("sk-modest"))
        assert answer.status_code == 200
        (greedy,) = services.running
        ended = sum(greedy.fan_out.has_ended(index) for index in range(128))
        assert ended <= 8, "two waves went by before its turn came"
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_many_small_requests_do_not_make_a_wide_one_wait_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-wide\n" + "".join(f"sk-{number}\n" for number in range(8)))
    settings = replace(SETTINGS, api_keys_file=path, max_num_seqs=2)
    engine = engine_of(LetterRunner(num_pages=64), max_num_seqs=2)
    async with app_and_client(settings, engine) as (_, client), anyio.create_task_group() as group:
        served = 0

        async def keep_asking(number: int) -> None:
            nonlocal served
            while True:
                await client.post("/v1/completions", json=BODY | {"max_tokens": 5}, headers=key(f"sk-{number}"))
                served += 1

        for number in range(8):
            group.start_soon(keep_asking, number)
        await until(lambda: served > 8)
        before = served
        answer = await client.post("/v1/completions", json=BODY | {"n": 16, "max_tokens": 2}, headers=key("sk-wide"))
        assert answer.status_code == 200
        assert served - before <= 16 * 2 * 8
        group.cancel_scope.cancel()
