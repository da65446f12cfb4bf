"""PNG plots of a benchmark run (matplotlib, from the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.metrics import Summary
from tests.bench.scenarios import Scenario

Curve = Sequence[tuple[Scenario, Summary]]

PANELS = (
    ("time to first token, s", lambda summary: summary.first_token),
    ("inter-token latency, ms", lambda summary: 1000 * summary.gap_median),
    ("tokens per second", lambda summary: summary.tokens_per_second),
)


def plot_curves(curves: Mapping[str, Curve], x_label: str, path: Path) -> None:
    """One line per server. x is n for a fan-out and the number of clients otherwise, told by x_label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 3.6), layout="constrained")
    for axis, (title, value_of) in zip(axes, PANELS, strict=True):
        for label, curve in curves.items():
            xs = [scenario.n if x_label == "n" else scenario.clients for scenario, _ in curve]
            axis.plot(xs, [value_of(summary) for _, summary in curve], marker="o", label=label)
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [str(x) for x in xs])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
