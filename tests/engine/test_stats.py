"""Histograms, and what the scheduler counts of preemptions and cached prompts."""

from __future__ import annotations

from engine.stats import Histogram
from tests.engine.support import CheckingRunner, core_with, generate, greedy


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram([1, 2.5])
    for value, times in ((0.5, 1), (1.0, 1), (2.0, 3), (9.0, 2)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [(1, 2), (2.5, 5), (float("inf"), 7)]
    assert histogram.sum == 0.5 + 1 + 6 + 18


def test_preemptions_and_cached_prompts_are_counted() -> None:
    core = core_with(CheckingRunner(num_pages=12))
    prompts = [[seed] * 70 for seed in (1, 2)]
    generate(core, prompts, [greedy(60)] * 2)
    assert core.scheduler.num_preemptions > 0
    looked_up, found = core.scheduler.num_looked_up, core.scheduler.num_found
    assert (looked_up, found) == (140, 0), "what is computed again after a preemption is not looked up again"
    generate(core, prompts[:1], [greedy(1)])
    assert core.scheduler.num_looked_up == 210
    assert core.scheduler.num_found in (32, 64)
