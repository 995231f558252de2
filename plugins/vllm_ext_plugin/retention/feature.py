"""Installs retention in a scheduler that vLLM has built, and keeps it in step with the policy."""

from __future__ import annotations

import logging
from typing import Any

from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.retention.block_queue import RetentionBlockQueue
from vllm_ext_plugin.retention.engine import RetentionEngine
from vllm_ext_plugin.retention.managers import ENGINE, manager_class, pool_class
from vllm_ext_plugin.retention.requests import Requests
from vllm_ext_plugin.retention.roles import RoleFinder, make_role_finder
from vllm_ext_plugin.tenancy_feature import identity_of

logger = logging.getLogger("vllm_ext")

TOOL_CALL_TOKENS = (
    "<tool_call>",
    "<|tool_call|>",
    "<|tool_call_begin|>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<function_calls>",
    "<|call|>",
)
"""Special tokens by which models begin a tool call: an answer that holds one is continued when the tool is
done.
"""


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
            tool_tokens=_tool_tokens(config.model_config) if policy.order == "reuse" else frozenset(),
            block_key=_block_key,
        )
        self.engine = RetentionEngine(pool, policy.order, self.requests, faults)
        pool.__dict__[ENGINE] = manager.__dict__[ENGINE] = self.engine
        pool.__class__ = pool_class(pool.__class__)
        manager.__class__ = manager_class(manager.__class__)
        pool.free_block_queue = RetentionBlockQueue(self.engine, pool.blocks)
        store.on_swap.append(self._swapped)
        logger.info("vllm_ext: retention is on, order %s, %d blocks", policy.order, len(pool.blocks))

    def totals(self) -> dict[str, list[tuple[list[str], float]]]:
        """Running totals for the front end's Prometheus counters."""
        names = self.requests.names
        evictions = self.engine.evictions + self.engine.free.evictions
        return {
            "evictions": [
                ([cause, names.get(group, "other")], float(count))
                for (cause, group), count in evictions.items()
            ],
            "wishes": [([reason], float(count)) for reason, count in self.requests.wishes.items()],
        }

    def gauges(self) -> dict[str, list[tuple[list[str], float]]]:
        """Present values for the front end's Prometheus gauges."""
        free = self.engine.free
        names = self.requests.names
        shares = {names[group]: share for group, share in free.shares.items() if group in names}
        return {
            "resident_blocks": [
                ([names.get(group, "other")], float(blocks)) for group, blocks in free.resident.items()
            ],
            "share_blocks": [
                ([name, bound], float(value))
                for name, share in shares.items()
                for bound, value in (("min", share.minimum), ("max", share.maximum))
                if value != float("inf")
            ],
            "retention_on": [([], float(self.engine.on))],
        }

    def _role_finder(self, policy: Any) -> RoleFinder | None:
        if not any(rule.role in ("system", "history", "tail") for rule in policy.rules):
            return None
        if self._roles is None:
            self._roles = make_role_finder(self._model_config)
        return self._roles

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        policy = new.policy.retention
        assert policy is not None, "whether there is a retention section is not changed at run time"
        self.requests.roles = self._role_finder(policy)
        self.requests.use(policy)
        self.engine.free.set_shares(self.requests.shares(len(self.engine.pool.blocks)))


def _block_key(block_hash: Any) -> Any:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    return make_block_hash_with_group_id(block_hash, 0)


def _served_name(model_config: Any) -> str:
    served = model_config.served_model_name
    return str(served[0] if isinstance(served, list) and served else served or model_config.model)


def _tool_tokens(model_config: Any) -> frozenset[int]:
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return frozenset()
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[token] for token in TOOL_CALL_TOKENS if token in vocabulary)
