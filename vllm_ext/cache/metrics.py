"""Prometheus metrics of retention. They appear in vLLM's own `/metrics`; `docs/retention.md` lists them.

Every name that this pillar exports is created here and nowhere else. The numbers are the engine's: see
`telemetry` and `EngineTotals`.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from vllm_ext.cache.telemetry import AGE_BOUNDS
from vllm_ext.engine_totals import Across, BulkHistogram, EngineTotals, count_histogram


class _Series:
    """Metrics by kind, all fed by the engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._register: list[Callable[[EngineTotals], None]] = []

    def register(self, totals: EngineTotals) -> None:
        """Take over what the engine process counts for us."""
        for register in self._register:
            register(totals)

    def _counter(self, kind: str, text: str, *labels: str) -> None:
        counter = Counter(f"vllm_ext_{kind}", text, labels, registry=self._registry)

        def grew(values: tuple[str, ...], by: float) -> None:
            (counter.labels(*values) if values else counter).inc(by)

        self._register.append(lambda totals: totals.count(kind, len(labels), grew))

    def _gauge(self, kind: str, text: str, *labels: str, across: Across = "sum") -> None:
        gauge = Gauge(
            f"vllm_ext_{kind}", text, labels, registry=self._registry, multiprocess_mode="mostrecent"
        )
        self._register.append(lambda totals: totals.show(kind, len(labels), gauge, across))

    def _histogram(self, kind: str, text: str, *labels: str) -> None:
        histogram = BulkHistogram(
            f"vllm_ext_{kind}_seconds", text, labels, buckets=AGE_BOUNDS, registry=self._registry
        )
        self._register.append(lambda totals: count_histogram(totals, kind, histogram, len(labels)))


class CacheMetrics(_Series):
    """All series of a policy with retention, created once per process.

    Args:
        registry: Prometheus registry; the default one is what vLLM serves.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self._gauge(
            "cache_resident_blocks",
            "KV blocks in the prefix cache, used or not, by the tenant that filled them and their present "
            "priority.",
            "tenant", "priority",
        )  # fmt: skip
        self._gauge(
            "cache_resident_bytes",
            "The same in bytes, of one worker.",
            "tenant", "priority",
        )  # fmt: skip
        self._gauge("cache_share_resident_blocks", "KV blocks that a tenant with a share holds.", "tenant")
        self._gauge("cache_share_min_blocks", "Its floor: others leave it that many.", "tenant")
        self._gauge("cache_share_max_blocks", "Its cap: above it, its own blocks go first.", "tenant")
        self._gauge("cache_pool_blocks", "KV blocks of the pool.")
        self._counter(
            "cache_evictions",
            "Cached blocks dropped, by the tenant that filled them and cause: capacity, quota, ttl (once "
            "protected, expired), reset, invalidated.",
            "tenant", "cause",
        )  # fmt: skip
        self._histogram(
            "cache_eviction_age",
            "Seconds between a block's last use and its eviction, by the tenant that filled it.",
            "tenant",
        )
        self._histogram(
            "cache_reuse_distance",
            "Seconds between a block's last use and the hit that takes it out of the unused blocks, by the "
            "tenant that hits.",
            "tenant",
        )
        self._counter(
            "cache_tokens",
            "Prompt tokens of admitted requests by where their KV came from: device (prefix cache), restored "
            "(a KV connector), computed.",
            "tenant", "tier",
        )  # fmt: skip
        self._counter(
            "cache_victims",
            "Evicted blocks by what chose them within one priority: lru, estimate, ended (an ended "
            "session's), ... Under `reuse`, lru is the safety switch.",
            "order", "chosen_by",
        )  # fmt: skip
        self._counter("cache_estimates", "Times that `reuse` has learned anew what blocks are worth.")
        self._counter("cache_returned", "Evicted blocks asked for again, as far as `reuse` remembers.")
        self._gauge("cache_ghosts", "Evicted blocks that `reuse` remembers.")
        self._gauge(
            "cache_margin",
            "The safety switch of `reuse`: a victim other than LRU's must be worth less than this share of "
            "LRU's. Lower while LRU would have hit more.",
            across="min",
        )
        self._counter("cache_wishes", "Clients' retention wishes: heard, or why not followed.", "reason")
        self._gauge(
            "cache_retention_on",
            "0 after a fault handed evictions back to vLLM.",
            across="min",
        )


class BlockTraceMetrics(_Series):
    """The recorder's series, created once per process: a reload may switch it on.

    Args:
        registry: Prometheus registry; the default one is what vLLM serves.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self._counter(
            "block_trace_requests",
            "Finished requests by what the block trace did with them: written, dropped (queue full), failed.",
            "outcome",
        )
        self._gauge("block_trace_on", "1 while the block trace is being written.", across="min")
