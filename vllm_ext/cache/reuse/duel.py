"""What plain LRU would have hit, and how far the order may therefore depart from it.

Segments are in the order of their last use, ghosts included, and each block is in one segment only. So the
youngest segments with `capacity` blocks together are what LRU would hold now, exactly but for the segment at
the edge. Every hit is thereby also a verdict on LRU, with no second cache and no sampling (the question is that
of set dueling, Qureshi et al., ISCA '07).
"""

from __future__ import annotations

from collections import deque

from vllm_ext.cache.reuse.segment import Segment

MARGIN = 0.8
"""A victim other than LRU's must be worth less than this share of what LRU's is worth."""
LOSS = 0.001
"""Hit ratio below LRU's from which on the margin shrinks."""
SHRINK, GROW = 0.5, 1.25
"""Per verdict: quick to give up, slow to come back."""
MEMORY = 5.0
"""Half-life of the verdict, in capacities' worth of blocks requested."""


class Duel:
    """Counts hits of ours and LRU's; `margin` is the result.

    Callers count: `ours` and `lru` for hits, `held` down by one when a block leaves a segment that is `recent`.
    """

    __slots__ = ("_capacity", "_gain", "_recent", "_volume", "held", "lru", "margin", "ours")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: deque[Segment] = deque()
        self.held = 0  # blocks in recent segments
        self.ours = self.lru = 0
        self._gain = self._volume = 0.0
        self.margin = MARGIN

    def push(self, segment: Segment) -> None:
        """A new segment: the youngest."""
        self._recent.append(segment)
        self.held += segment.tracked
        while self.held > self._capacity:
            oldest = self._recent.popleft()
            oldest.recent = False
            self.held -= oldest.tracked

    def judge(self, blocks: int) -> None:
        """`blocks` were requested since the last verdict."""
        fade = 0.5 ** (blocks / (MEMORY * self._capacity))
        self._gain = fade * self._gain + self.ours - self.lru
        self._volume = fade * self._volume + blocks
        self.ours = self.lru = 0
        if self._gain < -LOSS * self._volume:
            self.margin *= SHRINK
        elif self._gain >= 0:
            self.margin = min(MARGIN, self.margin * GROW)
