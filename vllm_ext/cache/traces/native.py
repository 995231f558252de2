"""The project's own trace format, one JSON object a line; ``docs/replay.md`` defines it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_ext.cache.order import Stop
from vllm_ext.cache.traces.reading import items, json_lines, number, word
from vllm_ext.cache.traces.trace import Request, Trace, TraceError, make_trace

HEADER = "vllm_ext_trace"
VERSION = 1

STOPS = {
    "tool_call": Stop.TOOL_CALL,
    "end_turn": Stop.END_TURN,
    "length": Stop.LENGTH,
    "unknown": Stop.UNKNOWN,
}
_FIELDS = frozenset(
    ("arrival", "finish", "prompt", "output", "output_tokens", "tenant", "session", "stop", "session_end")
)


def read_native(path: Path) -> Trace:
    """Raises TraceError with file and line."""
    return make_trace(path.stem, _requests(path))


def _requests(path: Path) -> Iterator[Request]:
    lines = json_lines(path)
    place, header = next(lines, (f"{path}:1", {}))
    if header.get(HEADER) != VERSION:
        raise TraceError(
            f'{place}: expected the header {{"{HEADER}": {VERSION}, ...}} of a trace in this format'
            " (other formats: --format mooncake, --format agents)"
        )
    for place, record in lines:
        unknown = sorted(record.keys() - _FIELDS)
        if unknown:
            raise TraceError(f"{place}: unknown field {unknown[0]!r}; known are {', '.join(sorted(_FIELDS))}")
        arrival = number(record, "arrival", place)
        finish = number(record, "finish", place, default=arrival)
        if finish < arrival:
            raise TraceError(f"{place}: finish: {finish} is before arrival {arrival}")
        stop = word(record, "stop", place) or "unknown"
        if stop not in STOPS:
            raise TraceError(f"{place}: stop: {stop!r} is none of {', '.join(STOPS)}")
        ended = record.get("session_end", False)
        if not isinstance(ended, bool):
            raise TraceError(f"{place}: session_end: expected true or false")
        session = word(record, "session", place)
        if ended and session is None:
            raise TraceError(f"{place}: session_end: which session? give it in `session`")
        output = items(record, "output", place, (str, int))
        yield Request(
            time=arrival,
            prompt=items(record, "prompt", place, (str, int)),
            output=output,
            finish=finish,
            output_tokens=int(number(record, "output_tokens", place, default=0)),
            tenant=word(record, "tenant", place),
            session=session,
            stop=STOPS[stop],
            ended=ended,
        )
