"""Bounded label values: whoever can invent names must not be able to grow a server's metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterable

OTHER = "other"


class LabelCap:
    """Bounds the number of distinct label values: at most `limit`, later names become `other`.

    Names that the policy lists come first, whenever they ask, so a flood of unlisted names cannot hide a
    listed tenant. Values in parentheses are ours, few, and always kept.
    """

    def __init__(self, limit: int, listed: Iterable[str] = ()) -> None:
        self._kept: set[str] = set()
        self._limit = 0
        self._lock = threading.Lock()
        self.keep(listed, limit)

    def __call__(self, value: str) -> str:
        if value in self._kept or (value.startswith("(") and value.endswith(")")):
            return value
        with self._lock:
            if len(self._kept) < self._limit:
                self._kept.add(value)
                return value
        return OTHER

    def keep(self, listed: Iterable[str], limit: int) -> None:
        """Take over a reloaded policy's names and limit; label values that already exist stay."""
        with self._lock:
            self._limit = limit
            for name in listed:
                if len(self._kept) >= limit:
                    break
                self._kept.add(name)
