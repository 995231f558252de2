"""What an operator sees of one engine, in the process that serves it: its policy, its reloads, its metrics.

There whatever the policy is about; who the tenants are is the business of `front_end`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm_ext.cache.metrics import BlockTraceMetrics, CacheMetrics
from vllm_ext.engine_totals import EngineTotals
from vllm_ext.policy import PolicySnapshot, PolicyStore, ReloadResult
from vllm_ext.server_metrics import ServerMetrics
from vllm_ext.tenancy.authenticator import AdminKeys

_lock = threading.Lock()
_server_metrics: ServerMetrics | None = None
_cache_metrics: CacheMetrics | None = None
_trace_metrics: BlockTraceMetrics | None = None
_latest: Operations | None = None


class Operations:
    """One engine's policy store and the metrics that it feeds.

    Attributes:
        admins: whose keys may look at the policy and reload it; swapped with the policy.
        totals: brings the engine's numbers into this process' metrics. Other features register theirs.
    """

    def __init__(self, store: PolicyStore) -> None:
        self.store = store
        self.admins = AdminKeys(store.current.admin_digests)
        self.totals = EngineTotals()
        metrics = server_metrics()
        metrics.policy_loaded(store.current.loaded_at)
        metrics.register(self.totals)
        _register_cache(self.totals, store.current)
        store.on_swap.append(self._swapped)
        store.on_result.append(self._reloaded)

    def watch(self, follow: Callable[[], object] | None = None) -> None:
        """Follow changes of the policy file. Called once the engine runs: vLLM may fork it, and threads do
        not survive that.

        Args:
            follow: what to do about a change; by default it is read and put in force in this process.
        """
        self.store.start_watching(follow)

    def update(self, engine_index: int, answer: dict[str, Any]) -> None:
        """Take in what one engine answered to `metrics`."""
        self.totals.update(engine_index, answer["totals"])
        self.totals.update_gauges(engine_index, answer["gauges"])

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        self.admins = AdminKeys(new.admin_digests)
        server_metrics().policy_loaded(new.loaded_at)

    def _reloaded(self, result: ReloadResult) -> None:
        server_metrics().policy_result(result.outcome)


def install(store: PolicyStore) -> Operations:
    """For the engine that is about to be built under this policy."""
    global _latest
    operations = Operations(store)
    with _lock:
        _latest = operations
    return operations


def uninstall() -> None:
    """The engine that is about to be built has nothing of ours."""
    global _latest
    with _lock:
        _latest = None


def latest() -> Operations | None:
    """The `Operations` of the newest engine in this process, or None where its policy asks for nothing."""
    return _latest


def server_metrics() -> ServerMetrics:
    """Prometheus allows each series once per process, so all engines of a process (in tests) share them."""
    global _server_metrics
    with _lock:
        if _server_metrics is None:
            _server_metrics = ServerMetrics()
        return _server_metrics


def _register_cache(totals: EngineTotals, snapshot: PolicySnapshot) -> None:
    global _cache_metrics, _trace_metrics
    with _lock:
        if snapshot.policy.retention is not None:
            _cache_metrics = _cache_metrics or CacheMetrics()
            _cache_metrics.register(totals)
        _trace_metrics = _trace_metrics or BlockTraceMetrics()
        _trace_metrics.register(totals)
