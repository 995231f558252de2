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

MARGIN = 0.8
"""The safety switch: a victim other than LRU's must be worth less than this share of what LRU's is worth."""


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

    # -- blocks come and go -------------------------------------------------------------------------------

    def push(self, departure: Departure, start: int = 0, stop: int | None = None) -> None:
        order = self._order
        order.tick(departure.time)
        blocks, keys, arrival = departure.blocks, departure.keys, departure.arrival
        segment_of, key_of, hits_of = order.segment_of, order.key_of, order.hits_of
        stop = len(blocks) if stop is None else stop
        num_prompt = departure.num_prompt
        last = num_prompt - 1 if len(blocks) == num_prompt else -1
        request = request_kind(arrival, num_prompt, order.typical)
        feeling = mood(arrival, departure.stop, departure.output_tokens)
        pieces: list[Segment] = []
        segment = None
        current = -1
        order.stamp += 1
        for index in range(start, stop):
            block = blocks[index]
            if key_of[block] is None:
                key_of[block] = keys[index]
                order.owner_of[block] = departure.owner
                if index in arrival.past_hits:
                    hits_of[block] = arrival.past_hits[index]
                if index:
                    parent = order.parent_of[block] = blocks[index - 1]
                    order.children[parent] += 1
            elif order.owner_of[block] != departure.owner:
                order.owner_of[block] = -1
            if index >= num_prompt:
                kind = DECODED
            elif index == last:
                kind = LAST
            else:
                kind = hits_of[block] * REQUESTS + request
            label = kind * MOODS + feeling
            if departure.ended and order.owner_of[block] == departure.owner:
                label = ENDED
            if label != current:
                current = label
                segment = Segment(
                    self, label * BANDS, departure.time, arrival.pace, arrival.turns, hits_of[block], order.stamp
                )
                pieces.append(segment)
            segment.blocks.append(block)
            segment_of[block] = segment
        self._length += stop - start
        for segment in reversed(pieces):
            segment.live = segment.tracked = len(segment.blocks)
            order.enter(segment)
            self._line.append(segment)
            self.enlist(segment)
        self._sweep()

    def push_front(self, blocks: Sequence[int]) -> None:
        self._empty.extendleft(reversed(blocks))
        self._length += len(blocks)

    def remove(self, block: int) -> None:
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[int]) -> None:
        order = self._order
        segment_of, hits_of, booked = order.segment_of, order.hits_of, order.table.hits
        for block in blocks:
            segment = segment_of[block]
            if segment is None:
                raise KeyError(f"block {block} is not in this queue")
            segment_of[block] = None
            segment.live -= 1
            segment.tracked -= 1
            booked[segment.row + segment.band] += 1.0
            if hits_of[block] < 2:
                hits_of[block] += 1
        self._length -= len(blocks)

    # -- victims --------------------------------------------------------------------------------------------

    def peek(self) -> Score | None:
        if self._empty:
            return (-2.0, 0.0)
        found = self._victim()
        if found is None:
            return None
        segment, _ = found
        worth = self._order.worth
        return (0.0 if worth is None else worth[segment.row + segment.band], segment.stamp)

    def pop_n(self, count: int) -> list[int]:
        order = self._order
        victims: list[int] = []
        while self._empty and len(victims) < count:
            victims.append(self._empty.popleft())
        order.evictions["empty"] += len(victims)
        segment_of, children = order.segment_of, order.children
        while len(victims) < count:
            found = self._victim()
            if found is None:
                break
            segment, cause = found
            blocks = segment.blocks
            before = len(victims)
            while segment.live and len(victims) < count:
                block = blocks[-1]
                if segment_of[block] is segment:
                    if children[block]:
                        break
                    order.evict(block, segment)
                    victims.append(block)
                blocks.pop()
            order.evictions[cause] += len(victims) - before
        self._length -= len(victims)
        order.trim_ghosts()
        return victims

    def _victim(self) -> tuple[Segment, str] | None:
        """The segment whose deepest block is the next victim, and what chose it."""
        line = self._line
        while line and not line[0].live:
            line.popleft()
        if not line:
            return None
        oldest = line[0]
        worth = self._order.worth
        if worth is None:
            return oldest, "lru"
        if self._estimate != self._order.estimates:
            self._rebuild(worth)
        heap = self._heap
        while heap:
            least, row = heap[0]
            segment = self._front(row)
            if segment is None:
                heappop(heap)
                self._queued.discard(row)
            elif least < 0.0:
                return segment, "ended"
            elif least < MARGIN * worth[oldest.row + oldest.band]:
                return segment, "estimate"
            else:
                break
        return oldest, "lru"

    def _front(self, row: int) -> Segment | None:
        """The oldest segment of a ring whose deepest block is a leaf; those that are not are parked."""
        ring = self._rings[row]
        segment_of = self._order.segment_of
        while ring:
            segment = ring[0]
            if segment.live and segment.row + segment.band == row and not segment.parked:
                blocks = segment.blocks
                while segment_of[blocks[-1]] is not segment:
                    blocks.pop()
                if not self._order.children[blocks[-1]]:
                    return segment
                segment.parked = True
            ring.popleft()
        return None

    # -- rings ----------------------------------------------------------------------------------------------

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
        if row not in self._queued:
            worth = self._order.worth
            if worth is not None:
                heappush(self._heap, (worth[row], row))
                self._queued.add(row)
        return ring

    def _rebuild(self, worth: list[float]) -> None:
        self._estimate = self._order.estimates
        self._queued = {row for row, ring in self._rings.items() if ring}
        self._heap = [(worth[row], row) for row in self._queued]
        heapify(self._heap)

    def _sweep(self) -> None:
        line = self._line
        while line and not line[0].live:
            line.popleft()
