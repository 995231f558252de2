"""What is counted of the cache, against counting block by block."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from vllm_ext.cache import telemetry as telemetry_module
from vllm_ext.cache.free_blocks import FreeBlocks, Protection
from vllm_ext.cache.lru import LruOrder
from vllm_ext.cache.metrics import BlockTraceMetrics, CacheMetrics
from vllm_ext.cache.order import Arrival, Departure
from vllm_ext.cache.telemetry import AGE_BOUNDS, CacheTelemetry
from vllm_ext.engine_totals import EngineTotals, Report
from vllm_ext.labels import LabelCap

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[3] / "docs" / "retention.md"


def entries(report: Report, kind: str) -> dict[tuple[str, ...], float]:
    return {tuple(labels): value for labels, value in report[kind]}


def free_blocks(num_blocks: int, telemetry: CacheTelemetry) -> FreeBlocks:
    free = FreeBlocks(num_blocks, LruOrder(num_blocks))
    free.on_evict = telemetry.evicted
    return free


def leave(
    free: FreeBlocks,
    telemetry: CacheTelemetry,
    tenant: int,
    blocks: list[int],
    now: float,
    *given: Protection,
) -> None:
    """Blocks that a request of `tenant` filled and gives back."""
    for block, protection in zip(blocks, given or [Protection()] * len(blocks), strict=True):
        free.cached(block, 0, protection)
        telemetry.owner[block] = tenant
    free.release(Departure(now, blocks, list(blocks), len(blocks), Arrival(now)), range(len(blocks)))
    telemetry.departed(blocks, now)


def test_evictions_by_tenant_cause_and_age() -> None:
    telemetry = CacheTelemetry(8, str)
    free = free_blocks(8, telemetry)
    acme, globex = telemetry.tenant("acme"), telemetry.tenant("globex")
    leave(free, telemetry, acme, [0, 1, 2], 10.0)
    leave(free, telemetry, globex, [3, 4], 20.0)
    leave(free, telemetry, acme, [5], 21.0, Protection(35, 90, 25.0))
    telemetry.now = 30.0
    free.pop(6, 30.0)
    totals = telemetry.totals()
    assert entries(totals, "cache_evictions") == {
        ("acme", "capacity"): 3, ("globex", "capacity"): 2, ("acme", "ttl"): 1,
    }  # fmt: skip
    assert entries(totals, "cache_eviction_age") == {
        ("acme", str(bisect_left(AGE_BOUNDS, 20.0))): 3 + 0,
        ("acme", str(bisect_left(AGE_BOUNDS, 9.0))): 1,
        ("globex", str(bisect_left(AGE_BOUNDS, 10.0))): 2,
    }
    assert entries(totals, "cache_eviction_age_sum") == {("acme",): 69.0, ("globex",): 20.0}


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 100))
def test_reuse_distances_of_a_prefix_are_those_of_its_blocks(drops: list[int], start: int) -> None:
    times = [float(start + sum(drops[index:])) for index in range(len(drops))]  # never rises along the prefix
    telemetry = CacheTelemetry(len(drops) or 1, str)
    for block, when in enumerate(times):
        telemetry.departed([block], when)
    now = start + 200.0
    telemetry.hit(list(range(len(drops))), telemetry.tenant("acme"), now)
    expected = Counter(str(bisect_left(AGE_BOUNDS, now - when)) for when in times)
    found = entries(telemetry.totals(), "cache_reuse_distance")
    assert found == {("acme", bucket): count for bucket, count in expected.items()}
    if drops:
        total = entries(telemetry.totals(), "cache_reuse_distance_sum")["acme",]
        assert total == pytest.approx(sum(now - when for when in times))


def test_residents_by_tenant_and_present_priority() -> None:
    telemetry = CacheTelemetry(8, str, block_bytes=1000)
    free = free_blocks(8, telemetry)
    acme, globex = telemetry.tenant("acme"), telemetry.tenant("globex")
    leave(free, telemetry, acme, [0, 1], 1.0, Protection(35, 90, 50.0), Protection(35, 90, 50.0))
    leave(free, telemetry, globex, [2, 3, 4], 1.0, Protection(57), Protection(57), Protection(35))
    before = telemetry.residents(free, {35, 90}, now=10.0)
    assert entries(before, "cache_resident_blocks") == {
        ("acme", "90"): 2, ("globex", "other"): 2, ("globex", "35"): 1,
    }  # fmt: skip
    assert entries(before, "cache_resident_bytes")["acme", "90"] == 2000
    after = telemetry.residents(free, {35, 90}, now=60.0)
    assert entries(after, "cache_resident_blocks")["acme", "35"] == 2
    free.forget(0)
    assert entries(telemetry.residents(free, {35}, now=60.0), "cache_resident_blocks")["acme", "35"] == 1


def test_of_a_large_pool_a_part_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "MAX_SCANNED", 30)
    telemetry = CacheTelemetry(100, str)
    free = free_blocks(100, telemetry)
    leave(free, telemetry, telemetry.tenant("acme"), list(range(80)), 1.0)
    found = entries(telemetry.residents(free, {35}, 1.0), "cache_resident_blocks")
    assert found == {("acme", "35"): 80}


def test_a_reset_and_invalid_blocks_are_causes_of_their_own() -> None:
    telemetry = CacheTelemetry(8, str)
    free = free_blocks(8, telemetry)
    leave(free, telemetry, telemetry.tenant("acme"), [0, 1, 2], 1.0)
    telemetry.invalidated(2)
    free.forget(2)
    telemetry.moved(0, 5)
    free.forget(0)
    free.cached(5, 0)
    telemetry.reset(free)
    assert entries(telemetry.totals(), "cache_evictions") == {
        ("acme", "invalidated"): 1, ("acme", "reset"): 2,
    }  # fmt: skip


def test_label_values_are_bounded() -> None:
    telemetry = CacheTelemetry(8, LabelCap(3, listed=["acme"]))
    for name in ("acme", *(f"tenant-{number}" for number in range(50)), "(unknown)"):
        telemetry.prompt(telemetry.tenant(name), 1, 2, 3)
    found = entries(telemetry.totals(), "cache_tokens")
    assert {tenant for tenant, _ in found} == {"acme", "tenant-0", "tenant-1", "other", "(unknown)"}
    assert found["other", "restored"] == 2 * 48


def test_every_number_reaches_prometheus_and_every_name_is_documented() -> None:
    registry = CollectorRegistry()
    totals = EngineTotals()
    CacheMetrics(registry).register(totals)
    BlockTraceMetrics(registry).register(totals)
    telemetry = CacheTelemetry(8, str, 10)
    free = free_blocks(8, telemetry)
    acme = telemetry.tenant("acme")
    leave(free, telemetry, acme, [0, 1], 1.0)
    telemetry.hit([0], acme, 3.0)
    telemetry.prompt(acme, 64, 0, 10)
    telemetry.now = 5.0
    free.pop(1, 5.0)
    totals.update(0, telemetry.totals())
    totals.update_gauges(0, telemetry.residents(free, {35}, 5.0))
    value = registry.get_sample_value
    assert value("vllm_ext_cache_evictions_total", {"tenant": "acme", "cause": "capacity"}) == 1
    assert value("vllm_ext_cache_eviction_age_seconds_sum", {"tenant": "acme"}) == 4
    assert value("vllm_ext_cache_reuse_distance_seconds_count", {"tenant": "acme"}) == 1
    assert value("vllm_ext_cache_tokens_total", {"tenant": "acme", "tier": "device"}) == 64
    assert value("vllm_ext_cache_resident_bytes", {"tenant": "acme", "priority": "35"}) == 10
    documented = set(re.findall(r"`(vllm_ext_(?:cache|block_trace)\w*)`", DOCS.read_text()))
    suffix = {"counter": "_total"}
    assert {family.name + suffix.get(family.type, "") for family in registry.collect()} == documented
