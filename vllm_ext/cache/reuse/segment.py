"""A segment: blocks that one request gave back with one class. They share age and fate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ext.cache.order import Arrival
    from vllm_ext.cache.reuse.queue import ReuseQueue


class Segment:
    """One object per request and class (a handful a request), none per block.

    Attributes:
        queue: where its unused blocks wait.
        row: class * BANDS, the class's first row in the hazard table.
        band: age band, raised by `ReuseOrder.tick`.
        time: when the blocks were given back, seconds.
        pace, turns: of the conversation, see `Arrival`.
        hits: past hits of its blocks, at most 2.
        stamp: number of the push, for LRU among queues.
        blocks: root first. Blocks that have left stay in the list until they are met at its end: a block is
            here if `ReuseOrder.segment_of` says so.
        live: unused blocks.
        tracked: unused blocks and ghosts, whose next hit is still awaited.
        recent: LRU would still hold its blocks.
        parked: not in its ring, because its deepest block has cached children elsewhere.
    """

    __slots__ = (
        "band",
        "blocks",
        "hits",
        "live",
        "pace",
        "parked",
        "queue",
        "recent",
        "row",
        "stamp",
        "time",
        "tracked",
        "turns",
    )

    def __init__(
        self,
        queue: ReuseQueue,
        row: int,
        time: float,
        hits: int,
        stamp: float,
        arrival: Arrival,
        blocks: list[int],
    ) -> None:
        self.queue = queue
        self.row = row
        self.band = 0
        self.time = time
        self.pace = arrival.pace
        self.turns = arrival.turns
        self.hits = hits
        self.stamp = stamp
        self.blocks = blocks
        self.live = self.tracked = len(blocks)
        self.parked = False
        self.recent = True
