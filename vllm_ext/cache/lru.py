"""First freed, first evicted: exactly the sequence of vLLM's own free list."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from vllm_ext.cache.order import Arrival, Departure, Score


class LruOrder:
    """Learns nothing.

    Doubly linked lists in two arrays that all queues share, since block ids are dense and a block is in one
    queue at most: an element is removed from the middle in O(1) without an object per block.
    """

    name = "lru"
    uses_keys = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = {"lru": 0}
        self.stamp = 0  # counts pushes, so that fronts of different queues can be compared
        self.stamp_of = [0] * num_blocks
        self.following = [-1] * num_blocks  # -1: in no queue
        self.preceding = [-1] * num_blocks

    def queue(self) -> LruQueue:
        return LruQueue(self)

    def arrive(self, now: float, cached: Sequence[int], missed: Sequence[Hashable]) -> Arrival:
        return Arrival(now)

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Nothing to forget: contents never mattered here."""


class LruQueue:
    """One list. Its sentinel, in front of the first and behind the last block, is an element behind those of
    the blocks in the order's arrays.
    """

    def __init__(self, order: LruOrder) -> None:
        self._order = order
        self._next, self._prev = order.following, order.preceding
        self._end = end = len(self._next)
        self._next.append(end)
        self._prev.append(end)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return self.after(None)

    def after(self, block: int | None) -> Iterator[int]:
        """Blocks behind `block` in eviction order; all for None."""
        block = self._next[self._end if block is None else block]
        while block != self._end:
            yield block
            block = self._next[block]

    def push(self, departure: Departure, start: int = 0, stop: int | None = None) -> None:
        self.append_n(departure.blocks[start:stop][::-1])

    def append_n(self, blocks: Sequence[int]) -> None:
        """At the back, the first of `blocks` to die first."""
        following, preceding, end = self._next, self._prev, self._end
        stamp_of, stamp = self._order.stamp_of, self._order.stamp + 1
        self._order.stamp = stamp
        last = preceding[end]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            stamp_of[block] = stamp
            last = block
        following[last] = end
        preceding[end] = last
        self._length += len(blocks)

    def push_front(self, blocks: Sequence[int]) -> None:
        following, preceding, end = self._next, self._prev, self._end
        first = following[end]
        for block in reversed(blocks):
            following[block] = first
            preceding[first] = block
            self._order.stamp_of[block] = 0
            first = block
        following[end] = first
        preceding[first] = end
        self._length += len(blocks)

    def remove(self, block: int) -> None:
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[int]) -> None:
        following, preceding = self._next, self._prev
        self._length -= len(blocks)
        for block in blocks:
            behind = following[block]
            if behind < 0:
                self._length += len(blocks) - blocks.index(block)
                raise KeyError(f"block {block} is not in this queue")
            before = preceding[block]
            following[before] = behind
            preceding[behind] = before
            following[block] = -1

    def withdraw(self, block: int) -> None:
        self.remove_n((block,))

    def void(self) -> None:
        """Nothing to forget: contents never mattered here."""

    def peek(self) -> Score | None:
        return (0.0, float(self._order.stamp_of[self._next[self._end]])) if self._length else None

    def pop_n(self, count: int) -> list[int]:
        following, end = self._next, self._end
        count = min(count, self._length)
        victims = []
        block = following[end]
        for _ in range(count):
            victims.append(block)
            behind = following[block]
            following[block] = -1
            block = behind
        following[end] = block
        self._prev[block] = end
        self._length -= count
        self._order.evictions["lru"] += count
        return victims

    def pop_before(self, count: int, rival: Score) -> list[int]:
        following, stamp_of = self._next, self._order.stamp_of
        block = following[self._end]
        older = 0
        while older < count and older < self._length and stamp_of[block] < rival[1]:
            older += 1
            block = following[block]
        return self.pop_n(max(older, 1))
