"""What a key may use, and what it is told beyond it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.auth import Caller, Limits
from service.errors import ApiError
from service.limits import Quotas
from service.settings import Settings
from tests.service.apps import SETTINGS, check_error
from tests.service.inloop import app_and_client, key

BODY: dict[str, Any] = {"model": "org/m", "prompt": "hi", "max_tokens": 2}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def caller(**limits: int) -> Caller:
    return Caller("owner", limits=Limits(**limits))


def wait_of(error: ApiError) -> int:
    assert error.info.status == 429 and error.info.code == "rate_limit_exceeded"
    seconds = int(error.info.headers["Retry-After"])
    assert 1 <= seconds <= 120 and seconds * 1000 - 1000 < int(error.info.headers["retry-after-ms"]) <= seconds * 1000
    return seconds


def test_a_minute_has_so_many_requests_and_they_come_back_evenly() -> None:
    clock = Clock()
    quotas, poor = Quotas(clock), caller(requests_per_minute=6)
    for _ in range(6):
        quotas.take_request(poor)
    with pytest.raises(ApiError) as caught:
        quotas.take_request(poor)
    assert wait_of(caught.value) == 10
    clock.now += 10
    quotas.take_request(poor)
    with pytest.raises(ApiError):
        quotas.take_request(poor)
    clock.now += 3600  # idle time is not saved beyond a minute's worth
    for _ in range(6):
        quotas.take_request(poor)
    with pytest.raises(ApiError):
        quotas.take_request(poor)
    quotas.take_request(Caller("another", limits=Limits(requests_per_minute=6)))


def test_tokens_of_an_answer_leave_a_debt_that_the_next_request_waits_for() -> None:
    clock = Clock()
    quotas, poor = Quotas(clock), caller(tokens_per_minute=60)
    with quotas.running(poor, 20):
        pass
    quotas.spend(poor, 100)  # 60 - 20 - 100 = -60
    with pytest.raises(ApiError) as caught, quotas.running(poor, 30):
        pass
    assert wait_of(caught.value) == 90
    clock.now += 90
    with quotas.running(poor, 30):
        pass


def test_a_prompt_larger_than_a_minutes_worth_runs_once_a_full_minutes_worth_is_there() -> None:
    clock = Clock()
    quotas, poor = Quotas(clock), caller(tokens_per_minute=60)
    with quotas.running(poor, 120):
        pass
    with pytest.raises(ApiError) as caught, quotas.running(poor, 120):
        pass
    assert wait_of(caught.value) == 120


def test_a_limit_of_nothing_refuses_everything() -> None:
    quotas = Quotas(Clock())
    with pytest.raises(ApiError) as caught:
        quotas.take_request(caller(requests_per_minute=0))
    assert wait_of(caught.value) == 60


def test_requests_at_once_are_counted_whatever_ends_them() -> None:
    quotas, poor = Quotas(Clock()), caller(max_concurrent=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), quotas.running(poor, 1):
            with pytest.raises(ApiError) as caught, quotas.running(poor, 1):
                pass
            assert wait_of(caught.value) == 1
            raise RuntimeError
    with quotas.running(poor, 1):
        pass


@pytest.fixture
def with_limits(tmp_path: Path) -> Settings:
    path = tmp_path / "keys"
    path.write_text("sk-a a max_n=2\nsk-b b requests_per_minute=2\nsk-c c priority=5\nsk-d d\n")
    return replace(SETTINGS, api_keys_file=path)


@pytest.mark.anyio
async def test_limits_are_429_over_http(with_limits: Settings) -> None:
    async with app_and_client(with_limits) as (_, client):
        wide = await client.post("/v1/completions", json=BODY | {"n": 3}, headers=key("sk-a"))
        check_error(wide, 429, "n", "rate_limit_exceeded")
        assert wide.headers["x-should-retry"] == "false"  # it would fail again for ever
        hidden = await client.post("/v1/completions", json=BODY | {"n": 1, "best_of": 3}, headers=key("sk-a"))
        check_error(hidden, 429)
        assert (await client.post("/v1/completions", json=BODY | {"n": 2}, headers=key("sk-a"))).status_code == 200
        assert (await client.post("/v1/completions", json=BODY | {"n": 3}, headers=key("sk-d"))).status_code == 200
        for status in (200, 400, 429, 429):  # what is refused counts as well
            body = BODY | ({"n": 0} if status == 400 else {})
            response = await client.post("/v1/completions", json=body, headers=key("sk-b"))
            assert response.status_code == status
        assert int(response.headers["retry-after"]) in (29, 30)
        assert int(response.headers["retry-after-ms"]) <= 30_000
        assert "x-should-retry" not in response.headers


@pytest.mark.anyio
async def test_a_key_cannot_push_ahead_further_than_its_own_priority(with_limits: Settings) -> None:
    seen = []

    class Watched(FakeEngine):
        def submit(self, batch: Any) -> Any:
            seen.append(batch[0].priority)
            return super().submit(batch)

    async with app_and_client(with_limits, Watched(EngineConfig(served_model_name="org/m"))) as (_, client):
        for value, priority in (("sk-c", -9), ("sk-c", 7), ("sk-c", None), ("sk-d", -9), ("sk-d", 3), ("sk-d", None)):
            await client.post("/v1/completions", json=BODY | {"priority": priority}, headers=key(value))
    assert seen == [5, 7, 5, 0, 3, 0]
    seen.clear()
    async with app_and_client(SETTINGS, Watched(EngineConfig(served_model_name="org/m"))) as (_, client):
        await client.post("/v1/completions", json=BODY | {"priority": -9})
    assert seen == [-9]  # without keys there is nobody to protect from anybody
