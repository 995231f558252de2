"""Counts in, worth out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.reuse.classes import AGES, BANDS, CLASSES, ENDED, MOODS
from vllm_ext.cache.reuse.hazard import CHUNK, HazardTable, _covered, _gittins, no_worth

pytestmark = pytest.mark.unit

WIDTHS = [b - a for a, b in zip(AGES, [*AGES[1:], 3 * AGES[-1]], strict=True)]


def estimate(table: HazardTable, blocks_per_request: float = 1.0) -> list[float]:
    rows = no_worth()
    for _ in table.estimate(rows, blocks_per_request):
        pass
    return rows


def fill(table: HazardTable, label: int, entered: float, hazard: list[float]) -> None:
    for band in range(BANDS):
        table.entered[label * BANDS + band] = entered
        table.hits[label * BANDS + band] = entered * hazard[band]
        entered *= 1 - hazard[band]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 0.9), min_size=BANDS, max_size=BANDS))
def test_worth_is_the_best_ratio_over_all_holding_times(hazard: list[float]) -> None:
    found = _gittins(np.array([hazard]))[0]
    for band in range(BANDS):
        alive, hits, residency, best = 1.0, 0.0, 0.0, 0.0
        for later in range(band, BANDS):
            residency += alive * WIDTHS[later] * (1 - hazard[later] / 2)
            hits += alive * hazard[later]
            alive *= 1 - hazard[later]
            best = max(best, hits / residency)
            if alive < 1e-9:  # what the vectorised form no longer resolves
                break
        assert found[band] == pytest.approx(best, rel=1e-4, abs=1e-9)


def test_what_is_hit_sooner_is_worth_more() -> None:
    table = HazardTable()
    fill(table, 0, 1e5, [0.5] + [0.0] * (BANDS - 1))
    fill(table, MOODS, 1e5, [0.0] * 6 + [0.5] + [0.0] * (BANDS - 7))
    fill(table, 2 * MOODS, 1e5, [0.001] * BANDS)
    rows = estimate(table)
    assert rows[0] > rows[MOODS * BANDS] > rows[2 * MOODS * BANDS] >= 0.0
    # The promised hit comes nearer with age, and is gone afterwards.
    late = rows[MOODS * BANDS : MOODS * BANDS + BANDS]
    assert late[:6] == sorted(late[:6])
    assert late[7] < late[6]


def test_a_class_without_evidence_follows_its_mood_and_kind() -> None:
    table = HazardTable()
    fill(table, 0, 1e5, [0.2] * BANDS)  # kind 0, mood 0
    fill(table, MOODS, 1e5, [0.02] * BANDS)  # kind 1, mood 0
    fill(table, 1, 1e5, [0.1] * BANDS)  # kind 0, mood 1: half as good as mood 0
    fill(table, MOODS + 1, 1.0, [0.0] * BANDS)  # kind 1, mood 1: seen once
    rows = estimate(table)
    assert 0.0 < rows[(MOODS + 1) * BANDS] < rows[MOODS * BANDS]


def test_old_age_and_ended_sessions() -> None:
    table = HazardTable()
    fill(table, 0, 1e6, [0.5, 0.9, 0.9] + [0.001] * (BANDS - 3))
    rows = estimate(table)
    assert rows[0] > 0.0
    assert rows[BANDS - 1] == 0.0  # reuse beyond 98 % of all
    assert rows[ENDED * BANDS : (ENDED + 1) * BANDS] == [-1.0] * BANDS
    assert _covered(np.zeros(BANDS)) == 0


def test_estimates_come_in_bounded_steps() -> None:
    table = HazardTable()
    used = 3 * CHUNK
    for label in range(used):
        fill(table, label, 100.0, [0.1] * BANDS)
    rows = no_worth()
    steps = table.estimate(rows, 1.0)
    changed = [0]
    for _ in steps:
        changed.append(sum(1 for value in rows if value > 0) // BANDS)
    changed.append(sum(1 for value in rows if value > 0) // BANDS)
    assert max(b - a for a, b in pairwise(changed)) <= CHUNK


def test_fade() -> None:
    table = HazardTable()
    fill(table, 5, 64.0, [0.5] * BANDS)
    table.fade(0.25)
    assert table.entered[5 * BANDS] == 16.0
    assert table.hits[5 * BANDS] == 8.0
    assert len(table.hits) == CLASSES * BANDS
