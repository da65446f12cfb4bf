from __future__ import annotations

from engine.upstream.circuit import COOLDOWN_SECONDS, MAX_COOLDOWN_SECONDS, THRESHOLD, Circuit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Circuit:
    circuit = Circuit(clock)
    for _ in range(THRESHOLD):
        assert circuit.lets_through
        circuit.fail()
    return circuit


def test_successes_between_failures_keep_it_closed() -> None:
    circuit = Circuit(Clock())
    for _ in range(3 * THRESHOLD):
        circuit.fail()
        circuit.succeed()
    assert circuit.lets_through and not circuit.is_open


def test_one_try_goes_through_once_it_has_cooled_down() -> None:
    clock = Clock()
    circuit = opened(clock)
    assert not circuit.lets_through
    clock.now += COOLDOWN_SECONDS
    assert circuit.lets_through
    circuit.begin()
    assert not circuit.lets_through, "others wait for what becomes of it"
    circuit.succeed()
    assert circuit.lets_through and not circuit.is_open


def test_each_try_that_fails_doubles_the_wait_up_to_a_bound() -> None:
    clock = Clock()
    circuit = opened(clock)
    wait = COOLDOWN_SECONDS
    for _ in range(10):
        clock.now += wait
        assert circuit.lets_through
        circuit.begin()
        circuit.fail()
        wait = min(2 * wait, MAX_COOLDOWN_SECONDS)
        clock.now += wait - 0.5
        assert not circuit.lets_through
        clock.now -= wait - 0.5
    clock.now += wait
    circuit.begin()
    circuit.succeed()
    circuit.fail()
    assert circuit.lets_through


def test_a_try_that_was_given_up_leaves_room_for_another() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += COOLDOWN_SECONDS
    circuit.begin()
    circuit.give_up()
    assert circuit.lets_through


def test_failures_of_what_had_begun_before_do_not_lengthen_the_wait() -> None:
    clock = Clock()
    circuit = opened(clock)
    clock.now += COOLDOWN_SECONDS / 2
    circuit.fail()
    clock.now += COOLDOWN_SECONDS / 2
    assert circuit.lets_through
