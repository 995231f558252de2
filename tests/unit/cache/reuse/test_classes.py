"""What goes into a class, at its edges."""

from __future__ import annotations

import pytest

from vllm_ext.cache import Arrival, Stop
from vllm_ext.cache.reuse.classes import (
    KINDS,
    LONG,
    MOODS,
    REQUESTS,
    SHORT,
    SIGNALS,
    mood,
    request_kind,
    signal,
    smoothed_pace,
)

pytestmark = pytest.mark.unit


def arrival(known: int, turns: int = 0, pace: float = -1.0) -> Arrival:
    return Arrival(0.0, known=known, pace=pace, turns=turns)


def test_request_kinds() -> None:
    assert request_kind(arrival(0), 10, 10.0) == 0
    assert request_kind(arrival(1), 11, 10.0) == 1  # one block in common is a system prompt, not a past
    assert request_kind(arrival(75, turns=2), 100, 10.0) == 2
    assert request_kind(arrival(75, turns=3), 100, 10.0) == 3
    assert request_kind(arrival(50), 100, 10.0) == 4
    assert request_kind(arrival(49), 100, 10.0) == REQUESTS - 1


def test_signals_are_distinct() -> None:
    seen = {signal(Stop.UNKNOWN, tokens) for tokens in (0, SHORT, LONG)}
    seen |= {signal(Stop.TOOL_CALL, tokens) for tokens in (0, LONG)}
    seen |= {signal(stop, tokens) for stop in (Stop.END_TURN, Stop.LENGTH) for tokens in (0, LONG)}
    assert seen == set(range(SIGNALS))


def test_moods_are_distinct() -> None:
    paces = (-1.0, 1.0, 8.0, 32.0, 128.0)
    seen = {mood(arrival(5, pace=pace), stop, 0) for pace in paces for stop in Stop}
    assert len(seen) == len(paces) * len(Stop)
    assert max(seen) < MOODS
    assert KINDS > REQUESTS


def test_pace_follows_the_gaps_and_forgets() -> None:
    pace = smoothed_pace(-1.0, 40.0)
    assert pace == 40.0
    for _ in range(20):
        pace = smoothed_pace(pace, 5.0)
    assert pace == pytest.approx(5.0, rel=0.01)
    assert smoothed_pace(-1.0, 0.0) > 0.0
