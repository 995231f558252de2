"""Durations, sizes, shares and spans of tokens as people write them."""

from __future__ import annotations

import re
from typing import NamedTuple

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB)")
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}

_SHARE = re.compile(r"(100(?:\.0+)?|[0-9]{1,2}(?:\.[0-9]+)?) ?%")
_BOUND = r"(-?[1-9][0-9]{0,8}|0)"
_SPAN = re.compile(rf"{_BOUND}\.\.{_BOUND}?|\.\.{_BOUND}")

DURATION_PATTERN = rf"^{_DURATION.pattern}$"
SIZE_PATTERN = rf"^{_SIZE.pattern}$"
SHARE_PATTERN = rf"^{_SHARE.pattern}$"
SPAN_PATTERN = rf"^({_SPAN.pattern})$"


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


def parse_share(value: object) -> float:
    """0..1 from ``"20%"``, ``"12.5%"`` or a fraction below 1. Raises ValueError.

    A bare 1 is refused: it could be meant as 1 %.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value < 1:
            return float(value)
        raise ValueError("not a share; write 20%, or a fraction from 0 to below 1, as in 0.2")
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a share; write 20%, or a fraction from 0 to below 1, as in 0.2")
    return float(match[1]) / 100


class TokenSpan(NamedTuple):
    """Tokens of a prompt, half-open. Negative bounds count from its end; ``stop`` None is the end."""

    start: int
    stop: int | None

    def within(self, num_tokens: int) -> tuple[int, int]:
        """The span in a prompt of that many tokens, cut to it; empty when the second is not larger."""
        start = self.start if self.start >= 0 else max(0, num_tokens + self.start)
        if self.stop is None:
            return start, num_tokens
        return start, min(num_tokens, self.stop if self.stop >= 0 else num_tokens + self.stop)

    def __str__(self) -> str:
        return f"{self.start}..{'' if self.stop is None else self.stop}"


def parse_span(value: object) -> TokenSpan:
    """A span from ``"0..512"``, ``"512.."``, ``"..512"`` or ``"-256.."``. Raises ValueError."""
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a span of tokens; write 0..512, or -256.. for the last 256")
    start, stop, stop_alone = match[1], match[2], match[3]
    span = TokenSpan(int(start or 0), int(stop or stop_alone) if stop or stop_alone else None)
    same_end = span.stop is not None and (span.start < 0) == (span.stop < 0)
    if span.stop == 0 or (same_end and span.stop is not None and span.stop <= span.start):
        raise ValueError("no token is in this span; the second number is the first token that is left out")
    return span
