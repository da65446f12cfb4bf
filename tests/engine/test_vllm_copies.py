"""Choices over the copies of a model that vLLM's data parallel makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from engine.sequence import Sequence
from engine.vllm_core import Copies


def some(count: int) -> list[Sequence]:
    """Hashable is all that they need to be."""
    return [cast(Sequence, object()) for _ in range(count)]


def turned(copies: Copies, client: Any, sequence: Sequence) -> bytes:
    copies.turn_to(sequence)
    found: bytes = client.core_engine
    return found


def test_choices_of_a_prompt_stay_together_where_the_least_is_under_way() -> None:
    client = SimpleNamespace(core_engines=[b"0", b"1"], core_engine=b"0")
    copies = Copies(client)
    three, one, two = some(3), some(1), some(2)
    for sequences in (three, one, two):
        copies.place(sequences)
    assert {turned(copies, client, sequence) for sequence in three} == {b"0"}
    assert {turned(copies, client, sequence) for sequence in one + two} == {b"1"}
    for sequence in three:
        copies.forget(sequence)
        copies.forget(sequence)
    (late,) = some(1)
    copies.place([late])
    assert turned(copies, client, late) == b"0"


def test_a_single_core_is_left_alone() -> None:
    for client in (SimpleNamespace(core_engines=[b"0"], core_engine=b"0"), SimpleNamespace()):
        copies = Copies(client)
        (sequence,) = some(1)
        copies.place([sequence])
        copies.turn_to(sequence)
        copies.forget(sequence)
        assert copies.is_one
