"""One queue of the `reuse` order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from vllm_ext.cache.order import Departure, Score
from vllm_ext.cache.reuse.classes import BANDS, DECODED, ENDED, LAST, MOODS, REQUESTS, mood, request_kind
from vllm_ext.cache.reuse.segment import Segment

if TYPE_CHECKING:
    from vllm_ext.cache.reuse.order import ReuseOrder

_EMPTY_SCORE = (-2.0, 0.0)
_HIT_ONCE_MORE = bytes((1, 2, 2))


MIN_SWEEP = 1024
"""Segments in a queue's line, at least, before those that are out of date are swept from its middle."""


class ReuseQueue:
    """Segments in rings, one per class and age band, oldest first; the ring worth least gives the victim.

    Rings and the LRU line are deques from which segments are not removed when they empty or age: what is out
    of date is dropped when it is met at the front.
    """

    def __init__(self, order: ReuseOrder) -> None:
        self._order = order
        self._rings: dict[int, deque[Segment]] = {}  # by row of the hazard table
        self._heap: list[tuple[float, int]] = []  # (worth, row) of the rings that may hold a victim
        self._queued: set[int] = set()  # rows in the heap
        self._line: deque[Segment] = deque()  # all segments, first freed first
        self._empty: deque[int] = deque()  # blocks that hold nothing
        self._length = 0
        self._sweep_at = MIN_SWEEP
        self._estimate = 0  # the order's estimate that the heap is built on

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from self._empty
        segment_of = self._order.segment_of
        for segment in self._line:
            for block in reversed(segment.blocks):
                if segment_of[block] is segment:
                    yield block

    # -- blocks come and go --------------------------------------------------------------------------------

    def push(self, departure: Departure, start: int = 0, stop: int | None = None) -> None:
        stop = len(departure.blocks) if stop is None else stop
        if start >= stop:
            return
        order, arrival = self._order, departure.arrival
        order.tick(departure.time)
        order.stamp += 1.0
        segment_of, hits_of = order.segment_of, order.hits_of
        request = request_kind(arrival, departure.num_prompt, order.typical)
        feeling = mood(arrival, departure.stop, departure.output_tokens)
        pieces: list[Segment] = []
        for first, end, kind in self._runs(departure, start, stop):
            blocks = list(departure.blocks[first:end])
            hits = hits_of[blocks[0]]
            if kind < 0:
                kind = hits * REQUESTS + request
            row = (kind * MOODS + feeling) * BANDS if kind != ENDED else ENDED * BANDS
            segment = Segment(self, row, departure.time, hits, order.stamp, arrival, blocks)
            for block in blocks:
                segment_of[block] = segment
            pieces.append(segment)
        self._length += stop - start
        line = self._line
        for segment in reversed(pieces):  # the deepest dies first under LRU
            order.enter(segment)
            line.append(segment)
            self.enlist(segment)
        while not line[0].live:
            line.popleft()
        if len(line) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Drop what is out of date behind the fronts, too: where nothing is evicted, nobody looks at fronts.

        Its cost is paid for by the pushes since the last one.
        """
        self._line = deque(segment for segment in self._line if segment.live)
        for row, ring in self._rings.items():
            self._rings[row] = deque(
                segment
                for segment in ring
                if segment.live and segment.row + segment.band == row and not segment.parked
            )
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._line))

    def _runs(self, departure: Departure, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Neighbours of one kind: (start, stop, kind), the kind -1 where past hits decide it.

        Per block this does nothing but C-level scans: a long prompt is a handful of runs.
        """
        hits = self._order.adopt(departure, start, stop)
        ended_from = stop
        if departure.ended and departure.owner:
            owner_of, owner = self._order.owner_of, departure.owner
            private = bytes(owner_of[block] == owner for block in departure.blocks[start:stop])
            ended_from = start + private.rfind(0) + 1  # its own blocks are the tail behind what it shared
        prompt_end = min(ended_from, departure.num_prompt)
        last = prompt_end - 1 if prompt_end == len(departure.blocks) else prompt_end
        runs = []
        place = start
        while place < last:
            rest = hits[place - start : last - start]
            end = last - len(rest.lstrip(rest[:1]))
            runs.append((place, end, -1))
            place = end
        if start <= last < prompt_end:
            runs.append((last, prompt_end, LAST))
        if max(start, departure.num_prompt) < ended_from:
            runs.append((max(start, departure.num_prompt), ended_from, DECODED))
        if ended_from < stop:
            runs.append((ended_from, stop, ENDED))
        return runs

    def push_front(self, blocks: Sequence[int]) -> None:
        self._empty.extendleft(reversed(blocks))
        self._length += len(blocks)

    def remove(self, block: int) -> None:
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[int]) -> None:
        order = self._order
        segment_of, hits_of = order.segment_of, order.hits_of
        segment: Segment | None = None
        run = 0  # neighbours mostly share a segment: its counts are settled once
        for block in blocks:
            home = segment_of[block]
            if home is not segment:
                if segment is not None:
                    order.hit(segment, run)
                if home is None or home.queue is not self:
                    self._length -= blocks.index(block)
                    raise KeyError(f"block {block} is not in this queue")
                segment, run = home, 0
            elif home is None:
                raise KeyError(f"block {block} is not in this queue")
            segment_of[block] = None
            hits_of[block] = _HIT_ONCE_MORE[hits_of[block]]
            run += 1
        if segment is not None:
            order.hit(segment, run)
        self._length -= len(blocks)

    def withdraw(self, block: int) -> None:
        order = self._order
        segment = order.segment_of[block]
        if segment is None or segment.queue is not self:
            raise KeyError(f"block {block} is not in this queue")
        order.withdraw(block, segment)
        self._length -= 1

    def void(self) -> None:
        """The cache was reset: all blocks here hold nothing now; they keep their order."""
        blocks = list(self)
        self._order.forget(blocks)
        for waiting in (self._rings, self._heap, self._queued, self._line, self._empty):
            waiting.clear()
        self._empty.extend(blocks)

    # -- victims -------------------------------------------------------------------------------------------

    def peek(self) -> Score | None:
        if self._empty:
            return _EMPTY_SCORE
        if not self._length:
            return None
        segment = self._victim()[0]
        worth = self._order.worth
        return (0.0 if worth is None else worth[segment.row + segment.band], segment.stamp)

    def pop_n(self, count: int) -> list[int]:
        order = self._order
        count = min(count, self._length)
        victims: list[int] = []
        while self._empty and len(victims) < count:
            victims.append(self._empty.popleft())
        order.evictions["empty"] += len(victims)
        segment_of, children, parent_of = order.segment_of, order.children, order.parent_of
        while len(victims) < count:
            segment, cause = self._victim()
            blocks = segment.blocks
            taken: list[int] = []
            wanted = min(count - len(victims), segment.live)
            above = -1  # what the last one hung on: with that gone it may be a leaf
            while len(taken) < wanted:
                block = blocks[-1]
                if segment_of[block] is segment:
                    if children[block] > (block == above):
                        if taken or cause != "orphaned":
                            break
                        order.orphan(block)
                    segment_of[block] = None
                    taken.append(block)
                    above = parent_of[block]
                blocks.pop()
            order.evict(taken, segment)
            order.evictions[cause] += len(taken)
            victims += taken
        self._length -= len(victims)
        order.trim_ghosts()
        return victims

    def pop_before(self, count: int, rival: Score) -> list[int]:
        victims = self.pop_n(1)
        while len(victims) < count and (score := self.peek()) is not None and score < rival:
            victims += self.pop_n(1)
        return victims

    def _victim(self) -> tuple[Segment, str]:
        """The segment whose deepest block is the next victim, and what chose it. The queue is not empty."""
        oldest, cause = self._oldest()
        worth = self._order.worth
        if worth is None:
            return oldest, cause
        if self._estimate != self._order.estimates:
            self._rebuild(worth)
        heap = self._heap
        while heap:
            least, row = heap[0]
            if least >= self._order.duel.margin * worth[oldest.row + oldest.band]:
                break
            segment = self._front(row)
            if segment is not None:
                return segment, "estimate" if least >= 0.0 else "ended"
            heappop(heap)
            self._queued.discard(row)
        return oldest, cause

    def _oldest(self) -> tuple[Segment, str]:
        """LRU's choice. Its deepest block is a leaf unless children of it wait in other queues; then the
        oldest that has a leaf, and if there is none, the oldest all the same: whoever needs a block gets one.
        """
        line = self._line
        while not line[0].live:
            line.popleft()
        if self._has_leaf(line[0]):
            return line[0], "lru"
        for segment in line:
            if segment.live and self._has_leaf(segment):
                return segment, "lru"
        return line[0], "orphaned"

    def _has_leaf(self, segment: Segment) -> bool:
        blocks, segment_of = segment.blocks, self._order.segment_of
        while segment_of[blocks[-1]] is not segment:
            blocks.pop()
        return not self._order.children[blocks[-1]]

    def _front(self, row: int) -> Segment | None:
        """The oldest segment of a ring whose deepest block is a leaf; those that are not are parked."""
        ring = self._rings[row]
        while ring:
            segment = ring[0]
            if segment.live and segment.row + segment.band == row and not segment.parked:
                if self._has_leaf(segment):
                    return segment
                segment.parked = True
            ring.popleft()
        return None

    # -- rings ---------------------------------------------------------------------------------------------

    def enlist(self, segment: Segment) -> None:
        """Into the ring of its class and band, at the young end."""
        if not segment.parked:
            self._ring(segment.row + segment.band).append(segment)

    def unpark(self, segment: Segment) -> None:
        """Its deepest block has become a leaf: it is older than what came into its ring meanwhile."""
        segment.parked = False
        self._ring(segment.row + segment.band).appendleft(segment)

    def _ring(self, row: int) -> deque[Segment]:
        ring = self._rings.get(row)
        if ring is None:
            ring = self._rings[row] = deque()
        while ring and not ring[0].live:
            ring.popleft()
        worth = self._order.worth
        if worth is not None and row not in self._queued:
            heappush(self._heap, (worth[row], row))
            self._queued.add(row)
        return ring

    def _rebuild(self, worth: list[float]) -> None:
        self._estimate = self._order.estimates
        self._queued = {row for row, ring in self._rings.items() if ring}
        self._heap = [(worth[row], row) for row in self._queued]
        heapify(self._heap)
