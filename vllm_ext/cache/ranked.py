"""LRU where somebody else says how recently a block was used: the least rank goes first.

On the device the place in a list is the recency. In a tier that is filled by transfers it is not: a chunk's
recency is settled by its request, and the transfers end later, in any order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from vllm_ext.cache.order import Arrival, Departure, Score

Rank = tuple[Score, Any]
"""(recency, tie break)."""

MIN_COMPACTED = 64
"""Entries below which a heap is not worth cleaning."""


class RankedOrder:
    """Learns nothing.

    Args:
        num_blocks: block ids are below this.
        rank_of: a key's rank. It may change only while the key's block is in no queue.
    """

    name = "lru"
    uses_keys = True

    def __init__(self, num_blocks: int, rank_of: Callable[[Any], Rank]) -> None:
        self.num_blocks = num_blocks
        self.rank_of = rank_of
        self.evictions = {"lru": 0}

    def queue(self) -> RankedQueue:
        return RankedQueue(self)

    def arrive(self, now: float, cached: Sequence[int], missed: Sequence[Hashable]) -> Arrival:
        return Arrival(now)

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Nothing to forget: contents never mattered here."""


class RankedQueue:
    """A heap whose entries of removed blocks are dropped when they are met."""

    def __init__(self, order: RankedOrder) -> None:
        self._order = order
        self._entry: dict[int, tuple[Rank, int]] = {}
        self._heap: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[int]:
        return (block for _, block in sorted(self._entry.values()))

    def push(self, departure: Departure, start: int = 0, stop: int | None = None) -> None:
        for index in range(start, len(departure.blocks) if stop is None else stop):
            block = departure.blocks[index]
            entry = self._entry[block] = (self._order.rank_of(departure.keys[index]), block)
            heapq.heappush(self._heap, entry)

    def push_front(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError("a block without contents has no rank")

    def remove(self, block: int) -> None:
        del self._entry[block]
        if len(self._heap) > max(MIN_COMPACTED, 2 * len(self._entry)):
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)

    def remove_n(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.remove(block)

    def withdraw(self, block: int) -> None:
        self.remove(block)

    def void(self) -> None:
        """Nothing to forget: contents never mattered here."""

    def peek(self) -> Score | None:
        self._drop_removed()
        return self._heap[0][0][0] if self._heap else None

    def pop_n(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count:
            self._drop_removed()
            if not self._heap:
                break
            block = heapq.heappop(self._heap)[1]
            del self._entry[block]
            victims.append(block)
        self._order.evictions["lru"] += len(victims)
        return victims

    def pop_before(self, count: int, rival: Score) -> list[int]:
        victims = self.pop_n(1)
        while len(victims) < count and (score := self.peek()) is not None and score < rival:
            victims += self.pop_n(1)
        return victims

    def _drop_removed(self) -> None:
        heap, entries = self._heap, self._entry
        while heap and entries.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
