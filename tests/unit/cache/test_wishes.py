"""What clients ask for: read whatever it is, cut to what they may have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.grant import Grant
from vllm_ext.cache.wishes import (
    MAX_BYTES,
    MAX_RANGES,
    Wish,
    WishRange,
    WishReason,
    follow,
    parse_wish,
    wish_from_hints,
)
from vllm_ext.policy import WishBounds

pytestmark = pytest.mark.unit

ASKED = {
    "ranges": [{"start": 0, "end": 512, "priority": 80, "duration_ms": 60000}, {"start": 600, "priority": 5}],
    "decode_priority": 50,
    "decode_duration_ms": 1000,
}
READ = Wish((WishRange(0, 512, 80, 60.0), WishRange(600, None, 5, None)), 50, 1.0)
REASONS = set(get_args(WishReason))


@pytest.mark.parametrize("value", [ASKED, json.dumps(ASKED), json.dumps(ASKED).encode()])
def test_an_object_or_its_json(value: object) -> None:
    assert parse_wish(value) == (READ, [])


def test_the_names_of_tensorrt_llm() -> None:
    value = {
        "token_range_retention_configs": [
            {"token_start": 600, "token_end": None, "priority": 5, "duration_ms": None},
            {"token_start": 0, "token_end": 512, "priority": 80.0, "duration_ms": 60000},
        ],
        "decode_retention_priority": 50,
        "decode_duration_ms": 1000,
    }
    assert parse_wish(value) == (READ, [])


def test_nothing_asked_is_no_wish() -> None:
    assert parse_wish(None) == (None, [])
    assert parse_wish({}) == (None, [])
    assert parse_wish({"ranges": []}) == (None, [])
    assert parse_wish({"ranges": [{"priority": 0}]}) == (Wish((WishRange(0, None, 0, None),)), [])


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        ("", ["unreadable"]),
        ("{", ["unreadable"]),
        ("[]", ["unreadable"]),
        ("[" * 10_000, ["unreadable"]),
        ("1" * 10_000, ["unreadable"]),
        (b"\xff\xfe", ["unreadable"]),
        (" " * MAX_BYTES + "{}", ["too_large"]),
        (5, ["unreadable"]),
        ([ASKED], ["unreadable"]),
        ({"pin": True}, ["unknown_key"]),
        ({"ranges": {}}, ["bad_range"]),
        ({"ranges": [3]}, ["bad_range"]),
        ({"ranges": [{"start": -1, "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": 5, "end": 5, "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": "0", "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": 0, "end": 0, "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": 0, "end": "9", "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": 0.5, "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": None, "priority": 1}]}, ["bad_range"]),
        ({"ranges": [{"start": 0}]}, ["bad_priority"]),
        ({"ranges": [{"start": 0, "priority": True}]}, ["bad_priority"]),
        ({"ranges": [{"start": 0, "priority": "80"}]}, ["bad_priority"]),
        ('{"ranges": [{"priority": NaN}]}', ["bad_priority"]),
        ('{"ranges": [{"priority": 1e999}]}', ["bad_priority"]),
        ({"ranges": [{"priority": 1, "duration_ms": 0}]}, ["bad_duration"]),
        ({"ranges": [{"priority": 1, "duration_ms": -5}]}, ["bad_duration"]),
        ({"ranges": [{"priority": 1, "duration_ms": math.inf}]}, ["bad_duration"]),
        ({"decode_priority": "x"}, ["bad_priority"]),
        ({"decode_priority": 5, "decode_duration_ms": "1s"}, ["bad_duration"]),
        ({"decode_duration_ms": 5}, ["bad_priority"]),
    ],
)
def test_what_cannot_be_followed_at_all(value: object, reasons: list[str]) -> None:
    assert parse_wish(value) == (None, reasons)


def test_the_rest_of_a_wish_counts() -> None:
    value = {
        "ranges": [
            {"start": 10, "end": 20, "priority": 200, "who": "me"},
            {"start": 15, "end": 30, "priority": 1},
            {"start": 20, "end": 30, "priority": -7},
            "nonsense",
        ],
        "decode_priority": 3,
        "other": [],
    }
    wish, reasons = parse_wish(value)
    assert wish == Wish((WishRange(10, 20, 100, None), WishRange(20, 30, 0, None)), 3)
    assert sorted(reasons) == ["bad_range", "overlap", "priority_clamped", "unknown_key"]


def test_no_more_than_so_many_ranges() -> None:
    ranges = [{"start": i, "end": i + 1, "priority": 1} for i in range(1000)]
    wish, reasons = parse_wish({"ranges": ranges})
    assert wish is not None
    assert (len(wish.ranges), reasons) == (MAX_RANGES, ["too_many_ranges"])


class Hostile(Mapping[str, object]):
    def __getitem__(self, key: str) -> object:
        raise RuntimeError

    def __iter__(self) -> Any:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


def test_an_object_that_fails_when_looked_at() -> None:
    assert parse_wish(Hostile()) == (None, ["unreadable"])
    assert parse_wish({"ranges": [Hostile()]}) == (None, ["unreadable"])


_KEYS = st.sampled_from(
    [
        "ranges", "start", "end", "priority", "duration_ms", "token_start", "token_end", "decode_priority",
        "decode_duration_ms", "decode_retention_priority", "token_range_retention_configs",
    ]
)  # fmt: skip
_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(_KEYS | st.text(max_size=4) | st.integers(), inner, max_size=6)
    ),
    max_leaves=25,
)
_RANGES = st.fixed_dictionaries(
    {"priority": st.integers(-5, 105)},
    optional={
        "start": st.integers(-2, 60),
        "end": st.none() | st.integers(-2, 60),
        "duration_ms": st.none() | st.integers(-1, 5000),
        "x": st.none(),
    },
)
_ALMOST = st.fixed_dictionaries(
    {"ranges": st.lists(_RANGES, max_size=8)},
    optional={"decode_priority": st.integers(-5, 105), "decode_duration_ms": st.integers(-1, 99)},
)


@settings(max_examples=500, deadline=None)
@given(_TREES | _ALMOST | st.text() | st.binary(), st.booleans())
def test_whatever_it_is_it_is_read_or_left(value: object, as_json: bool) -> None:
    if as_json:
        value = json.dumps(value, default=str, skipkeys=True)
    wish, reasons = parse_wish(value)
    assert set(reasons) <= REASONS
    assert len(reasons) == len(set(reasons))
    if wish is None:
        return
    assert wish.ranges or wish.decoded_priority is not None
    place = 0
    for one in wish.ranges:
        assert place <= one.start
        assert 0 <= one.priority <= 100
        assert one.ttl is None or 0 < one.ttl < math.inf
        place = math.inf if one.end is None else one.end
        assert one.start < place
    assert wish.decoded_priority is None or 0 <= wish.decoded_priority <= 100


# -- vLLM's hints envelope


def test_our_action_among_others() -> None:
    ours = ("vllm_ext.retention", "1", ASKED)
    assert wish_from_hints([ours]) == (READ, [])
    assert wish_from_hints([]) == (None, [])
    assert wish_from_hints([("prefetch", "1", {}), ours, ours]) == (READ, ["other_action"])
    assert wish_from_hints([("vllm_ext.retention", "2", ASKED)]) == (None, ["other_action"])
    broken = ("vllm_ext.retention", "1", {"ranges": 3})
    assert wish_from_hints([broken, ours]) == (READ, ["bad_range"])
    assert wish_from_hints([(1,)]) == (None, ["unreadable"])  # type: ignore[list-item]


# -- bounds

BOUNDS = WishBounds(True, 60, 600.0)
ORDINARY = Grant.for_good(35)


@pytest.mark.parametrize(
    ("priority", "ttl", "own", "given_", "reasons"),
    [
        (50, 30.0, ORDINARY, Grant(50, 30.0, 35), ()),
        (50, None, ORDINARY, Grant(50, 600.0, 35), ("ttl_clamped",)),
        (90, 30.0, ORDINARY, Grant(60, 30.0, 35), ("priority_clamped",)),
        (20, None, ORDINARY, Grant.for_good(20), ()),
        (20, 30.0, ORDINARY, Grant.for_good(20), ("ttl_dropped",)),
        (35, 30.0, ORDINARY, ORDINARY, ()),
        # Where the policy gives more than clients may have, asking for more changes nothing.
        (100, None, Grant(90, 60.0, 35), Grant(90, 60.0, 35), ("priority_clamped", "ttl_clamped")),
        (100, None, Grant.for_good(90), Grant.for_good(90), ("priority_clamped",)),
        (70, None, Grant(90, 60.0, 35), Grant(70, 60.0, 35), ("ttl_clamped",)),
        (50, None, Grant(90, 60.0, 35), Grant(50, 600.0, 35), ("ttl_clamped",)),
        (50, None, Grant(90, 3600.0, 35), Grant(50, 3600.0, 35), ("ttl_clamped",)),
        (50, None, Grant.for_good(90), Grant.for_good(50), ()),
        # A raise that ends, ends at what the policy gives for good.
        (60, 10.0, Grant.for_good(50), Grant(60, 10.0, 50), ()),
    ],
)
def test_follow(
    priority: int, ttl: float | None, own: Grant, given_: Grant, reasons: tuple[str, ...]
) -> None:
    assert follow(priority, ttl, own, BOUNDS) == (given_, reasons)


def at(grant: Grant, second: float) -> int:
    """The priority at a time after the block was freed."""
    return grant.priority if grant.ttl is None or second < grant.ttl else grant.base


@st.composite
def grants(draw: st.DrawFn) -> Grant:
    base = draw(st.integers(0, 100))
    if draw(st.booleans()) or base == 100:
        return Grant.for_good(base)
    return Grant(draw(st.integers(base + 1, 100)), draw(st.floats(0.1, 1000)), base)


@settings(max_examples=500)
@given(
    st.integers(0, 100),
    st.none() | st.floats(0.1, 2000),
    grants(),
    st.builds(WishBounds, st.just(True), st.integers(0, 100), st.floats(0.1, 1000)),
    st.lists(st.floats(0, 3000), min_size=1, max_size=20),
)
def test_at_no_time_more_than_policy_or_bounds_give(
    priority: int, ttl: float | None, own: Grant, bounds: WishBounds, seconds: list[float]
) -> None:
    given_, reasons = follow(priority, ttl, own, bounds)
    assert set(reasons) <= REASONS
    assert given_.priority >= given_.base
    assert (given_.ttl is None) == (given_.priority == given_.base)
    before = 101
    for second in sorted(seconds):
        now = at(given_, second)
        allowed = bounds.max_priority if second < bounds.max_ttl else 0
        assert now <= max(at(own, second), allowed)
        assert now <= max(priority, own.base)
        assert now <= before, "it never rises"
        before = now
