"""Installs retention in a scheduler that vLLM has built, and keeps it in step with the policy."""

from __future__ import annotations

import logging
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any

from vllm_ext.cache.free_blocks import DEFAULT_PRIORITY
from vllm_ext.cache.telemetry import CacheTelemetry
from vllm_ext.engine_totals import Report
from vllm_ext.labels import LabelCap
from vllm_ext.policy import PolicySnapshot, PolicyStore, RetentionPolicy
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.request_facts import tool_call_tokens
from vllm_ext_plugin.retention import offload_config
from vllm_ext_plugin.retention.block_queue import RetentionBlockQueue
from vllm_ext_plugin.retention.engine import RetentionEngine
from vllm_ext_plugin.retention.managers import ENGINE, manager_class, pool_class
from vllm_ext_plugin.retention.requests import Requests
from vllm_ext_plugin.retention.roles import RoleFinder, make_role_finder
from vllm_ext_plugin.tenancy_feature import identity_of

if TYPE_CHECKING:
    from vllm_ext_plugin.retention.offload import OffloadTiers

logger = logging.getLogger("vllm_ext")


class RetentionFeature:
    """One scheduler's retention.

    Args:
        scheduler: its `kv_cache_manager` and block pool get subclasses of what they were, and the pool our
            free list. store: must have a `retention` section.
    """

    def __init__(self, scheduler: Any, config: Any, store: PolicyStore, faults: Faults) -> None:
        policy = store.current.policy.retention
        assert policy is not None
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        self._model_config = config.model_config
        self._roles: RoleFinder | None = None
        self.requests = Requests(
            policy,
            block_size=manager.coordinator.single_type_managers[0].block_size,
            uniform=len(manager.coordinator.single_type_managers) > 1,
            model=_served_name(config.model_config),
            identity_of=identity_of,
            roles=self._role_finder(policy),
            tool_tokens=tool_call_tokens(config.model_config) if policy.order == "reuse" else frozenset(),
            block_key=_block_key,
        )
        self._label = LabelCap(0)
        self._keep_labels(store.current)
        telemetry = CacheTelemetry(len(pool.blocks), self._label, _block_bytes(manager.kv_cache_config))
        self.engine = RetentionEngine(pool, policy.order, self.requests, faults, telemetry=telemetry)
        pool.__dict__[ENGINE] = manager.__dict__[ENGINE] = self.engine
        pool.__class__ = pool_class(pool.__class__)
        manager.__class__ = manager_class(manager.__class__)
        pool.free_block_queue = RetentionBlockQueue(self.engine, pool.blocks)
        self.offload: OffloadTiers | None = None
        if offload_config.ours(config):
            from vllm_ext_plugin.retention.offload import OffloadTiers

            self.offload = OffloadTiers(
                config, self.requests, policy.order, faults, lambda: self.engine.clock()
            )
        store.on_swap.append(self._swapped)
        logger.info("vllm_ext: retention is on, order %s, %d blocks", policy.order, len(pool.blocks))

    def totals(self) -> Report:
        """Running totals for the front end's Prometheus counters."""
        engine = self.engine
        order = engine.free.order
        victims = engine.victims + Counter(order.evictions)
        estimates = engine.estimates + getattr(order, "estimates", 0)
        return {
            **engine.telemetry.totals(),
            "cache_victims": [
                ([order.name, chosen_by], float(count)) for chosen_by, count in victims.items()
            ],
            "cache_estimates": [([], float(estimates))],
            "cache_wishes": [([reason], float(count)) for reason, count in self.requests.wishes.items()],
        }

    def gauges(self) -> Report:
        """Present values for the front end's Prometheus gauges. All 0 once retention is switched off: who
        holds what is not followed any more.
        """
        engine, free, names = self.engine, self.engine.free, self.requests.names
        always: Report = {
            "cache_retention_on": [([], float(engine.on))],
            "cache_pool_blocks": [([], float(len(engine.pool.blocks)))],
        }
        if not engine.on:
            return always
        shares = [(names[group], group, share) for group, share in free.shares.items() if group in names]
        return {
            **always,
            **engine.telemetry.residents(free, _named_priorities(self.requests.policy), engine.clock()),
            "cache_share_resident_blocks": [
                ([self._label(name)], float(free.resident[group])) for name, group, _ in shares
            ],
            "cache_share_min_blocks": [
                ([self._label(name)], float(share.minimum)) for name, _, share in shares if share.minimum
            ],
            "cache_share_max_blocks": [
                ([self._label(name)], share.maximum) for name, _, share in shares if share.maximum < inf
            ],
            **_learned(free.order),
        }

    def _keep_labels(self, snapshot: PolicySnapshot) -> None:
        tenancy, retention = snapshot.policy.tenancy, snapshot.policy.retention
        listed = dict.fromkeys(
            [*(tenancy.tenants if tenancy else ()), *(retention.tenants if retention else ())]
        )
        self._label.keep(listed, snapshot.policy.metrics.max_tenant_labels)

    def _role_finder(self, policy: Any) -> RoleFinder | None:
        if not any(rule.role in ("system", "history", "tail") for rule in policy.rules):
            return None
        if self._roles is None:
            self._roles = make_role_finder(self._model_config)
        return self._roles

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        policy = new.policy.retention
        assert policy is not None, "whether there is a retention section is not changed at run time"
        roles = self._role_finder(policy)

        def take_over() -> None:
            self.requests.roles = roles
            self.requests.use(policy)
            self._keep_labels(new)
            self.engine.free.set_shares(self.requests.shares(len(self.engine.pool.blocks)))
            if self.offload is not None:
                self.offload.set_shares()

        self.engine.pending = take_over


def _learned(order: Any) -> Report:
    """What `reuse` shows of itself; nothing of an order that learns nothing."""
    if not hasattr(order, "duel"):
        return {}
    return {"cache_ghosts": [([], float(len(order.ghosts)))], "cache_margin": [([], order.duel.margin)]}


def _named_priorities(policy: RetentionPolicy) -> set[int]:
    """Those that the policy gives: they are label values."""
    found = {DEFAULT_PRIORITY, policy.default.priority, policy.default.decoded}
    for given in policy.classes.values():
        found |= {level for level in (given.priority, given.decoded_priority) if level is not None}
    return found


def _block_bytes(config: Any) -> int:
    """Bytes of KV in one block of one worker, over all layers, by the tensors that it allocates."""
    # All tensors are views of one allocation, and each names that one's size.
    return max((tensor.size for tensor in config.kv_cache_tensors), default=0) // config.num_blocks


def _block_key(block_hash: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    return make_block_hash_with_group_id(block_hash, 0)


def _served_name(model_config: Any) -> str:
    served = model_config.served_model_name
    return str(served[0] if isinstance(served, list) and served else served or model_config.model)
