"""How soon blocks of a class are hit again, counted, and what that makes a cached block worth.

For every class and age band: how many blocks reached the band (`entered`) and how many were hit in it
(`hits`). Their ratio is a hazard, as in survival analysis; blocks that are evicted are followed on as ghosts,
so the count does not depend on what the cache happened to keep.

The worth of keeping a block is its best ratio of hits to residency over all times one might hold it: the
Gittins index of a job whose reward is a hit. Evicting what is worth least per unit of residency is the idea
of LHD (Beckmann, Chen and Cidon, NSDI '18), which takes the ratio over the whole life of a block instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cache.reuse.classes import AGES, BANDS, CLASSES, ENDED, KINDS, MOODS

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

SHRINK = 100.0
"""Requests' worth of evidence at which a class counts as much as the coarser estimate it is shrunk to."""
PRIOR = 1.0
"""Requests' worth of prior evidence when a group of classes is scaled against a coarser one."""
SHAPE = 3.0
"""PRIORs at which a kind's hits in one band count as much as its hits over all bands."""
COVERED = 0.98
"""Bands older than the age by which this share of all reuse happened are worth nothing: there LRU rules."""

CHUNK = 32  # classes per step

_WIDTH = np.diff(np.array([*AGES, 3.0 * AGES[-1]], dtype=np.float64))


class HazardTable:
    """Counts per class and band in flat arrays: row `class * BANDS + band`."""

    def __init__(self) -> None:
        # array: half the cost of a numpy scalar access, and numpy computes on it without a copy.
        self.hits = array("d", bytes(8 * CLASSES * BANDS))
        self.entered = array("d", bytes(8 * CLASSES * BANDS))

    def estimate(self, rows: list[float], blocks_per_request: float) -> Iterator[None]:
        """Writes the worth of every row into `rows`: hits per second of residency, negative for ENDED.

        In steps of some tenths of a millisecond, so that a request never waits for a whole estimate.

        Args:
            rows: of the last estimate, or `no_worth()`; classes that nobody was in keep theirs.
            blocks_per_request: mean. Blocks of one request share their fate, so evidence is weighed in
                requests.
        """
        hits, entered = self._tables()
        used = np.flatnonzero(entered[:ENDED, 0] > 0)
        covered = _covered(hits.sum(0))
        hazard = _hazards(hits[used], entered[used], used // MOODS, used % MOODS, blocks_per_request)
        for start in range(0, len(used), CHUNK):
            yield
            worth = _gittins(hazard[start : start + CHUNK])
            worth[:, covered:] = 0.0
            for label, row in zip(used[start : start + CHUNK].tolist(), worth.tolist(), strict=True):
                rows[label * BANDS : (label + 1) * BANDS] = row

    def fade(self, factor: float) -> None:
        """Forget: all counts times `factor`."""
        hits, entered = self._tables()
        hits *= factor
        entered *= factor

    def _tables(self) -> tuple[Floats, Floats]:
        shape = (CLASSES, BANDS)
        return np.frombuffer(self.hits).reshape(shape), np.frombuffer(self.entered).reshape(shape)


def no_worth() -> list[float]:
    """Rows before the first estimate: nothing is worth anything, an ended session less than that."""
    return [0.0] * (ENDED * BANDS) + [-1.0] * BANDS


def _hazards(
    hits: Floats, entered: Floats, kinds: Indices, moods: Indices, blocks_per_request: float
) -> Floats:
    """P(hit in the band | reached it), (classes, BANDS): classes shrunk to moods, moods to the whole."""
    strength, prior = SHRINK * blocks_per_request, PRIOR * blocks_per_request
    hits, entered = np.maximum(hits, 0.0), np.maximum(entered, 0.0)
    all_hits, all_entered = hits.sum(0), entered.sum(0)
    whole = np.where(all_entered > 0, (all_hits + 0.5) / (all_entered + 1.0), 0.0)

    in_mood = (np.arange(MOODS)[:, None] == moods).astype(np.float64)
    mood_hits, mood_entered = in_mood @ hits, in_mood @ entered
    scale = (mood_hits.sum(1) + prior) / (mood_entered @ whole + prior)
    by_mood = _shrunk(mood_hits, mood_entered, scale[:, None] * whole, strength)[moods]

    of_kind = (np.arange(KINDS)[:, None] == kinds).astype(np.float64)
    kind_hits, expected = of_kind @ hits, of_kind @ (entered * by_mood)
    scale = (kind_hits.sum(1) + prior) / (expected.sum(1) + prior)
    shape = (kind_hits + SHAPE * prior * scale[:, None]) / (expected + SHAPE * prior)
    return _shrunk(hits, entered, shape[kinds] * by_mood, strength)


def _shrunk(hits: Floats, entered: Floats, guess: Floats, strength: float) -> Floats:
    result: Floats = np.minimum((hits + strength * np.minimum(guess, 0.95)) / (entered + strength), 1.0)
    return result


def _covered(hits_by_band: Floats) -> int:
    """The first band that begins after `COVERED` of all reuse."""
    before = np.cumsum(hits_by_band) - hits_by_band
    beyond = np.flatnonzero(before >= COVERED * hits_by_band.sum())
    return int(beyond[0]) if beyond.size else BANDS


def _gittins(hazard: Floats) -> Floats:
    """(classes, BANDS): steepest slope of hits over residency, from each band's start to any later one's."""
    alive = np.cumprod(1.0 - hazard, axis=1)
    reached = np.concatenate([np.ones((len(hazard), 1)), alive[:, :-1]], axis=1)
    # A hit within a band falls on its middle on average.
    residency = _padded(np.cumsum(reached * _WIDTH * (1.0 - hazard / 2.0), axis=1))
    gained = _padded(np.cumsum(reached * hazard, axis=1))
    run = residency[:, None, :] - residency[:, :-1, None]  # (classes, from, to): positive for later points
    rise = gained[:, None, :] - gained[:, :-1, None]
    slopes: Floats = np.divide(rise, run, out=np.zeros_like(run), where=run > 0).max(2)
    return slopes


def _padded(sums: Floats) -> Floats:
    return np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)
