"""When a choice has its turn, on a clock that jumps ahead."""

from __future__ import annotations

import pytest

from service import pace
from service.pace import SECONDS_PER_CHOICE, Pace

pytestmark = pytest.mark.anyio


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept; the clock stands at 100 s and moves by sleeping alone."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(pace.time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(pace.anyio, "sleep", sleep)
    return slept


async def test_a_choice_that_comes_too_soon_waits_for_its_turn(naps: list[float]) -> None:
    choice = Pace(lambda: 50)
    await choice.turn()
    assert naps == []  # a first token never waits
    await choice.turn()
    assert naps == pytest.approx([50 * SECONDS_PER_CHOICE])


async def test_a_choice_slower_than_its_turns_never_waits(naps: list[float]) -> None:
    choice = Pace(lambda: 50)
    for seconds in (0.0, 0.01, 5.0):
        naps.append(seconds)
        await choice.turn()
    assert naps == [0.0, 0.01, 5.0]


async def test_without_company_to_wait_for_there_is_no_pace(naps: list[float]) -> None:
    choice = Pace(lambda: 0)
    for _ in range(3):
        await choice.turn()
    assert naps == []
