"""Metric families out of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.stats import Histogram

Labels = dict[str, str]
K = TypeVar("K", bound=str)


def counters(name: str, text: str, label: str, counts: Mapping[K, int], more: Labels | None = None) -> Metric:
    """One counter for each value of a label. more: labels that all of them have."""
    more = more or {}
    family = CounterMetricFamily(name, text, labels=[*more, label])
    for value, count in counts.items():
        family.add_metric([*more.values(), str(value)], count)
    return family


def counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, *series: tuple[Labels, Histogram]) -> Metric:
    """series: at least one, all of the same labels."""
    family = HistogramMetricFamily(name, text, labels=list(series[0][0]))
    for labels, counted in series:
        buckets = [("+Inf" if bound == math.inf else str(bound), float(count)) for bound, count in counted.cumulative()]
        family.add_metric(list(labels.values()), buckets, counted.sum)
    return family
