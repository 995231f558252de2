"""Belady's order (evict what is needed furthest in the future): how much any order could reach.

It sees the whole trace, so it exists for replay only. Where requests overlap in time it takes them one after
another, which no engine can better.

The kernel is plain Python over arrays; with numba installed it is compiled (some hundred times faster, after
a few seconds of compilation), without it the same code runs as it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cache.replay.outcome import Outcome
from vllm_ext.cache.traces.trace import Trace

Longs = NDArray[np.int64]

NEVER = 1 << 40
_DEPTHS = 1 << 20  # depth fits below the next use in one sortable number


def belady(
    trace: Trace, capacity: int, *, pin_running: bool = False, compiled: bool | None = None
) -> Outcome:
    """Replay with knowledge of the future; see `replay` for the two modes.

    Args:
        compiled: None uses numba if it is installed; False never does.

    Raises:
        ImportError: `compiled` is True and numba is not installed.
    """
    keys, ends, prompts = _flat(trace, with_output=pin_running)
    kernel = _kernel(compiled)
    hits, evicted = kernel(
        keys, ends, prompts, _next_uses(keys, ends, trace.num_keys), trace.num_keys, capacity, pin_running
    )
    outcome = Outcome("belady", capacity, evictions={"belady": int(evicted)})
    for request, found in zip(trace.requests, hits.tolist(), strict=True):
        outcome.count(request.tenant, found, len(request.prompt))
    return outcome


def _flat(trace: Trace, with_output: bool) -> tuple[Longs, Longs, Longs]:
    """Keys of all requests in one array, where each request ends in it, and the length of each prompt."""
    keys: list[Any] = []
    ends = []
    for request in trace.requests:
        keys.extend(request.prompt)
        if with_output:
            keys.extend(request.output)
        ends.append(len(keys))
    prompts = [len(request.prompt) for request in trace.requests]
    return np.array(keys, np.int64), np.array(ends, np.int64), np.array(prompts, np.int64)


def _next_uses(keys: Longs, ends: Longs, num_keys: int) -> Longs:
    """For each place in `keys`, the next request that has the same key; NEVER if there is none."""
    request_of = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    order = np.lexsort((request_of, keys))
    same = keys[order][1:] == keys[order][:-1]
    following = np.full(len(keys), NEVER, np.int64)
    following[order[:-1][same]] = request_of[order[1:][same]]
    return following


@cache
def _kernel(compiled: bool | None) -> Callable[..., tuple[Longs, int]]:
    if compiled is False:
        return _replay
    try:
        numba = import_module("numba")
    except ImportError:
        if compiled:
            raise
        return _replay
    kernel: Callable[..., tuple[Longs, int]] = numba.njit(_replay)
    return kernel


def _replay(
    keys: Longs,
    ends: Longs,
    prompts: Longs,
    next_uses: Longs,
    num_keys: int,
    capacity: int,
    pin_running: bool,
) -> tuple[Longs, int]:
    """Hits of each request, and evictions.

    The heap holds one entry for each time a key was used, the furthest next use first, of equals the deepest;
    entries that a later use has outdated are dropped when they come up.
    """
    hits = np.zeros(len(ends), np.int64)
    rank = np.zeros(num_keys, np.int64)  # of the key's valid entry
    cached = np.zeros(num_keys, np.bool_)
    user = np.full(num_keys, -1, np.int64)  # the last request that used the key
    heap = [(np.int64(0), np.int64(0))]
    heap.pop()  # numba takes the list's type from its first item
    used = 0
    evicted = 0
    start = 0
    for request in range(len(ends)):
        end = ends[request]
        depth = 0
        while depth < prompts[request] and cached[keys[start + depth]]:
            depth += 1
        hits[request] = depth
        stop = end
        if pin_running:
            # All blocks at once; what does not fit into the pool is not kept.
            stop = min(end, start + capacity)
            needed = 0
            for place in range(start, stop):
                user[keys[place]] = request
                if not cached[keys[place]]:
                    needed += 1
            for place in range(stop, end):
                if cached[keys[place]]:
                    cached[keys[place]] = False
                    used -= 1
            while used + needed > capacity:
                entry, key = heapq.heappop(heap)
                if cached[key] and rank[key] == entry and user[key] != request:
                    cached[key] = False
                    used -= 1
                    evicted += 1
        for place in range(start, stop):
            key = keys[place]
            if not cached[key]:
                cached[key] = True
                used += 1
            entry = -(next_uses[place] * _DEPTHS + (place - start))
            rank[key] = entry
            heapq.heappush(heap, (entry, key))
        while used > capacity:
            entry, key = heapq.heappop(heap)
            if cached[key] and rank[key] == entry:
                cached[key] = False
                used -= 1
                evicted += 1
        start = end
    return hits, evicted
