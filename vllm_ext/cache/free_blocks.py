"""Which unused block dies next: quotas first, then retention priority, then the order.

Every unused block is in exactly one place:

- *blank*: it caches nothing (never used, or its contents were dropped). Blank blocks always go first.
- a *queue* of one (share group, priority level). A share group is a tenant with a `min_share` or `max_share`,
  or everybody else.

A victim is taken from the groups above their `max_share` if there are any; else from the groups above their
`min_share`, and the asking group's own; else (everybody left is below their floor) from anybody: a share is
never a reason to fail an allocation. Among these, the lowest effective priority goes first, and within one
priority what the order says.

A block has a base priority and may have a boost that ends (its TTL): then it falls back to its base. Since a
child is unreachable without its parent, `release` makes every block at least as well protected, now and at
any later time, as the blocks behind it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ext.cache.lru import LruOrder
from vllm_ext.cache.order import Departure, EvictionOrder, EvictionQueue, Score

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100
EVERYBODY_ELSE = 0
"""The share group of all tenants that have no share of their own."""


class Protection(NamedTuple):
    """What a retention class says of a block.

    Attributes:
        base: priority 0 to 100 for good.
        boost: priority until `expires`; of no effect at or below `base`.
        expires: seconds, on the clock of the departures.
    """

    base: int = DEFAULT_PRIORITY
    boost: int = 0
    expires: float = -math.inf


DEFAULT = Protection()


@dataclass(frozen=True, slots=True)
class Share:
    """A group's part of the pool, in blocks. `minimum` 0 and `maximum` infinite: none."""

    minimum: int = 0
    maximum: float = math.inf


