"""Several replays side by side: traces x capacities x orders, and what they say about each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext.cache.order import ORDERS
from vllm_ext.cache.replay.belady import belady
from vllm_ext.cache.replay.outcome import Outcome, gap_closed
from vllm_ext.cache.replay.simulate import replay
from vllm_ext.cache.traces.trace import Trace

REPLAY_ORDERS = (*ORDERS, "belady")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A cache size: a number of blocks, or a share of the trace's distinct prompt blocks."""

    text: str
    share: float | None
    blocks: int | None

    def of(self, trace: Trace) -> int:
        """In blocks, at least 1."""
        if self.share is not None:
            return max(1, int(trace.num_prompt_keys * self.share))
        assert self.blocks is not None
        return self.blocks


def parse_capacity(text: str) -> Capacity:
    """`5%` or a number of blocks, such as `4096`.

    Raises:
        ValueError: neither, or not above zero.
    """
    text = text.strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return Capacity(text, share, None)
        elif int(text) > 0:
            return Capacity(text, None, int(text))
    except ValueError:
        pass
    raise ValueError(
        f"capacity {text!r}: give a share such as 5% (above 0, up to 100%) or a number of blocks"
    )


@dataclass(slots=True)
class Row:
    """One trace at one capacity: outcomes by order."""

    trace: str
    capacity: Capacity
    blocks: int
    outcomes: dict[str, Outcome]

    def gap_closed(self, order: str) -> float | None:
        """None if LRU or Belady were not replayed, or leave no gap."""
        lru, best = self.outcomes.get("lru"), self.outcomes.get("belady")
        if lru is None or best is None:
            return None
        return gap_closed(self.outcomes[order].hit_ratio, lru.hit_ratio, best.hit_ratio)

    def against_lru(self, order: str) -> float | None:
        """Difference of hit ratios; None if LRU was not replayed."""
        lru = self.outcomes.get("lru")
        return None if lru is None else self.outcomes[order].hit_ratio - lru.hit_ratio

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "capacity": self.capacity.text,
            "capacity_blocks": self.blocks,
            "orders": {
                name: {
                    "hit_ratio": outcome.hit_ratio,
                    "hit_blocks": outcome.hit_blocks,
                    "prompt_blocks": outcome.prompt_blocks,
                    "gap_closed": self.gap_closed(name),
                    "against_lru": self.against_lru(name),
                    "evictions": outcome.evictions,
                    "refused_blocks": outcome.refused,
                    "tenants": {
                        tenant: {"hit_blocks": outcome.tenant_hits[tenant], "prompt_blocks": blocks}
                        for tenant, blocks in sorted(outcome.tenant_blocks.items())
                    },
                }
                for name, outcome in self.outcomes.items()
            },
        }


def study(
    traces: Iterable[Trace],
    capacities: Sequence[Capacity],
    orders: Sequence[str],
    *,
    pin_running: bool = False,
    hints: bool = True,
    progress: Callable[[str, int], None] | None = None,
) -> list[Row]:
    """All replays.

    Args:
        progress: called with what is being replayed and how many requests were done since the last call.
    """
    rows = []
    for trace in traces:
        for capacity in capacities:
            blocks = capacity.of(trace)
            outcomes = {}
            for order in orders:
                label = f"{trace.name} {capacity.text} {order}"
                if progress is not None:
                    progress(label, 0)
                if order == "belady":
                    outcomes[order] = belady(trace, blocks, pin_running=pin_running)
                    if progress is not None:
                        progress(label, len(trace.requests))
                else:
                    report = (lambda done, label=label: progress(label, done)) if progress else None
                    outcomes[order] = replay(
                        trace, order, blocks, pin_running=pin_running, hints=hints, progress=report
                    )
            rows.append(Row(trace.name, capacity, blocks, outcomes))
    return rows


def worst_against_lru(rows: Iterable[Row], order: str) -> tuple[float, Row] | None:
    """The row where `order` does worst against LRU; the difference of hit ratios is negative for a loss."""
    found = [(difference, row) for row in rows if (difference := row.against_lru(order)) is not None]
    return min(found, key=lambda pair: pair[0]) if found else None
