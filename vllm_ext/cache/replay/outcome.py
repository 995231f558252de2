"""What a replay counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """Counts of one replay.

    Attributes:
        order: name.
        capacity: blocks.
        hit_blocks: prompt blocks found in the cache.
        prompt_blocks: all prompt blocks.
        evictions: blocks by what chose them.
        tenant_hits, tenant_blocks: the same by tenant.
        refused: blocks that found no place, because running requests held the whole pool.
        latency: CPU seconds spent on each request's blocks; empty unless asked for.
    """

    order: str
    capacity: int
    hit_blocks: int = 0
    prompt_blocks: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    tenant_hits: Counter[str] = field(default_factory=Counter)
    tenant_blocks: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    latency: list[float] = field(default_factory=list)

    def count(self, tenant: str | None, hits: int, blocks: int) -> None:
        """A request of `tenant` found `hits` of its `blocks`."""
        self.hit_blocks += hits
        self.prompt_blocks += blocks
        if tenant is not None:
            self.tenant_hits[tenant] += hits
            self.tenant_blocks[tenant] += blocks

    @property
    def hit_ratio(self) -> float:
        """All blocks hold equally many tokens, so this is the token-weighted ratio."""
        return self.hit_blocks / self.prompt_blocks


def gap_closed(ours: float, lru: float, belady: float) -> float | None:
    """(ours - LRU) / (Belady - LRU) of hit ratios; None where the gap is below 0.1 point."""
    return (ours - lru) / (belady - lru) if belady - lru >= 1e-3 else None