class FreeBlocks:
    """The unused blocks of one pool.

    Args:
        num_blocks: block ids are below this.
        order: decides within one priority level.
        shares: share group -> its limits. Group 0 is everybody else and has none.
    """

    def __init__(
        self,
        num_blocks: int,
        order: EvictionOrder,
        shares: dict[int, Share] | None = None,
    ) -> None:
        self.order = order
        self.shares: dict[int, Share] = {}
        self.resident: Counter[int] = Counter()
        """Cached blocks by share group, used or not."""
        self.evictions: Counter[tuple[str, int]] = Counter()
        """(cause, share group) -> blocks. Causes: capacity, quota, ttl (protected once, and expired)."""
        self.on_evict: Callable[[list[int], str, bytearray], None] | None = None
        """Called with cached blocks that are about to be forgotten, the cause (capacity or quota), and by
        block id whether its protection has expired."""
        self._blank = LruOrder(num_blocks).queue()
        self._queues: dict[tuple[int, int], EvictionQueue] = {}
        self._levels: dict[int, int] = {EVERYBODY_ELSE: 0}  # group -> bit set of the levels that hold blocks
        self._length = 0
        # Facts about a block, by id. `_place` is the queue it is in (group, level), None if used or blank.
        self.group = [EVERYBODY_ELSE] * num_blocks
        self.is_cached = bytearray(num_blocks)
        self.protection = [DEFAULT] * num_blocks
        self._place: list[tuple[int, int] | None] = [None] * num_blocks
        self._is_blank = bytearray(num_blocks)
        # Of a boosted block in a queue: where it came from, and its entry in `_deadlines`.
        self._boosted: list[tuple[Departure, int, int] | None] = [None] * num_blocks
        self._expired = bytearray(num_blocks)
        # Of blocks whose protection ends at one time, the one that was given back first falls back first: a
        # child before its parent.
        self._deadlines: list[tuple[float, int, int]] = []
        self._pushed = 0
        self.set_shares(shares or {})

    def __len__(self) -> int:
        """Unused blocks, blank ones included: what vLLM calls `num_free_blocks`."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Blank blocks, then level by level: the sequence of eviction where no share interferes."""
        yield from self._blank
        for key in sorted(self._queues, key=lambda key: (key[1], key[0])):
            yield from self._queues[key]

    def set_shares(self, shares: dict[int, Share]) -> None:
        """Take over a reloaded policy's shares. Blocks keep the group that cached them."""
        self.shares = dict(shares)
        for group in (EVERYBODY_ELSE, *shares):
            self._levels.setdefault(group, 0)

    # What a block holds

    def cached(self, block: int, group: int, protection: Protection = DEFAULT) -> None:
        """The block's contents were put into the prefix cache just now, for a request of `group`."""
        assert not self.is_cached[block], f"block {block} is cached already"
        self.is_cached[block] = 1
        self.group[block] = group
        self.resident[group] += 1
        self.protection[block] = protection

    def protect(self, block: int, protection: Protection, now: float) -> None:
        """Another request wants the block kept, too: what covers both holds. Call it while it is in use."""
        self.protection[block] = cover(self.protection[block], protection, now)

    def dropped(self, block: int) -> None:
        """The block's contents left the prefix cache. `pop` says so by itself; a reset of the cache must."""
        if self.is_cached[block]:
            self.is_cached[block] = 0
            self.resident[self.group[block]] -= 1
            self.group[block] = EVERYBODY_ELSE
            self.protection[block] = DEFAULT
            self._expired[block] = 0

    def forget(self, block: int) -> None:
        """The block's contents became invalid by themselves, used or not. An unused one is blank then."""
        if self._place[block] is not None:
            self.take(block)
            self.dropped(block)
            self.release_blank([block])
        else:
            self.dropped(block)

    # Coming and going

    def release(self, departure: Departure, unused: Sequence[int]) -> None:
        """A request gives its blocks back.

        Args:
            departure: all its blocks, in the order of their tokens.
            unused: indices into `departure.blocks`, ascending, of those that nobody uses any more.
        """
        # First what expired before: a child that fell back later than its parent came would outlive it.
        self.expire(departure.time)
        places = self._cover_children(departure)
        stop = len(unused)
        while stop:
            # The longest run of neighbours, from the deep end, that goes into one queue.
            last = unused[stop - 1]
            place = places[last]
            start = stop - 1
            while start and unused[start - 1] == unused[start] - 1 and places[unused[start - 1]] == place:
                start -= 1
            self._push(departure, unused[start], last + 1, place)
            stop = start
        self._length += len(unused)

    def release_blank(self, blocks: Sequence[int]) -> None:
        """Blocks that cache nothing; the first of them is the next to be taken."""
        self._blank.push_front(blocks)
        for block in blocks:
            self._is_blank[block] = 1
        self._length += len(blocks)

    def take(self, block: int) -> None:
        """A request uses an unused block again.

        Raises:
            KeyError: the block is not unused.
        """
        place = self._place[block]
        if place is not None:
            self._queues[place].remove(block)
            self._left(block, place)
        elif self._is_blank[block]:
            self._blank.remove(block)
            self._is_blank[block] = 0
        else:
            raise KeyError(f"block {block} is in use")
        self._length -= 1

    def pop(self, count: int, now: float, group: int = EVERYBODY_ELSE) -> list[int]:
        """The next `count` victims, for a request of `group`.

        Their contents are forgotten here; the caller removes them from its own tables.

        Raises:
            ValueError: fewer than `count` blocks are unused.
        """
        if count > self._length:
            raise ValueError(f"{count} blocks wanted, {self._length} unused")
        self.expire(now)
        victims = self._blank.pop_n(min(count, len(self._blank)))
        for block in victims:
            self._is_blank[block] = 0
        while len(victims) < count:
            victims += self._pop_some(count - len(victims), group)
        self._length -= count
        return victims

    def expire(self, now: float) -> None:
        """Blocks whose protection ended by `now` fall back to the default priority. O(log n) per protected
        block.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, entry, block = heapq.heappop(self._deadlines)
            place, origin = self._place[block], self._boosted[block]
            if place is None or origin is None or origin[2] != entry:
                continue  # in use, evicted, or given back anew meanwhile
            protection = self.protection[block]
            self._queues[place].remove(block)
            self._left(block, place)
            self.protection[block] = Protection(protection.base)
            self._expired[block] = 1
            departure, index, _ = origin
            self._push(departure, index, index + 1, (place[0], protection.base))

    # How it works

    def _cover_children(self, departure: Departure) -> list[tuple[int, int]]:
        """Walk from the deepest block up, each covering those behind it; returns the queue each block belongs
        in.
        """
        now, group, protections = departure.time, self.group, self.protection
        places = [(EVERYBODY_ELSE, 0)] * len(departure.blocks)
        below = _NOTHING
        for index in range(len(departure.blocks) - 1, -1, -1):
            block = departure.blocks[index]
            protection = protections[block]
            if protection is not below:
                protections[block] = below = protection = cover(protection, below, now)
            places[index] = (group[block], max(protection.base, protection.boost))
        return places

    def _push(self, departure: Departure, start: int, stop: int, place: tuple[int, int]) -> None:
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = self.order.queue()
        queue.push(departure, start, stop)
        group, level = place
        self._levels[group] = self._levels.get(group, 0) | 1 << level
        for index in range(stop - 1, start - 1, -1):
            block = departure.blocks[index]
            self._place[block] = place
            protection = self.protection[block]
            if protection.boost > protection.base:
                self._pushed += 1
                self._boosted[block] = (departure, index, self._pushed)
                heapq.heappush(self._deadlines, (protection.expires, self._pushed, block))

    def _left(self, block: int, place: tuple[int, int]) -> None:
        self._place[block] = None
        self._boosted[block] = None
        if not self._queues[place]:
            self._levels[place[0]] &= ~(1 << place[1])

    def _pop_some(self, count: int, asking: int) -> list[int]:
        """At least one victim, at most `count`, from one queue."""
        group, level, limit, cause = self._choose(asking)
        queue = self._queues[group, level]
        victims = queue.pop_n(min(count, limit))
        if self.on_evict is not None:
            self.on_evict(victims, cause, self._expired)
        for block in victims:
            why = "ttl" if self._expired[block] and cause == "capacity" else cause
            self.evictions[why, group] += 1
            self._left(block, (group, level))
            self.dropped(block)
        return victims

    def _choose(self, asking: int) -> tuple[int, int, int, str]:
        """(group, level, blocks that may be taken before the choice must be made anew, cause)."""
        occupied = [group for group, levels in self._levels.items() if levels]
        if len(occupied) == 1:
            group = occupied[0]
            return self._lowest(group, len(self._queues[group, self._lowest_level(group)]), "capacity")
        over = [group for group in occupied if self.resident[group] > self._share(group).maximum]
        if over:
            group = self._first(over)
            excess = 1 if len(over) > 1 else int(self.resident[group] - self._share(group).maximum)
            return self._lowest(group, excess, "quota")
        above = [
            group
            for group in occupied
            if group == asking or self.resident[group] > self._share(group).minimum
        ]
        group = self._first(above or occupied)
        rivals = len(above or occupied) > 1
        floor = self.resident[group] - self._share(group).minimum
        limit = 1 if rivals else (floor if above and group != asking else len(self))
        return self._lowest(group, max(limit, 1), "capacity")

    def _first(self, groups: list[int]) -> int:
        """The group that holds the lowest level; of equals, the one whose victim the order would take
        first.
        """
        if len(groups) == 1:
            return groups[0]
        level = min(self._lowest_level(group) for group in groups)
        rivals = [group for group in groups if self._lowest_level(group) == level]
        if len(rivals) == 1:
            return rivals[0]
        scores: list[tuple[Score, int]] = []
        for group in rivals:
            score = self._queues[group, level].peek()
            assert score is not None
            scores.append((score, group))
        return min(scores)[1]

    def _lowest(self, group: int, limit: int, cause: str) -> tuple[int, int, int, str]:
        return group, self._lowest_level(group), limit, cause

    def _lowest_level(self, group: int) -> int:
        levels = self._levels[group]
        return (levels & -levels).bit_length() - 1

    def _share(self, group: int) -> Share:
        return self.shares.get(group, _NO_SHARE)


_NO_SHARE = Share()
_NOTHING = Protection(base=-1)


def cover(parent: Protection, child: Protection, now: float) -> Protection:
    """The least protection of this form that is never below either from `now` on: what a parent must have.

    The result's boost is in force (above its base, and not over) or 0.
    """
    base = max(parent.base, child.base)
    boost, expires = 0, -math.inf
    for protection in (parent, child):
        if protection.boost > base and protection.expires > now:
            boost, expires = max(boost, protection.boost), max(expires, protection.expires)
    if base == parent.base and boost == parent.boost and expires == parent.expires:
        return parent
    return Protection(base, boost, expires)
