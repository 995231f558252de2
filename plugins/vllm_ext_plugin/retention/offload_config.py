"""The CPU offload tier in vLLM's configuration: whether it is there, and which policy it evicts by.

Nothing of the tier is imported here: the front end needs the names only.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

CONNECTOR = "OffloadingConnector"
CPU_SPEC = "CPUOffloadingSpec"
POLICY = "vllm_ext"
"""Our name among vLLM's eviction policies of the tier (`lru`, `arc`)."""

POLICY_MODULE = "vllm_ext_plugin.retention.offload"
POLICY_CLASS = "OffloadPolicy"

logger = logging.getLogger("vllm_ext")


def choose(config: Any) -> None:
    """Let the tier evict by the policy's retention section, unless the user chose an eviction policy for it.

    Args:
        config: vLLM's `VllmConfig`; its `kv_transfer_config` is replaced by a copy where that changes it.
    """
    if not any("eviction_policy" not in extra for extra in cpu_tiers(config)):
        for extra in cpu_tiers(config):
            if extra["eviction_policy"] != POLICY:
                logger.warning(
                    "vllm_ext: the CPU offload tier evicts by %r, as kv_connector_extra_config says, and not "
                    "by the policy's retention section (leave eviction_policy out, or name %r)",
                    extra["eviction_policy"],
                    POLICY,
                )
        return
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = copy.deepcopy(transfer.kv_connector_extra_config)
    config.kv_transfer_config = transfer
    for extra in cpu_tiers(config):
        extra.setdefault("eviction_policy", POLICY)
    logger.info("vllm_ext: the CPU offload tier evicts by the policy's retention section")


def cpu_tiers(config: Any) -> list[dict[str, Any]]:
    """The `kv_connector_extra_config` of every connector that offloads to CPU memory, in vLLM's sequence."""
    transfer = config.kv_transfer_config
    if transfer is None or not transfer.kv_connector:
        return []
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != "MultiConnector":
        return [extra] if _is_cpu_tier(transfer.kv_connector, extra) else []
    found = []
    for part in (extra or {}).get("connectors", []):
        if isinstance(part, dict):
            inner = part.setdefault("kv_connector_extra_config", {})
            if _is_cpu_tier(part.get("kv_connector"), inner):
                found.append(inner)
    return found


def ours(config: Any) -> list[dict[str, Any]]:
    """Those of `cpu_tiers` that evict by our policy."""
    return [extra for extra in cpu_tiers(config) if extra.get("eviction_policy") == POLICY]


def tokens_per_chunk(extra: dict[str, Any], block_size: int) -> int:
    """What one key of the tier covers; read as vLLM's `build_offloading_config` reads it.

    Args:
        block_size: the device's, in tokens.
    """
    if extra.get("blocks_per_chunk") is not None:
        return int(extra["blocks_per_chunk"]) * block_size
    return int(extra.get("block_size") or block_size)


def register(config: Any) -> None:
    """Make our name known to vLLM in the engine process, before it builds the tier. Idempotent."""
    if not ours(config):
        return
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    try:
        CachePolicyFactory.register_cache_policy(POLICY, POLICY_MODULE, POLICY_CLASS)
    except ValueError:  # by an earlier engine of this process
        logger.debug("vllm_ext: eviction policy %r is registered already", POLICY)


def _is_cpu_tier(connector: Any, extra: Any) -> bool:
    return connector == CONNECTOR and isinstance(extra, dict) and extra.get("spec_name", CPU_SPEC) == CPU_SPEC
