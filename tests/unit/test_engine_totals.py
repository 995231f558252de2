"""The engine's numbers become ordinary Prometheus metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_ext.engine_totals import BulkHistogram, EngineTotals, count_histogram

pytestmark = pytest.mark.unit

BOUNDS = (1.0, 5.0, 10.0)


def test_a_gauge_is_summed_over_engines_and_0_when_not_named_any_more() -> None:
    registry = CollectorRegistry()
    totals = EngineTotals()
    totals.show("blocks", 1, Gauge("blocks", "", ("tenant",), registry=registry))
    totals.show("on", 0, Gauge("on", "", registry=registry), "min")
    totals.update_gauges(0, {"blocks": [(["a"], 3.0), (["b"], 1.0)], "on": [([], 1.0)]})
    totals.update_gauges(1, {"blocks": [(["a"], 4.0)], "on": [([], 0.0)], "unheard_of": [([], 1.0)]})
    assert registry.get_sample_value("blocks", {"tenant": "a"}) == 7
    assert registry.get_sample_value("blocks", {"tenant": "b"}) == 1
    assert registry.get_sample_value("on") == 0
    totals.update_gauges(0, {"blocks": [(["a"], 2.0)], "on": [([], 1.0)]})
    totals.update_gauges(1, {"on": [([], 1.0)]})
    assert registry.get_sample_value("blocks", {"tenant": "a"}) == 2
    assert registry.get_sample_value("blocks", {"tenant": "b"}) == 0
    assert registry.get_sample_value("on") == 1


def test_entries_of_another_version_with_other_labels_are_ignored() -> None:
    registry = CollectorRegistry()
    totals = EngineTotals()
    counter = Counter("seen", "", ("who",), registry=registry)
    totals.count("seen", 1, lambda labels, by: counter.labels(*labels).inc(by))
    totals.show("now", 1, Gauge("now", "", ("who",), registry=registry))
    totals.update(0, {"seen": [(["a", "b"], 5.0), (["a"], 2.0)]})
    totals.update_gauges(0, {"now": [(["a", "b"], 5.0)]})
    assert registry.get_sample_value("seen_total", {"who": "a"}) == 2
    assert registry.get_sample_value("now", {"who": "a"}) is None


@given(st.lists(st.lists(st.floats(0, 20), max_size=20), max_size=6))
def test_a_bulk_histogram_equals_one_that_observed_each(batches: list[list[float]]) -> None:
    registry = CollectorRegistry()
    bulk = BulkHistogram("bulk", "", ("tenant",), buckets=BOUNDS, registry=registry)
    plain = Histogram("plain", "", buckets=BOUNDS, registry=registry)
    totals = EngineTotals()
    count_histogram(totals, "age", bulk, 1)
    counts, total = [0] * 4, 0.0
    for batch in batches:
        for value in batch:
            plain.observe(value)
            counts[sum(value > bound for bound in BOUNDS)] += 1
            total += value
        report = {
            "age": [(["a", str(bucket)], float(count)) for bucket, count in enumerate(counts)],
            "age_sum": [(["a"], total)],
        }
        totals.update(0, report)
    if counts == [0] * 4:
        return
    for bound in ("1.0", "5.0", "10.0", "+Inf"):
        assert registry.get_sample_value(
            "bulk_bucket", {"tenant": "a", "le": bound}
        ) == registry.get_sample_value("plain_bucket", {"le": bound})
    assert registry.get_sample_value("bulk_count", {"tenant": "a"}) == sum(counts)
    assert registry.get_sample_value("bulk_sum", {"tenant": "a"}) == pytest.approx(total)


MULTIPROCESS = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_ext.cache.metrics import CacheMetrics
from vllm_ext.engine_totals import EngineTotals
totals = EngineTotals()
CacheMetrics().register(totals)
totals.update(0, {"cache_eviction_age": [(["a", "0"], 3.0)], "cache_eviction_age_sum": [(["a"], 0.2)],
                  "cache_evictions": [(["a", "ttl"], 3.0)]})
totals.update_gauges(0, {"cache_pool_blocks": [([], 40.0)]})
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_it_works_in_the_multi_process_mode_of_prometheus(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", MULTIPROCESS], capture_output=True, text=True, env=environment, check=True
    )
    assert 'vllm_ext_cache_eviction_age_seconds_bucket{le="0.1",tenant="a"} 3.0' in done.stdout
    assert 'vllm_ext_cache_eviction_age_seconds_sum{tenant="a"} 0.2' in done.stdout
    assert 'vllm_ext_cache_evictions_total{cause="ttl",tenant="a"} 3.0' in done.stdout
    assert "vllm_ext_cache_pool_blocks 40.0" in done.stdout
