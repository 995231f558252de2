"""Mooncake's open traces: one JSON object a line, block hashes global to the file.

Format of github.com/kvcache-ai/Mooncake (FAST '25): ``timestamp`` in milliseconds, ``hash_ids`` of 512-token
blocks, chained. They name no sessions, tenants or output blocks.
"""

from __future__ import annotations

from pathlib import Path

from vllm_ext.cache.traces.reading import items, json_lines, number
from vllm_ext.cache.traces.trace import Request, Trace, make_trace


def read_mooncake(path: Path) -> Trace:
    """Raises TraceError with file and line."""
    return make_trace(
        path.stem,
        (
            Request(
                time=number(record, "timestamp", place) / 1e3,
                prompt=items(record, "hash_ids", place, int),
                output_tokens=int(number(record, "output_length", place, default=0)),
            )
            for place, record in json_lines(path)
        ),
    )
