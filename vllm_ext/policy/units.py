"""Durations and sizes as people write them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB)")
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}

DURATION_PATTERN = rf"^{_DURATION.pattern}$"
SIZE_PATTERN = rf"^{_SIZE.pattern}$"


def parse_duration(value: object) -> float:
    """Seconds from ``"500ms"``, ``"30s"``, ``"5m"``, ``"1h"`` or a number of seconds. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration; write 500ms, 30s, 5m, 1h or a number of seconds")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(value: object) -> int:
    """Bytes from a whole number, or from ``"512KiB"``, ``"64MiB"``, ``"1GiB"``. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size; write a number of bytes, or 512KiB, 64MiB, 1GiB")
    return int(float(match[1]) * _BYTES[match[2]])
