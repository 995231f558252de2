"""What one token, or one block, is granted: a priority, for how long, and what comes after."""

from __future__ import annotations

import math
from typing import NamedTuple


class Grant(NamedTuple):
    """How well something is kept.

    Attributes:
        priority: 0 (goes first) to 100.
        ttl: seconds that `priority` holds; None: for good.
        base: priority afterwards; `priority` itself where `ttl` is None, and always at most that.
    """

    priority: int
    ttl: float | None
    base: int

    @staticmethod
    def for_good(priority: int) -> Grant:
        return Grant(priority, None, priority)

    def stronger(self, other: Grant) -> Grant:
        """What a block gets that both touch: the higher priority (of equals the longer ttl) and the higher
        base."""
        winner = max(self, other, key=_strength)
        base = max(self.base, other.base)
        return winner if winner.base == base else winner._replace(base=base)


def _strength(grant: Grant) -> tuple[int, float]:
    return grant.priority, math.inf if grant.ttl is None else grant.ttl
