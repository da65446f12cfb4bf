"""Booking and the waits that a full queue names."""

from __future__ import annotations

import pytest

from engine import admission
from engine.admission import Admission
from engine.api import EngineOverloaded
from engine.config import EngineConfig


def test_the_wait_follows_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)
    booking = Admission(EngineConfig(max_num_seqs=4, max_queued_seqs=16))
    booking.book(20, 0)
    for _ in range(5):  # one choice ends every 3 s
        booking.end_choice()
        now += 3
    booking.book(5, 0)
    with pytest.raises(EngineOverloaded) as refusal:
        booking.book(2, 0)
    assert refusal.value.retry_after == 6
    with pytest.raises(EngineOverloaded) as refusal:
        booking.book(20, 0)
    assert refusal.value.retry_after == 60


def test_a_refused_batch_books_nothing() -> None:
    booking = Admission(EngineConfig(max_num_seqs=2, max_queued_seqs=2, max_queued_tokens=100))
    booking.book(3, 60)
    for num_choices, num_tokens in ((2, 1), (1, 41)):
        with pytest.raises(EngineOverloaded):
            booking.book(num_choices, num_tokens)
    booking.book(1, 40)
