"""Which cached block dies next.

Start at ``order`` for what an eviction order and its queues are; ``lru`` is vLLM's own, ``reuse`` learns from
traffic, ``replay`` runs both over recorded traces (``traces``).
"""

from __future__ import annotations

from vllm_ext.cache.order import (
    ORDERS,
    Arrival,
    Departure,
    EvictionOrder,
    EvictionQueue,
    Score,
    Stop,
    make_order,
)

__all__ = [
    "ORDERS",
    "Arrival",
    "Departure",
    "EvictionOrder",
    "EvictionQueue",
    "Score",
    "Stop",
    "make_order",
]
