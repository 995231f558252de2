"""Exceptions in our own code: counted always, told once, never passed on to vLLM."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger("vllm_ext")


class Faults:
    """One process' count of caught exceptions, by the part of this plugin that they came from."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def caught(self, part: str) -> None:
        """Call inside `except`: a part's first fault is logged with its traceback, later ones are counted."""
        self.counts[part] += 1
        if self.counts[part] == 1:
            logger.exception(
                "vllm_ext: internal error in %s (later ones there are only counted)",
                part,
            )
