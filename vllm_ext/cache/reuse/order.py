"""What all queues of the `reuse` order share: facts about blocks, ghosts, ages, and the learned worth."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import inf

from vllm_ext.cache.order import Arrival, Departure
from vllm_ext.cache.reuse.classes import AGES, BANDS, smoothed_pace
from vllm_ext.cache.reuse.duel import Duel
from vllm_ext.cache.reuse.hazard import HazardTable, no_worth
from vllm_ext.cache.reuse.queue import ReuseQueue
from vllm_ext.cache.reuse.segment import Segment

GHOSTS = 3.0
"""Evicted blocks followed on, as a multiple of the capacity (ghosts as in 2Q and ARC, but to count what would
have been hit, not to steer by). With 1 the estimate is blind to all reuse that the cache misses."""
MIN_GHOSTS = 8192
"""Ghosts at least: they cost little, and a small cache sees only the reuse that is about to come without."""
MEMORY = 20.0
"""Half-life of the counts, in capacities' worth of blocks requested."""
MIN_REQUESTS = 20
"""Requests between two estimates, at least."""
TICK = 0.5
"""Seconds between two looks at the ages."""
PROMOTIONS = 48
"""Segments moved to the next age band per call, at most: this bounds the work, the rest waits."""

NEW = 3
"""In `hits_of`: the block came into the cache and has not been given back yet."""
_NEW = bytes((NEW,))
SEVERAL = -1
"""In `owner_of`: more than one session used the block."""


