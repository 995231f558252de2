"""What plain LRU would have hit, and how far the order may therefore depart from it.

Segments are in the order of their last use, ghosts included, and each block is in one segment only. So the
youngest segments with `capacity` blocks together are what LRU would hold now, the one at the edge in part.
Every hit is thereby also a verdict on LRU, with no second cache and no sampling. (The question is that of set
dueling, Qureshi et al., ISCA '07.)
"""

from __future__ import annotations

from collections import deque

from vllm_ext.cache.reuse.segment import Segment

MARGIN = 0.8
"""A victim other than LRU's must be worth less than this share of what LRU's is worth."""
LEAST = 0.1
"""The margin never shrinks below this: an order that never departs from LRU cannot be judged again."""
LOSS = 0.002
"""Hit ratio below LRU's from which on the margin shrinks. Below half of it the margin grows again."""
SHRINK, GROW = 0.5, 1.25
"""Per verdict: quick to give up, slow to come back."""
MEMORY, MEMORY_REQUESTS = 10.0, 256.0
"""Half-life of the verdict, in capacities' worth of blocks requested, and in requests at least: what an order
keeps for later costs hits first, and a few long requests prove nothing."""


class Duel:
    """Counts hits of ours and LRU's; `margin` is the result.

    `hit` and `missed` come before the segment's own count goes down; whoever takes blocks out of a `recent`
    segment otherwise, takes them from `held`.
    """

    __slots__ = (
        "_capacity",
        "_edge",
        "_edge_share",
        "_gain",
        "_lru",
        "_ours",
        "_recent",
        "_volume",
        "held",
        "margin",
    )

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: deque[Segment] = deque()
        self._ours = 0
        self._lru = 0.0
        self._gain = self._volume = 0.0
        self._edge: Segment | None = None
        self._edge_share = 1.0  # of its blocks LRU would hold
        self.held = 0  # blocks in recent segments
        self.margin = MARGIN

    def push(self, segment: Segment) -> None:
        """A new segment: the youngest."""
        recent = self._recent
        recent.append(segment)
        self.held += segment.tracked
        while self.held - recent[0].tracked >= self._capacity:
            oldest = recent.popleft()
            oldest.recent = False
            self.held -= oldest.tracked
        # Now, not at the hit: what is hit meanwhile is used again and pushes nothing out.
        self._edge = edge = recent[0]
        self._edge_share = 1.0 - max(0, self.held - self._capacity) / max(1, edge.tracked)

    def hit(self, segment: Segment, count: int) -> None:
        """`count` blocks of `segment` were hit."""
        self._ours += count
        if segment.recent:
            self._lru += count * (self._edge_share if segment is self._edge else 1.0)
            self.held -= count

    def missed(self, segment: Segment) -> None:
        """A ghost of `segment` was asked for."""
        if segment.recent:
            self._lru += self._edge_share if segment is self._edge else 1.0
            self.held -= 1

    def judge(self, blocks: int, blocks_per_request: float) -> None:
        """`blocks` were requested since the last verdict."""
        fade = 0.5 ** (blocks / max(MEMORY * self._capacity, MEMORY_REQUESTS * blocks_per_request))
        self._gain = fade * self._gain + self._ours - self._lru
        self._volume = fade * self._volume + blocks
        self._ours, self._lru = 0, 0.0
        if self._gain < -LOSS * self._volume:
            self.margin = max(LEAST, self.margin * SHRINK)
        elif self._gain > -LOSS / 2 * self._volume:
            self.margin = min(MARGIN, self.margin * GROW)
