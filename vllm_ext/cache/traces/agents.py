"""Traces of coding agents: one JSON file a session, block ids local to the file.

Format of github.com/callanjfox/kv-cache-tester. Times are relative to the session's start, so the reader
places the sessions at random (uniform over two hours by default; one seed, one placement). Block ids of
different sessions are different blocks, but for a common head: sessions with the same number of tool tokens
are taken to send the same tool definitions, which come first in the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_ext.cache.order import Stop
from vllm_ext.cache.traces.reading import as_object, items, json_file, number, word
from vllm_ext.cache.traces.trace import Request, Trace, TraceError, make_trace

_STOPS = {"tool_use": Stop.TOOL_CALL, "end_turn": Stop.END_TURN, "max_tokens": Stop.LENGTH}


def read_agents(path: Path, seed: int = 7, window: float = 7200.0, sessions: slice | None = None) -> Trace:
    """All sessions of a folder (or the one in a file).

    Args:
        path: folder with ``*.json``, or one such file.
        seed: of the sessions' start times.
        window: seconds over which they start.
        sessions: which of the files, in order of their names; by default all.

    Raises:
        TraceError: with the file and the request at fault.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no *.json in this folder: one file a session is expected")
    start_of = random.Random(seed)
    starts = [start_of.uniform(0, window) for _ in files]  # drawn for all: a subset keeps its places
    chosen = list(zip(files, starts, strict=True))[sessions or slice(None)]
    requests: list[Request] = []
    for file, start in chosen:
        requests.extend(_mark_ends(list(_session(file, start))))
    return make_trace(path.name, requests)


def _session(file: Path, start: float) -> Iterator[Request]:
    session = json_file(file)
    block_size = int(number(session, "block_size", str(file)))
    if block_size <= 0:
        raise TraceError(f"{file}: block_size: must be above 0")
    yield from _walk(
        session, str(file), file.name, start, block_size, number(session, "tool_tokens", str(file))
    )


def _walk(
    agent: dict[str, Any], place: str, name: str, start: float, block_size: int, tool_tokens: float
) -> Iterator[Request]:
    """Requests of one agent and, in their places, of the agents that it called."""
    head = int(tool_tokens) // block_size
    for index, record in enumerate(items(agent, "requests", place, dict)):
        here = f"{place}: requests[{index}]"
        offset = number(record, "t", here)
        if record.get("requests"):
            # Times inside a sub-agent count from its call in some files and from the session in others.
            first = number(as_object(record["requests"][0], here), "t", f"{here}: requests[0]")
            inner = start + offset if first < offset - 1 else start
            own_tools = number(record, "tool_tokens", here, default=tool_tokens)
            yield from _walk(record, here, f"{name}/{index}", inner, block_size, own_tools)
            continue
        blocks = items(record, "hash_ids", here, int)
        if blocks:
            root = place.partition(": requests")[0]
            yield Request(
                time=start + offset,
                prompt=[
                    ("tools", int(tool_tokens), depth) if depth < head else (root, block)
                    for depth, block in enumerate(blocks)
                ],
                output_tokens=int(number(record, "out", here, default=0)),
                session=name,
                stop=_STOPS.get(word(record, "stop", here) or "", Stop.UNKNOWN),
            )


def _mark_ends(requests: list[Request]) -> list[Request]:
    """The last request of an agent ends its session (a client that knows would say so)."""
    last = {request.session: index for index, request in enumerate(requests)}
    ends = set(last.values())
    return [replace(request, ended=index in ends) for index, request in enumerate(requests)]
