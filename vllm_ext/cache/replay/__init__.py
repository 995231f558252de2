"""Replay of block traces through the eviction orders that serve, and through Belady's as a bound."""

from __future__ import annotations

from vllm_ext.cache.replay.belady import belady
from vllm_ext.cache.replay.outcome import Outcome, gap_closed
from vllm_ext.cache.replay.simulate import replay
from vllm_ext.cache.replay.study import (
    REPLAY_ORDERS,
    Capacity,
    Row,
    parse_capacity,
    study,
    worst_against_lru,
)

__all__ = [
    "REPLAY_ORDERS",
    "Capacity",
    "Outcome",
    "Row",
    "belady",
    "gap_closed",
    "parse_capacity",
    "replay",
    "study",
    "worst_against_lru",
]
