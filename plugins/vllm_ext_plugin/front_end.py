"""The front end's half of tenancy in one process: who asks (from HTTP or Python), and the stamp for the
engine.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from vllm_ext.labels import LabelCap
from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.metrics import TenancyMetrics
from vllm_ext.tenancy.salt import Salter
from vllm_ext.tenancy.stamp import Stamper
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.model_identity import model_identity
from vllm_ext_plugin.operations import server_metrics

logger = logging.getLogger("vllm_ext")

_lock = threading.Lock()
_metrics: TenancyMetrics | None = None
_latest: FrontEnd | None = None


class FrontEnd:
    """Everything the front end needs, for one engine. Reloads of the policy swap `authenticator`
    atomically.
    """

    def __init__(self, config: Any, store: PolicyStore, secret: bytes) -> None:
        tenancy = store.current.policy.tenancy
        assert tenancy is not None
        self.store = store
        self.stamper = Stamper(secret)
        self.salter = Salter(secret, model_identity(config, tenancy.model_id))
        self.authenticator = Authenticator(store.current)
        self.metrics = _process_metrics(store.current)
        self.faults = Faults()
        self._watching = False
        store.on_swap.append(self._swapped)

    def watch(self) -> None:
        """Follow changes of the policy file. Called once the engine runs: vLLM may fork it, and threads do
        not survive that.
        """
        if not self._watching:
            self._watching = True
            self.store.start_watching()

    def failed(self, part: str) -> None:
        """An exception in our own code was caught (call it inside `except`)."""
        self.faults.caught(part)
        server_metrics().internal_error(part)

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        # The memory of used signatures outlives a reload, or a reload would let each be used once more.
        gateway = self.authenticator.gateway
        section = new.policy.tenancy.gateway if new.policy.tenancy is not None else None
        if gateway is not None and section is not None and old.gateway_secret == new.gateway_secret:
            gateway.set_window(section.replay_window)
        else:
            gateway = None
        self.authenticator = Authenticator(new, gateway)
        _keep_labels(self.metrics, new)


def install(config: Any, store: PolicyStore) -> FrontEnd:
    """Wrap the front end's seams and make a `FrontEnd` for the engine that is about to be built from
    `config`.
    """
    global _latest
    from vllm_ext_plugin import stamping
    from vllm_ext_plugin.engine_config import salt_secret

    stamping.install()
    front_end = FrontEnd(config, store, salt_secret(store.current))
    with _lock:
        _latest = front_end
    return front_end


def uninstall() -> None:
    """The engine that is about to be built has no tenancy."""
    global _latest
    with _lock:
        _latest = None


def latest() -> FrontEnd | None:
    """The `FrontEnd` of the newest engine in this process, or None where the policy has no tenancy."""
    return _latest


def _process_metrics(snapshot: PolicySnapshot) -> TenancyMetrics:
    """Prometheus allows each series once per process, so all engines of a process (in tests) share them."""
    global _metrics
    with _lock:
        if _metrics is None:
            limit = snapshot.policy.metrics.max_tenant_labels
            _metrics = TenancyMetrics(LabelCap(limit), LabelCap(limit))
    _keep_labels(_metrics, snapshot)
    return _metrics


def _keep_labels(metrics: TenancyMetrics, snapshot: PolicySnapshot) -> None:
    tenancy = snapshot.policy.tenancy
    if tenancy is not None:
        limit = snapshot.policy.metrics.max_tenant_labels
        metrics.tenants.keep(tenancy.tenants, limit)
        metrics.domains.keep((snapshot.domain_of(name) for name in tenancy.tenants), limit)
