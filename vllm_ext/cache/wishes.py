"""What clients ask for: read without trust, cut to what the policy allows.

Over HTTP a wish comes in ``vllm_xargs`` under ``vllm_ext.retention``, as JSON in a string (vLLM's xargs hold
no objects); callers of the Python API may give the object itself, or a `KvHintsEnvelope` with an action of
that type:

    {"ranges": [{"start": 0, "end": 512, "priority": 80, "duration_ms": 60000}],
     "decode_priority": 50, "decode_duration_ms": 1000}

The names of TensorRT-LLM's `KvCacheRetentionConfig` are taken as well. What cannot be understood is left out
and named by a reason; nothing here is ever an error to the caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vllm_ext.cache.grant import Grant
from vllm_ext.policy import WishBounds

XARGS_KEY = "vllm_ext.retention"
"""Key in `vllm_xargs` / `SamplingParams.extra_args`, and type of the action in a hints envelope."""
HINT_VERSIONS = ("1", "1.0")
"""Versions of that action that are read here."""

MAX_RANGES = 64
MAX_BYTES = 16 * 1024

WishReason = Literal[
    "bad_duration",
    "bad_priority",
    "bad_range",
    "not_allowed",
    "other_action",
    "overlap",
    "priority_clamped",
    "shared_prefix",
    "too_large",
    "too_many_ranges",
    "ttl_clamped",
    "ttl_dropped",
    "unknown_key",
    "unreadable",
]
"""Why a wish, or a part of it, is not followed as asked: values of a metric's label."""

_SPELLINGS = {
    "ranges": ("ranges", "token_range_retention_configs"),
    "decode_priority": ("decode_priority", "decode_retention_priority"),
    "decode_duration_ms": ("decode_duration_ms",),
    "start": ("start", "token_start"),
    "end": ("end", "token_end"),
    "priority": ("priority",),
    "duration_ms": ("duration_ms",),
}
_TOP = ("ranges", "decode_priority", "decode_duration_ms")
_RANGE = ("start", "end", "priority", "duration_ms")


