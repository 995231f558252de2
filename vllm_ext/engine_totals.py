"""What the engine process counts, brought into the Prometheus metrics of the process that serves `/metrics`.

The engine keeps plain numbers and knows no Prometheus. When `/metrics` is asked for, the front end fetches
them in one call and feeds them to ordinary counters, histograms and gauges, so that vLLM's multi-process mode
works as for any other metric. Each part of the project registers the kinds that are its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from prometheus_client import Gauge, Histogram

Labels = tuple[str, ...]
Entries = Iterable[tuple[Iterable[str], float]]
"""Pairs of (label values, number), as JSON holds them."""
Report = dict[str, list[tuple[list[str], float]]]
"""kind -> entries: what a part of the engine reports."""
Across = Literal["sum", "min"]
"""How a gauge of several engines becomes one."""


class EngineTotals:
    """Turns the engine's running totals into increments, so that a counter here never runs backwards.

    A total that shrank means that the engine process was replaced: its count starts anew. Kinds that nobody
    registered are ignored, and so are entries with another number of labels: front end and engine may be of
    two versions.
    """

    def __init__(self) -> None:
        self._counters: dict[str, tuple[int, Callable[[Labels, float], None]]] = {}
        self._gauges: dict[str, tuple[int, Gauge, Across]] = {}
        self._last: dict[tuple[int, str, Labels], float] = {}
        self._present: dict[int, dict[str, dict[Labels, float]]] = {}
        self._shown: dict[str, set[Labels]] = {}
        self._lock = threading.Lock()

    def count(self, kind: str, num_labels: int, grew: Callable[[Labels, float], None]) -> None:
        """Call `grew(labels, by)` whenever a total of this kind has grown."""
        self._counters[kind] = (num_labels, grew)

    def show(self, kind: str, num_labels: int, gauge: Gauge, across: Across = "sum") -> None:
        """Set `gauge` to the value that this kind has now, over all engines."""
        self._gauges[kind] = (num_labels, gauge, across)

    def update(self, engine_index: int, totals: Mapping[str, Entries]) -> None:
        """Args: totals: kind -> pairs of (label values, running total), as one engine reports them."""
        with self._lock:
            for kind, entries in totals.items():
                num_labels, grew = self._counters.get(kind, (-1, None))
                for labels, total in entries:
                    key = (engine_index, kind, tuple(labels))
                    if grew is None or len(key[2]) != num_labels:
                        continue
                    last = self._last.get(key, 0.0)
                    self._last[key] = total
                    grown = total - last if total >= last else total
                    if grown > 0:
                        grew(key[2], grown)

    def update_gauges(self, engine_index: int, gauges: Mapping[str, Entries]) -> None:
        """Args: gauges: kind -> pairs of (label values, present value). What is not named any more is 0."""
        with self._lock:
            self._present[engine_index] = {
                kind: {tuple(labels): value for labels, value in entries} for kind, entries in gauges.items()
            }
            for kind, (num_labels, gauge, across) in self._gauges.items():
                values: dict[Labels, list[float]] = {}
                for present in self._present.values():
                    for labels, value in present.get(kind, {}).items():
                        if len(labels) == num_labels:
                            values.setdefault(labels, []).append(value)
                shown = self._shown.setdefault(kind, set())
                for labels in shown - values.keys():
                    _child(gauge, labels).set(0)
                for labels, every in values.items():
                    _child(gauge, labels).set(sum(every) if across == "sum" else min(every))
                shown.update(values)


class BulkHistogram(Histogram):
    """A histogram that takes many observations at once, counted elsewhere."""

    def add(self, bucket: int, count: float) -> None:
        """`count` observations that fell into bucket number `bucket` (0 is the smallest) and in no smaller
        one. IndexError if there is no such bucket.
        """
        self._buckets[bucket].inc(count)

    def add_sum(self, amount: float) -> None:
        """The sum of the observations that `add` was told of."""
        self._sum.inc(amount)


def count_histogram(totals: EngineTotals, kind: str, histogram: BulkHistogram, num_labels: int) -> None:
    """Register a histogram: its engine reports `kind` with the bucket's number as one more label, and
    `kind_sum`."""

    def grew(labels: Labels, by: float) -> None:
        _child(histogram, labels[:-1]).add(int(labels[-1]), by)

    def sum_grew(labels: Labels, by: float) -> None:
        _child(histogram, labels).add_sum(by)

    totals.count(kind, num_labels + 1, grew)
    totals.count(f"{kind}_sum", num_labels, sum_grew)


def _child(metric: Any, labels: Sequence[str]) -> Any:
    return metric.labels(*labels) if labels else metric
