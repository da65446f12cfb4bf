"""A soak of some seconds, so that the long one is known to work when it is run by hand."""

from __future__ import annotations

import pytest

from tests.soak.run import soak


@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_some_seconds_of_mixed_traffic_leave_nothing_behind_and_every_answer_is_right(worker: str) -> None:
    report = soak(seconds=4, worker=worker, num_clients=12, seed=1)
    assert report.failures() == [], report.text()
    assert sum(report.outcomes.values()) > 20, report.text()