class WishRange(NamedTuple):
    """Tokens [start, end) of the prompt; `end` None is its end. `ttl` in seconds, None: for good."""

    start: int
    end: int | None
    priority: int
    ttl: float | None


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for. `ranges` are sorted and do not overlap."""

    ranges: tuple[WishRange, ...] = ()
    decoded_priority: int | None = None
    decoded_ttl: float | None = None


def parse_wish(value: object) -> tuple[Wish | None, list[WishReason]]:
    """A wish from JSON (str, bytes) or an object, and why parts of it were left out, each reason once.

    None when there is nothing to follow. Never raises.
    """
    reasons: dict[WishReason, None] = {}
    try:
        wish = _read(value, reasons)
    except Exception:  # whatever a caller's object does when it is looked at
        wish = None
        reasons["unreadable"] = None
    return wish, list(reasons)


def wish_from_hints(
    actions: Iterable[tuple[str, str, Mapping[str, Any]]],
) -> tuple[Wish | None, list[WishReason]]:
    """A wish from a hints envelope's actions, each (type, version, payload).

    vLLM defines the envelope but no actions. Ours is of type `vllm_ext.retention`, its payload as above.
    Others are other components' business and counted as `other_action`; of several of ours the first that
    can be read counts. Never raises.
    """
    found: Wish | None = None
    reasons: dict[WishReason, None] = {}
    try:
        for kind, version, payload in actions:
            if kind != XARGS_KEY or version not in HINT_VERSIONS or found is not None:
                reasons["other_action"] = None
                continue
            found, why = parse_wish(payload)
            reasons |= dict.fromkeys(why)
    except Exception:  # not the shape that an envelope has
        reasons["unreadable"] = None
    return found, list(reasons)


def follow(
    priority: int, ttl: float | None, own: Grant, bounds: WishBounds
) -> tuple[Grant, tuple[WishReason, ...]]:
    """What a client gets that asks for a priority (and a time) where the policy by itself grants `own`.

    It may lower at will. It may raise to `bounds.max_priority` for `bounds.max_ttl`; where `own` is more than
    that, asking for even more changes nothing. When the time is over, what `own` is for good holds again.
    Whether clients are heard at all (`bounds.allowed`) is the caller's to ask.
    """
    reasons: list[WishReason] = []
    given = min(priority, max(bounds.max_priority, own.priority))
    if given < priority:
        reasons.append("priority_clamped")
    if given <= own.base:
        if ttl is not None and given < own.base:
            reasons.append("ttl_dropped")  # after it, the blocks would rise
        return Grant.for_good(given), tuple(reasons)
    # Whoever permits this priority, permits it for so long.
    longest = bounds.max_ttl if given <= bounds.max_priority else 0.0
    if given <= own.priority:
        longest = max(longest, math.inf if own.ttl is None else own.ttl)
    asked = math.inf if ttl is None else ttl
    if asked > longest:
        reasons.append("ttl_clamped")
    return Grant(given, min(asked, longest), own.base), tuple(reasons)


def _read(value: object, reasons: dict[WishReason, None]) -> Wish | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        if len(value) > MAX_BYTES:
            reasons["too_large"] = None
            return None
        value = json.loads(value)
    if not isinstance(value, Mapping):
        reasons["unreadable"] = None
        return None
    fields = _fields(value, _TOP, reasons)
    ranges = _ranges(fields.get("ranges"), reasons)
    priority, ttl = None, None
    if fields.get("decode_priority") is not None:
        priority = _priority(fields["decode_priority"], reasons)
        ttl, sound = _seconds(fields.get("decode_duration_ms"), reasons)
        if priority is None or not sound:
            priority = ttl = None
    elif fields.get("decode_duration_ms") is not None:
        reasons["bad_priority"] = None  # a duration of what?
    return Wish(ranges, priority, ttl) if ranges or priority is not None else None


def _fields(
    value: Mapping[Any, Any], names: tuple[str, ...], reasons: dict[WishReason, None]
) -> dict[str, Any]:
    """The known fields under their first spelling; the rest is counted, not looked at."""
    found: dict[str, Any] = {}
    used = 0
    for name in names:
        for spelling in _SPELLINGS[name]:
            if spelling in value and name not in found:
                found[name] = value[spelling]
                used += 1
    if len(value) > used:
        reasons["unknown_key"] = None
    return found


def _ranges(value: object, reasons: dict[WishReason, None]) -> tuple[WishRange, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        reasons["bad_range"] = None
        return ()
    if len(value) > MAX_RANGES:
        reasons["too_many_ranges"] = None
    found: list[WishRange] = []
    for item in value[:MAX_RANGES]:
        one = _range(item, reasons)
        if one is None:
            continue
        if any(_overlap(one, other) for other in found):
            reasons["overlap"] = None  # the earlier one counts
            continue
        found.append(one)
    return tuple(sorted(found, key=lambda one: one.start))


def _range(value: object, reasons: dict[WishReason, None]) -> WishRange | None:
    if not isinstance(value, Mapping):
        reasons["bad_range"] = None
        return None
    fields = _fields(value, _RANGE, reasons)
    start, end = _whole(fields.get("start", 0)), fields.get("end")
    if end is not None:
        end = _whole(end)
        end = -1 if end is None else end  # not a number: no token is before it
    if start is None or start < 0 or (end is not None and end <= start):
        reasons["bad_range"] = None
        return None
    priority = _priority(fields.get("priority"), reasons)
    ttl, sound = _seconds(fields.get("duration_ms"), reasons)
    return None if priority is None or not sound else WishRange(start, end, priority, ttl)


def _overlap(one: WishRange, other: WishRange) -> bool:
    return (one.end is None or other.start < one.end) and (other.end is None or one.start < other.end)


def _whole(value: object) -> int | None:
    """A whole number; JSON writes some of them as 80.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    return int(value)


def _priority(value: object, reasons: dict[WishReason, None]) -> int | None:
    number = _whole(value)
    if number is None:
        reasons["bad_priority"] = None
        return None
    if not 0 <= number <= 100:
        reasons["priority_clamped"] = None
    return max(0, min(100, number))


def _seconds(value: object, reasons: dict[WishReason, None]) -> tuple[float | None, bool]:
    """Seconds from milliseconds, and whether that could be read. None: for good."""
    if value is None:
        return None, True
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        reasons["bad_duration"] = None
        return None, False
    return float(value) / 1000, True
