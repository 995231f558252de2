"""The `reuse` order: evict the block that is expected to bring the fewest hits for its residency.

Reading order: ``classes`` (what is known of a block), ``hazard`` (how reuse is counted and what it makes a
block worth), ``segment``, ``duel`` (is LRU ahead?), ``order`` (ages, ghosts, estimates), ``queue`` (who dies
next).

What keeps it safe: until the first estimate it is LRU; a block is taken before LRU's victim only if it is
worth clearly less, much less where LRU proved ahead; ages beyond nearly all reuse are worth nothing, so a
cache that is large enough *is* LRU; and the deepest block of a chain always dies first.
"""

from __future__ import annotations

from vllm_ext.cache.reuse.order import ReuseOrder

__all__ = ["ReuseOrder"]
