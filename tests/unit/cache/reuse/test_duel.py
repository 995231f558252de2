"""What LRU would have hit is counted exactly, and the margin follows the verdict."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache import Arrival, Departure
from vllm_ext.cache.lru import LruOrder
from vllm_ext.cache.reuse import ReuseOrder
from vllm_ext.cache.reuse.duel import LEAST, MARGIN, Duel

pytestmark = pytest.mark.unit


class Counting(Duel):
    """Remembers what the verdicts cleared."""

    lru_in_all = 0.0

    def judge(self, blocks: int, blocks_per_request: float) -> None:
        self.lru_in_all += self._lru
        super().judge(blocks, blocks_per_request)


def segment(blocks: int) -> Any:
    return SimpleNamespace(tracked=blocks, recent=True)


def test_the_edge_counts_in_part() -> None:
    duel = Duel(10)
    old, edge, young = segment(5), segment(8), segment(6)
    for item in (old, edge, young):
        duel.push(item)
    assert [item.recent for item in (old, edge, young)] == [False, True, True]
    duel.hit(old, 5)
    assert (duel._ours, duel._lru) == (5, 0.0)
    duel.missed(edge)  # LRU would hold 4 of its 8 blocks
    assert duel._lru == pytest.approx(0.5)
    duel.hit(young, 6)
    assert duel._lru == pytest.approx(6.5)
    assert duel.held == 14 - 1 - 6


def test_losses_shrink_the_margin_and_time_restores_it() -> None:
    duel = Duel(100)
    for _ in range(20):
        duel._lru += 5
        duel.judge(100, 1.0)
    assert duel.margin == LEAST
    for _ in range(60):
        duel.judge(1000, 1.0)
    assert duel.margin == MARGIN
    duel._ours += 1000
    duel.judge(100, 1.0)
    assert duel.margin == MARGIN


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(4, 30))
def test_counts_what_lru_hits(seed: int, capacity: int) -> None:
    """One block a request, so that no segment is cut by the edge."""
    order, stock = ReuseOrder(capacity), LruOrder(capacity)
    order._due = 30
    counted: list[int] = []
    order.duel = duel = Counting(capacity)
    for cache in (order, stock):
        dice = random.Random(seed)
        queue, block_of, key_of = cache.queue(), {}, {}
        free, hits, now = list(range(capacity)), 0, 0.0
        for _ in range(400):
            now += dice.expovariate(1.0)
            key = min(int(dice.paretovariate(0.6)), 200)
            found = [block_of[key]] if key in block_of else []
            arrival: Arrival = cache.arrive(now, found, [] if found else [key])
            hits += len(found)
            queue.remove_n(found)
            if not found:
                if not free:
                    [victim] = queue.pop_n(1)
                    del block_of[key_of[victim]]
                    free.append(victim)
                found = [free.pop()]
                block_of[key], key_of[found[0]] = found[0], key
            queue.push(Departure(now, found, [key], 1, arrival))
        counted.append(hits)
    assert duel.lru_in_all + duel._lru == counted[1]