class ReuseOrder:
    """Evicts what is expected to bring the fewest hits for the residency it takes; see the package's text.

    Args:
        num_blocks: block ids are below this.
        capacity: blocks that the cache holds; by default `num_blocks`.
    """

    name = "reuse"
    uses_keys = True

    def __init__(self, num_blocks: int, capacity: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.capacity = capacity or num_blocks
        self.evictions = {"estimate": 0, "lru": 0, "ended": 0, "empty": 0, "orphaned": 0}
        # Facts by block id.
        self.segment_of: list[Segment | None] = [None] * num_blocks
        self.key_of: list[Hashable | None] = [None] * num_blocks
        self.parent_of = [-1] * num_blocks
        self.children = [0] * num_blocks  # cached children
        self.hits_of = bytearray([NEW]) * num_blocks  # 0, 1, 2 and more, or NEW
        self.owner_of = [0] * num_blocks  # 0 nobody named, or SEVERAL
        self._owned = False  # somebody named an owner once

        self.ghosts: OrderedDict[Hashable, Segment] = OrderedDict()  # oldest first
        self.table = HazardTable()
        self.duel = Duel(self.capacity)
        self.worth: list[float] | None = None  # by row; None: nothing learned, plain LRU
        self.estimates = 0
        self.stamp = 0.0
        self.now = 0.0
        self._ages: list[deque[Segment]] = [deque() for _ in range(BANDS)]  # oldest first
        self._next_tick = 0.0
        self._requests = self._blocks = self._learned_blocks = 0
        self._due = MIN_REQUESTS
        self.typical = 1.0  # blocks of a prompt, mean
        self._estimate: Iterator[None] | None = None  # the one in progress, writing to _rows
        self._rows: list[float] = []

    def queue(self) -> ReuseQueue:
        return ReuseQueue(self)

    def arrive(self, now: float, cached: Sequence[int], missed: Sequence[Hashable]) -> Arrival:
        self.tick(now)
        self._requests += 1
        self._blocks += len(cached) + len(missed)
        self.typical = self._blocks / self._requests
        fresh = self._blocks - self._learned_blocks
        if self._estimate is not None:
            self._continue_estimate()
        elif self._requests >= self._due and fresh >= min(0.5 * self.capacity, 0.05 * self._blocks):
            self._begin_estimate(fresh)
        arrival = Arrival(now, known=len(cached))
        last = None
        for block in reversed(cached):
            last = self.segment_of[block]
            if last is not None:  # None: a running request uses it
                break
        ghosts = self.ghosts
        unbroken = True
        for index, key in enumerate(missed, len(cached)):
            segment = ghosts.pop(key, None)
            if segment is None:
                unbroken = False
                continue
            arrival.past_hits[index] = min(segment.hits + 1, 2)
            self.table.hits[segment.row + segment.band] += 1.0
            self.duel.missed(segment)
            segment.tracked -= 1
            if unbroken:
                arrival.known = index + 1
                last = segment
        if arrival.known > 1 and last is not None:
            arrival.pace = smoothed_pace(last.pace, now - last.time)
            arrival.turns = last.turns + 1
        return arrival

    def hit(self, segment: Segment, count: int) -> None:
        """`count` unused blocks of `segment` are used again."""
        self.table.hits[segment.row + segment.band] += count
        self.duel.hit(segment, count)
        segment.live -= count
        segment.tracked -= count

    def tick(self, now: float) -> None:
        """Moves segments to the age band they have reached: a bounded number of them, oldest bands first."""
        self.now = now
        if now < self._next_tick:
            return
        budget, entered = PROMOTIONS, self.table.entered
        for band in range(BANDS - 2, -1, -1):
            waiting, edge = self._ages[band], now - AGES[band + 1]
            beyond = now - AGES[band + 2] if band + 2 < BANDS else -inf
            while waiting and waiting[0].time <= edge:
                segment = waiting.popleft()
                if not segment.tracked:
                    continue
                reached = band + 1
                entered[segment.row + reached] += segment.tracked
                if segment.time <= beyond:  # nobody called for a while: it entered those that it skips, too
                    reached = self._skip(segment, reached)
                segment.band = reached
                self._ages[reached].append(segment)
                if segment.live:
                    segment.queue.enlist(segment)
                budget -= 1
                if not budget:
                    return
        self._next_tick = now + TICK

    def _skip(self, segment: Segment, band: int) -> int:
        age = self.now - segment.time
        while band < BANDS - 1 and age >= AGES[band + 1]:
            band += 1
            self.table.entered[segment.row + band] += segment.tracked
        return band

    def enter(self, segment: Segment) -> None:
        """A new segment, at age 0."""
        self.table.entered[segment.row] += segment.tracked
        self._ages[0].append(segment)
        self.duel.push(segment)

    def adopt(self, departure: Departure, start: int, stop: int) -> bytes:
        """Notes facts of blocks that come for the first time since they were filled; past hits of all of them
        (`departure.blocks[start:stop]`).
        """
        if departure.owner:
            self._owned = True
        blocks, keys, owner = departure.blocks, departure.keys, departure.owner
        hits_of, past = self.hits_of, departure.arrival.past_hits
        key_of, parent_of, children = self.key_of, self.parent_of, self.children
        hits = bytearray(map(hits_of.__getitem__, blocks[start:stop]))
        place = hits.find(NEW)
        while place >= 0:
            end = len(hits) - len(hits[place:].lstrip(_NEW))  # new blocks are neighbours, as a rule
            hits[place:end] = bytes(end - place)
            first, last = start + place, start + end
            parent = blocks[first - 1] if first else -1
            for block, key in zip(blocks[first:last], keys[first:last], strict=True):
                hits_of[block] = 0
                key_of[block] = key
                parent_of[block] = parent
                if parent >= 0:
                    children[parent] += 1
                parent = block
            for index, count in past.items():
                if first <= index < last:
                    hits_of[blocks[index]] = hits[index - start] = count
            if self._owned:
                for block in blocks[first:last]:
                    self.owner_of[block] = owner
            place = hits.find(NEW, end)
        if self._owned:
            owner_of = self.owner_of
            for block in blocks[start:stop]:
                if owner_of[block] != owner:
                    owner_of[block] = SEVERAL
        return bytes(hits)

    def evict(self, blocks: Sequence[int], segment: Segment) -> None:
        """`blocks`, the deepest of `segment`, leave the cache and are followed on as its ghosts."""
        ghosts, key_of, hits_of = self.ghosts, self.key_of, self.hits_of
        parent_of, children, segment_of = self.parent_of, self.children, self.segment_of
        for block in blocks:
            ghosts[key_of[block]] = segment
            hits_of[block] = NEW
            parent = parent_of[block]
            if parent >= 0:
                parent_of[block] = -1
                left = children[parent] = children[parent] - 1
                if not left:
                    above = segment_of[parent]
                    if above is not None and above.parked:
                        above.queue.unpark(above)
        segment.live -= len(blocks)

    def orphan(self, block: int) -> None:
        """Cut `block` from its cached children: it is evicted before them. Slow, and only where queues are
        drained against the order of the chains.
        """
        place = -1
        for _ in range(self.children[block]):
            place = self.parent_of.index(block, place + 1)
            self.parent_of[place] = -1
        self.children[block] = 0

    def withdraw(self, block: int, segment: Segment) -> None:
        """`block` leaves `segment` without a use: its time there was not watched to the end, so it counts
        not."""
        self.segment_of[block] = None
        segment.live -= 1
        segment.tracked -= 1
        self.duel.held -= segment.recent
        for row in range(segment.row, segment.row + segment.band + 1):
            self.table.entered[row] -= 1.0

    def invalidate(self, blocks: Sequence[int]) -> None:
        """The contents of these blocks, which are in no queue, became invalid without an eviction."""
        for block in blocks:
            self.hits_of[block] = NEW
            self.orphan(block)
            parent = self.parent_of[block]
            if parent >= 0:
                self.parent_of[block] = -1
                self.children[parent] -= 1
                above = self.segment_of[parent]
                if not self.children[parent] and above is not None and above.parked:
                    above.queue.unpark(above)

    def forget(self, blocks: Iterable[int]) -> None:
        """The contents of `blocks` are void, and so is what was known about evicted ones."""
        for block in blocks:
            segment = self.segment_of[block]
            if segment is not None:
                self.segment_of[block] = None
                segment.live -= 1
                segment.tracked -= 1
                self.duel.held -= segment.recent
            self.hits_of[block] = NEW
            parent = self.parent_of[block]
            if parent >= 0:
                self.parent_of[block] = -1
                self.children[parent] -= 1
        for segment in self.ghosts.values():
            segment.tracked -= 1
            self.duel.held -= segment.recent
        self.ghosts.clear()

    def trim_ghosts(self) -> None:
        excess = len(self.ghosts) - int(max(GHOSTS * self.capacity, MIN_GHOSTS))
        entered, oldest = self.table.entered, self.ghosts.popitem
        held = 0
        for _ in range(excess):
            segment = oldest(last=False)[1]
            segment.tracked -= 1
            if segment.recent:
                held += 1
            # It left somewhere within the band: half of it was watched.
            entered[segment.row + segment.band] -= 0.5
        self.duel.held -= held

    def _begin_estimate(self, fresh: int) -> None:
        self.duel.judge(fresh, self.typical)
        self.table.fade(0.5 ** (fresh / (MEMORY * self.capacity)))
        self._rows = no_worth() if self.worth is None else self.worth.copy()
        self._estimate = self.table.estimate(self._rows, self.typical)
        self._learned_blocks = self._blocks
        self._due = self._requests + MIN_REQUESTS

    def _continue_estimate(self) -> None:
        """One step a request. The old worth rules until the new one is complete."""
        assert self._estimate is not None
        for _ in self._estimate:
            return
        self._estimate = None
        self.worth = self._rows
        self.estimates += 1
