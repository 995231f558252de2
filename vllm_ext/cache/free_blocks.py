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


class Holding:
    """What a cached block counts as: shared by neighbours, so that most work is per run and not per block.

    Attributes:
        group: share group that it is resident for.
        base, boost, expires: as in `Protection`; a boost of no effect is 0.
        place: (group, level), the queue that it waits in when unused.
    """

    __slots__ = ("base", "boost", "expires", "group", "place")

    def __init__(self, group: int, base: int, boost: int = 0, expires: float = -math.inf) -> None:
        self.group = group
        self.base = base
        self.boost = boost
        self.expires = expires
        self.place = (group, max(base, boost))


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
        self.uniform = True
        """No block ever had another protection than the default."""
        self._blank: list[int] = []  # the last is the next to be taken
        self._queues: dict[tuple[int, int], EvictionQueue] = {}  # by place
        self._levels: dict[int, int] = {EVERYBODY_ELSE: 0}  # group -> bit set of the levels that hold blocks
        self._length = 0
        # Facts about a block, by id. What `protection` says of one that is not cached means nothing.
        self.is_cached = bytearray(num_blocks)
        self.protection: list[Holding] = [_BLANK] * num_blocks
        self._is_queued = bytearray(num_blocks)
        self._expired = bytearray(num_blocks)
        self._num_expired = 0
        self._hollow: set[int] = set()  # queued, but invalidated
        self._holdings: dict[tuple[int, int], Holding] = {}  # those without a boost, by place
        # Runs of boosted blocks in queues. Of those that end at one time, the one that was given back first
        # falls back first: a child before its parent.
        self._deadlines: list[_Deadline] = []
        self._pushed = 0
        self._clean_at = _MIN_DEADLINES
        self.set_shares(shares or {})

    def __len__(self) -> int:
        """Unused blocks, blank ones included: what vLLM calls `num_free_blocks`."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Blank blocks, then level by level: the sequence of eviction where no share interferes."""
        yield from reversed(self._blank)
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
        self.cached_n((block,), group, protection)

    def cached_n(self, blocks: Sequence[int], group: int, protection: Protection = DEFAULT) -> None:
        """`cached` for each. Those that were cached already hold something else now, for whom they did."""
        holding = self._make(group, protection.base, protection.boost, protection.expires)
        is_cached, holdings = self.is_cached, self.protection
        again = []
        for block in blocks:
            if is_cached[block]:
                again.append(block)
            else:
                is_cached[block] = 1
                holdings[block] = holding
        self.resident[group] += len(blocks) - len(again)
        if again:
            self.order.invalidate(again)

    def protect(self, block: int, protection: Protection, now: float) -> None:
        """Another request wants the block kept, too: what covers both holds. Call it while it is in use."""
        self.protect_n((block,), protection, now)

    def protect_n(self, blocks: Sequence[int], protection: Protection, now: float) -> None:
        """`protect` for each; those that are not cached are left alone."""
        is_cached, holdings = self.is_cached, self.protection
        last: Holding | None = None
        covering: Holding | None = None
        for block in blocks:
            holding = holdings[block]
            if holding is not last:
                last, covering = holding, self._covering(holding, protection, now, covering)
            if covering is not None and covering is not holding and is_cached[block]:
                holdings[block] = covering

    def group_of(self, block: int) -> int:
        """The share group that a cached block is resident for."""
        return self.protection[block].group

    def dropped(self, block: int) -> None:
        """The contents of a block in use left the prefix cache. `pop` says so of its victims by itself."""
        if self.is_cached[block]:
            self.is_cached[block] = 0
            self.resident[self.protection[block].group] -= 1
            self._fresh(block)
            self.order.invalidate((block,))

    def forget(self, block: int) -> None:
        """The block's contents became invalid by themselves, used or not. An unused one goes before all that
        hold something; but where priorities say nothing, `lru` leaves it in its place, as vLLM does.
        """
        if not self._is_queued[block] or not self.is_cached[block]:
            self.dropped(block)
        elif self.protection[block].place == _BLANK.place and isinstance(self.order, LruOrder):
            self.dropped(block)
            self._hollow.add(block)
        else:
            place = self.protection[block].place
            self._queues[place].withdraw(block)
            self._left(place)
            self._is_queued[block] = 0
            self._length -= 1
            self.dropped(block)
            self.release_blank((block,))

    # Coming and going

    def release(self, departure: Departure, unused: Sequence[int]) -> None:
        """A request gives its blocks back.

        Args:
            departure: all its blocks, in the order of their tokens.
            unused: indices into `departure.blocks`, ascending, of those that nobody uses any more.
        """
        # First what expired before: a child that fell back later than its parent came would outlive it.
        self.expire(departure.time)
        blocks, known = departure.blocks, self.protection
        if not blocks:
            return
        holdings = [known[block] for block in blocks]
        deepest = holdings[-1]
        if not deepest.boost and holdings.count(deepest) == len(blocks):
            runs = [(0, len(blocks), deepest)]
        else:
            runs = self._cover_children(departure, holdings)
        end = len(unused)
        for start, stop, holding in runs:
            if len(unused) == len(blocks):
                self._push(departure, start, stop, holding)
                continue
            while end and unused[end - 1] >= start:
                # The longest run of neighbours, from the deep end.
                begin = end - 1
                while begin and unused[begin - 1] == unused[begin] - 1 and unused[begin - 1] >= start:
                    begin -= 1
                self._push(departure, unused[begin], unused[end - 1] + 1, holding)
                end = begin
        self._length += len(unused)

    def release_blank(self, blocks: Sequence[int]) -> None:
        """Blocks that cache nothing; the first of them is the next to be taken."""
        for block in blocks:
            if self.is_cached[block]:
                self.dropped(block)
            self.protection[block] = _BLANK
        self._blank.extend(reversed(blocks))
        self._length += len(blocks)

    def take(self, block: int) -> None:
        """A request uses an unused block again.

        Raises:
            KeyError: the block is not unused.
        """
        self.take_n((block,))

    def take_n(self, blocks: Sequence[int]) -> None:
        """`take` for each: cheaper for blocks that were given back together."""
        queued, known = self._is_queued, self.protection
        if 0 in map(queued.__getitem__, blocks):
            self._take_blank(blocks)
            return
        start, count = 0, len(blocks)
        while start < count:
            holding, stop = known[blocks[start]], start + 1
            while stop < count and known[blocks[stop]] is holding:
                stop += 1
            self._queues[holding.place].remove_n(blocks[start:stop])
            self._left(holding.place)
            start = stop
        for block in blocks:
            queued[block] = 0
        self._length -= count
        if self._hollow:
            self._hollow.difference_update(blocks)

    def pop(self, count: int, now: float, group: int = EVERYBODY_ELSE) -> list[int]:
        """The next `count` victims, for a request of `group`.

        Their contents are forgotten here; the caller removes them from its own tables.

        Raises:
            ValueError: fewer than `count` blocks are unused.
        """
        if count > self._length:
            raise ValueError(f"{count} blocks wanted, {self._length} unused")
        if self._deadlines:
            self.expire(now)
        victims: list[int] = []
        if count and self._blank:
            victims = self._blank[: -count - 1 : -1]
            del self._blank[-count:]
        while len(victims) < count:
            victims += self._pop_some(count - len(victims), group)
        self._length -= count
        return victims

    def expire(self, now: float) -> None:
        """Blocks whose protection ended by `now` fall back to their base priority."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, _, holding, departure, start, stop = heapq.heappop(deadlines)
            waiting = self._waiting(holding, departure, start, stop)
            if not waiting:
                continue
            base = self._make(holding.group, holding.base)
            queue = self._queues[holding.place]
            for index in waiting:
                block = departure.blocks[index]
                queue.withdraw(block)
                self.protection[block] = base
                if not self._expired[block]:
                    self._expired[block] = 1
                    self._num_expired += 1
            self._left(holding.place)
            end = len(waiting)
            while end:
                begin = end - 1
                while begin and waiting[begin - 1] == waiting[begin] - 1:
                    begin -= 1
                self._push(departure, waiting[begin], waiting[end - 1] + 1, base)
                end = begin

    # How it works

    def _make(self, group: int, base: int, boost: int = 0, expires: float = -math.inf) -> Holding:
        if boost > base:
            self.uniform = False
            return Holding(group, base, boost, expires)
        holding = self._holdings.get((group, base))
        if holding is None:
            holding = self._holdings[group, base] = Holding(group, base)
            self.uniform = self.uniform and base == DEFAULT_PRIORITY
        return holding

    def _covering(
        self, holding: Holding, wanted: Protection | Holding, now: float, like: Holding | None
    ) -> Holding:
        """`holding` made to cover `wanted`; an equal one of `holding`, `like` where there is one."""
        base, boost, expires = _cover(holding, wanted, now)
        if base == holding.base and boost == holding.boost and expires == holding.expires:
            return holding
        if (
            like is not None
            and base == like.base
            and boost == like.boost
            and expires == like.expires
            and holding.group == like.group
        ):
            return like
        return self._make(holding.group, base, boost, expires)

    def _cover_children(
        self, departure: Departure, holdings: list[Holding]
    ) -> list[tuple[int, int, Holding]]:
        """Walk from the deepest block up, each covering those behind it. Returns (start, stop, holding) of
        runs of neighbours, the deepest first.
        """
        now, blocks, known = departure.time, departure.blocks, self.protection
        runs = []
        stop = len(blocks)
        last = holdings[-1]
        covering = below = self._covering(last, _NOTHING, now, last)
        for index in range(stop - 1, -1, -1):
            holding = holdings[index]
            if holding is not last:
                last, covering = holding, self._covering(holding, below, now, below)
                if covering is not below:
                    runs.append((index + 1, stop, below))
                    stop, below = index + 1, covering
            if covering is not holding:
                known[blocks[index]] = covering
        runs.append((0, stop, below))
        return runs

    def _push(self, departure: Departure, start: int, stop: int, holding: Holding) -> None:
        place = holding.place
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = self.order.queue()
        queue.push(departure, start, stop)
        group, level = place
        self._levels[group] = self._levels.get(group, 0) | 1 << level
        queued = self._is_queued
        run = departure.blocks[start:stop]
        for block in run:
            queued[block] = 1
        if holding.boost:
            # An object of its own tells, when the time comes, which of the run have stayed here.
            own = Holding(group, holding.base, holding.boost, holding.expires)
            for block in run:
                self.protection[block] = own
            self._pushed += 1
            if len(self._deadlines) >= self._clean_at:
                self._clean_deadlines()
            heapq.heappush(self._deadlines, (own.expires, self._pushed, own, departure, start, stop))

    def _waiting(self, holding: Holding, departure: Departure, start: int, stop: int) -> list[int]:
        """Which of the run have not been used or evicted since it was pushed: indices."""
        blocks, queued, known = departure.blocks, self._is_queued, self.protection
        return [
            index for index in range(start, stop) if known[blocks[index]] is holding and queued[blocks[index]]
        ]

    def _clean_deadlines(self) -> None:
        """Drop those of runs that have left: a busy prompt with a long time to live comes back many times."""
        self._deadlines = [entry for entry in self._deadlines if self._waiting(*entry[2:])]
        heapq.heapify(self._deadlines)
        self._clean_at = max(_MIN_DEADLINES, 2 * len(self._deadlines))

    def _take_blank(self, blocks: Sequence[int]) -> None:
        """Some of `blocks` are in no queue. vLLM does not do this."""
        for block in blocks:
            if self._is_queued[block]:
                self.take_n((block,))
                continue
            try:
                self._blank.remove(block)
            except ValueError:
                raise KeyError(f"block {block} is in use") from None
            self._length -= 1

    def _left(self, place: tuple[int, int]) -> None:
        if not self._queues[place]:
            self._levels[place[0]] &= ~(1 << place[1])

    def _fresh(self, block: int) -> None:
        self._num_expired -= self._expired[block]
        self._expired[block] = 0

    def _pop_some(self, count: int, asking: int) -> list[int]:
        """At least one victim, at most `count`, from one queue."""
        group, level, limit, cause, rival = self._choose(asking)
        queue = self._queues[group, level]
        count = min(count, limit)
        victims = queue.pop_n(count) if rival is None else queue.pop_before(count, rival)
        held = victims
        if self._hollow:
            held = [block for block in victims if block not in self._hollow]
            self._hollow.difference_update(victims)
        if self.on_evict is not None and held:
            self.on_evict(held, cause, self._expired)
        if self._num_expired:
            expired = sum(map(self._expired.__getitem__, held))
            if expired:
                for block in held:
                    self._fresh(block)
            if expired and cause == "capacity":
                self.evictions["ttl", group] += expired
                self.evictions[cause, group] += len(held) - expired
            else:
                self.evictions[cause, group] += len(held)
        else:
            self.evictions[cause, group] += len(held)
        self.resident[group] -= len(held)
        queued, is_cached = self._is_queued, self.is_cached
        for block in victims:
            queued[block] = is_cached[block] = 0
        self._left((group, level))
        return victims

    def _choose(self, asking: int) -> tuple[int, int, int, str, Score | None]:
        """(group, level, blocks that may be taken before the choice must be made anew, cause, score at which
        another group's turn comes).
        """
        occupied = [group for group, levels in self._levels.items() if levels]
        if len(occupied) == 1:
            group = occupied[0]
            return group, self._lowest_level(group), self._length, "capacity", None
        resident, shares = self.resident, self.shares
        over = [group for group in occupied if group in shares and resident[group] > shares[group].maximum]
        if over:
            group, level, rival = self._first(over)
            excess = math.ceil(resident[group] - self._share(group).maximum)
            return group, level, max(excess, 1), "quota", rival
        above = [
            group for group in occupied if group == asking or resident[group] > self._share(group).minimum
        ]
        group, level, rival = self._first(above or occupied)
        limit = self._length
        if above and group != asking:
            limit = max(resident[group] - self._share(group).minimum, 1)
        return group, level, limit, "capacity", rival

    def _first(self, groups: list[int]) -> tuple[int, int, Score | None]:
        """(group, level, score of the next best) of the group that holds the lowest level; of equals, the one
        whose victim the order would take first.
        """
        level = min(self._lowest_level(group) for group in groups)
        rivals = [group for group in groups if self._levels[group] >> level & 1]
        if len(rivals) == 1:
            return rivals[0], level, None
        scores: list[tuple[Score, int]] = []
        for group in rivals:
            score = self._queues[group, level].peek()
            assert score is not None
            scores.append((score, group))
        scores.sort()
        return scores[0][1], level, scores[1][0]

    def _lowest_level(self, group: int) -> int:
        levels = self._levels[group]
        return (levels & -levels).bit_length() - 1

    def _share(self, group: int) -> Share:
        return self.shares.get(group, _NO_SHARE)


_Deadline = tuple[float, int, Holding, Departure, int, int]
"""(time, number of the push, its own holding, departure, start, stop)."""
_MIN_DEADLINES = 256
_NO_SHARE = Share()
_NOTHING = Protection(base=-1)
_BLANK = Holding(EVERYBODY_ELSE, DEFAULT_PRIORITY)


def cover(parent: Protection, child: Protection, now: float) -> Protection:
    """The least protection of this form that is never below either from `now` on: what a parent must have.

    The result's boost is in force (above its base, and not over) or 0.
    """
    return Protection(*_cover(parent, child, now))


def _cover(parent: Protection | Holding, child: Protection | Holding, now: float) -> tuple[int, int, float]:
    base = max(parent.base, child.base)
    boost, expires = 0, -math.inf
    for protection in (parent, child):
        if protection.boost > base and protection.expires > now:
            boost, expires = max(boost, protection.boost), max(expires, protection.expires)
    return base, boost, expires
