"""What all queues of the `reuse` order share: facts about blocks, ghosts, ages, and the learned worth."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence

from vllm_ext.cache.order import Arrival
from vllm_ext.cache.reuse.classes import AGES, BANDS, smoothed_pace
from vllm_ext.cache.reuse.hazard import HazardTable, no_worth
from vllm_ext.cache.reuse.queue import ReuseQueue
from vllm_ext.cache.reuse.segment import Segment

GHOSTS = 3.0
"""Evicted blocks followed on, as a multiple of the capacity. With 1 the estimate is blind where it matters."""
MIN_GHOSTS = 8192
"""Ghosts at least: they cost a small cache little, and without them it sees only reuse that is about to come."""
MEMORY = 20.0
"""Half-life of the counts, in capacities' worth of blocks requested."""
MIN_REQUESTS = 20
"""Requests between two estimates, at least."""
TICK = 0.5
"""Seconds between two looks at the ages."""
PROMOTIONS = 48
"""Segments moved to the next age band per call, at most: this bounds the work, the rest waits for the next."""


class ReuseOrder:
    """Evicts what is expected to bring the fewest hits for the residency it takes; see the package's text.

    Args:
        num_blocks: block ids are below this.
        capacity: blocks that the cache holds; by default `num_blocks`.
    """

    name = "reuse"

    def __init__(self, num_blocks: int, capacity: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.capacity = capacity or num_blocks
        self.evictions = {"estimate": 0, "lru": 0, "ended": 0, "empty": 0}
        # Facts by block id. A key of None marks a block that holds nothing.
        self.segment_of: list[Segment | None] = [None] * num_blocks
        self.key_of: list[Hashable | None] = [None] * num_blocks
        self.parent_of = [-1] * num_blocks
        self.children = [0] * num_blocks  # cached children
        self.hits_of = bytearray(num_blocks)  # 0, 1, 2 and more
        self.owner_of = [0] * num_blocks  # 0 nobody named, -1 several

        self.ghosts: OrderedDict[Hashable, Segment] = OrderedDict()  # oldest first
        self.table = HazardTable()
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
            segment.tracked -= 1
            if unbroken:
                arrival.known = index + 1
                last = segment
        if arrival.known > 1 and last is not None:
            arrival.pace = smoothed_pace(last.pace, now - last.time)
            arrival.turns = last.turns + 1
        return arrival

    def tick(self, now: float) -> None:
        """Moves segments to the age band they have reached: a bounded number of them, oldest bands first."""
        self.now = now
        if now < self._next_tick:
            return
        budget = PROMOTIONS
        for band in range(BANDS - 2, -1, -1):
            waiting, edge = self._ages[band], now - AGES[band + 1]
            while waiting and waiting[0].time <= edge:
                segment = waiting.popleft()
                if segment.tracked:
                    self._promote(segment)
                    budget -= 1
                    if not budget:
                        return
        self._next_tick = now + TICK

    def enter(self, segment: Segment) -> None:
        """A new segment, at age 0."""
        self.table.entered[segment.row] += segment.tracked
        self._ages[0].append(segment)

    def _promote(self, segment: Segment) -> None:
        segment.band = band = segment.band + 1
        self.table.entered[segment.row + band] += segment.tracked
        self._ages[band].append(segment)
        if segment.live:
            segment.queue.enlist(segment)

    def evict(self, block: int, segment: Segment) -> None:
        """`block`, the deepest of `segment`, leaves the cache and is followed on as a ghost."""
        self.segment_of[block] = None
        segment.live -= 1
        key, self.key_of[block] = self.key_of[block], None
        self.ghosts[key] = segment
        self.hits_of[block] = 0
        parent = self.parent_of[block]
        if parent >= 0:
            self.parent_of[block] = -1
            self.children[parent] -= 1
            if not self.children[parent]:
                above = self.segment_of[parent]
                if above is not None and above.parked:
                    above.queue.unpark(above)

    def trim_ghosts(self) -> None:
        limit = max(GHOSTS * self.capacity, MIN_GHOSTS)
        ghosts = self.ghosts
        entered = self.table.entered
        while len(ghosts) > limit:
            segment = ghosts.popitem(last=False)[1]
            segment.tracked -= 1
            # It left somewhere within the band: half of it was watched.
            entered[segment.row + segment.band] -= 0.5

    def _begin_estimate(self, fresh: int) -> None:
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
