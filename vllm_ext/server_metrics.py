"""Prometheus metrics of the plugin as a whole: its policy and its faults. They appear in vLLM's `/metrics`.

Every name that they export is created here and nowhere else.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from vllm_ext.engine_totals import EngineTotals

RELOAD_OUTCOMES = ("reloaded", "unchanged", "invalid", "refused")
PARTS = ("identity", "stamping", "metrics", "engine_salting", "engine_hashing", "engine_block_trace")


class ServerMetrics:
    """All series, created once per process.

    Args:
        registry: Prometheus registry; the default one is what vLLM serves.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._reloads = Counter(
            "vllm_ext_policy_reloads",
            "Attempts to change the policy at run time (reloaded, unchanged, invalid, refused).",
            ("outcome",),
            registry=registry,
        )
        self._policy_ok = Gauge(
            "vllm_ext_policy_last_reload_successful",
            "1 while the policy in force is the one on disk; 0 after a reload that was invalid or refused.",
            registry=registry,
            multiprocess_mode="min",
        )
        self._policy_time = Gauge(
            "vllm_ext_policy_loaded_timestamp_seconds",
            "When the policy in force was loaded (Unix time).",
            registry=registry,
            multiprocess_mode="max",
        )
        self._errors = Counter(
            "vllm_ext_internal_errors",
            "Exceptions inside this plugin that were caught, by part. Identity and salting then isolate.",
            ("part",),
            registry=registry,
        )
        # A series that appears with its first event is missed by `increase()`: these begin at 0.
        for counter, values in ((self._reloads, RELOAD_OUTCOMES), (self._errors, PARTS)):
            for value in values:
                counter.labels(value)

    def register(self, totals: EngineTotals) -> None:
        """Take over what the engine process counts for us."""
        totals.count("errors", 1, lambda labels, by: self._errors.labels(*labels).inc(by))

    def policy_result(self, outcome: str) -> None:
        self._reloads.labels(outcome).inc()
        self._policy_ok.set(1 if outcome in ("reloaded", "unchanged") else 0)

    def policy_loaded(self, when: float) -> None:
        self._policy_ok.set(1)
        self._policy_time.set(when)

    def internal_error(self, part: str) -> None:
        self._errors.labels(part).inc()
