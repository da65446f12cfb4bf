"""The benchmark's arithmetic, on times that can be worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.metrics import RequestTimes, StreamTally, quantile, ratios, summarise, throughput


def request(started: float, ended: float, arrivals: dict[int, list[float]], num_tokens: int) -> RequestTimes:
    return RequestTimes(started, ended, arrivals, num_tokens, prompt_tokens=10)


def test_one_request_with_two_choices() -> None:
    times = request(1.0, 4.0, {0: [1.5, 2.0, 3.0], 1: [2.5]}, 4)
    assert (times.first_token, times.all_started, times.gaps) == (0.5, 1.5, [0.5, 1.0])


def test_the_wall_of_a_round_spans_all_its_clients() -> None:
    first = [request(0.0, 2.0, {0: [1.0]}, 6), request(0.5, 3.0, {0: [1.5]}, 6)]
    second = [request(10.0, 11.0, {0: [10.5]}, 6), request(10.0, 14.0, {0: [12.0, 13.0]}, 6)]
    summary = summarise([first, second])
    assert (summary.wall, summary.wall_min, summary.wall_max) == (3.5, 3.0, 4.0)
    assert summary.tokens_per_second == (12 / 3 + 12 / 4) / 2
    assert summary.first_token == 1.0
    assert (summary.gap_median, summary.gap_p99) == (1.0, 1.0)


def test_a_request_without_text_never_started() -> None:
    assert request(0.0, 1.0, {}, 0).first_token == float("inf")


def test_nothing_measured_is_an_error_and_not_a_zero() -> None:
    for nothing in ([], [[]]):
        with pytest.raises(ValueError, match="nothing"):
            summarise(nothing)


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([], 0.5)) == (51.0, 100.0, 0.0)


def test_ratios_are_against_the_best_other_server() -> None:
    others = {"a": {"x": 2.0, "y": 1.0}, "b": {"x": 4.0}}
    assert ratios({"x": 1.0, "y": 3.0, "z": 1.0}, others) == {"x": ("a", 0.5), "y": ("a", 3.0)}


def test_throughput_counts_all_answers_over_the_time_of_all() -> None:
    first = StreamTally(0.0, 4.0, [1.0, 2.0, 4.0], num_events=7, num_tokens=6)
    second = StreamTally(1.0, 5.0, [2.0, 5.0], num_events=5, num_tokens=4)
    result = throughput([first, second])
    assert (result.streams, result.tokens, result.wall, result.tokens_per_second) == (2, 10, 5.0, 2.0)
    assert result.tokens_per_read == 10 / 5
    assert (result.gap_median, result.gap_max) == (2.0, 3.0)


def test_no_answers_have_no_throughput() -> None:
    with pytest.raises(ValueError, match="nothing"):
        throughput([])
