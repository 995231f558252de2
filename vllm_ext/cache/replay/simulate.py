"""Replays a trace through an eviction order: a block pool without an engine around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from vllm_ext.cache.order import Arrival, Departure, EvictionOrder, make_order
from vllm_ext.cache.replay.outcome import Outcome
from vllm_ext.cache.traces.trace import Request, Trace


class Pool:
    """Block ids, who uses them, and which key each caches; `order` decides what dies.

    Args:
        capacity: blocks that may be cached.
        num_keys: keys are numbers below this.
        order_name: see `make_order`.
        slack: blocks beyond `capacity` that one request may need for a moment (eager replay only).
    """

    def __init__(self, capacity: int, num_keys: int, order_name: str, slack: int = 0) -> None:
        self.capacity = capacity
        self.order: EvictionOrder = make_order(order_name, capacity + slack, capacity)
        self.queue = self.order.queue()
        self.block_of = [-1] * num_keys
        self.key_of = [-1] * (capacity + slack)
        self.users = [0] * (capacity + slack)
        self.free = list(range(capacity + slack - 1, -1, -1))

    @property
    def used(self) -> int:
        return len(self.key_of) - len(self.free)

    def cached_prefix(self, keys: list[int]) -> list[int]:
        block_of = self.block_of
        blocks = []
        for key in keys:
            block = block_of[key]
            if block < 0:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        users = self.users
        self.queue.remove_n([block for block in blocks if not users[block]])
        for block in blocks:
            users[block] += 1

    def make_room(self, count: int) -> int:
        """Evict until `count` blocks fit into the capacity; how many do."""
        excess = self.used + count - self.capacity
        if excess > 0:
            victims = self.queue.pop_n(excess)
            for block in victims:
                key = self.key_of[block]
                if self.block_of[key] == block:  # else another block has it by now
                    self.block_of[key] = -1
                self.key_of[block] = -1
            self.free.extend(victims)
            count -= excess - len(victims)
        return count

    def allocate(self, keys: list[int]) -> list[int]:
        free, block_of, key_of, users = self.free, self.block_of, self.key_of, self.users
        blocks = []
        for key in keys:
            block = free.pop()
            blocks.append(block)
            key_of[block] = key
            users[block] = 1
            block_of[key] = block
        return blocks

    def release(self, departure: Departure) -> None:
        """Blocks in use by nobody else go to the order; running requests share a head, so they are a tail."""
        users, blocks = self.users, departure.blocks
        for block in blocks:
            users[block] -= 1
        start = 0
        while start < len(blocks) and users[blocks[start]]:
            start += 1
        self.queue.push(departure, start)


@dataclass(slots=True)
class _Running:
    request: Request
    blocks: list[int]
    arrival: Arrival


def replay(
    trace: Trace,
    order: str,
    capacity: int,
    *,
    pin_running: bool = False,
    hints: bool = True,
    timed: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay `trace` through the order called `order` with room for `capacity` blocks.

    Args:
        pin_running: as in vLLM, victims come only from blocks that no running request uses; requests hold
            theirs until they finish, and output blocks take room. Otherwise block-level: a request is
            admitted whole, gone at once, and then the cache is cut back to its capacity.
        hints: let the order see why requests stopped and which sessions ended.
        timed: fill `Outcome.latency`.
        progress: called with the number of requests done since the last call.
    """
    slack = 0 if pin_running else max(len(request.prompt) for request in trace.requests)
    pool = Pool(capacity, trace.num_keys, order, slack)
    outcome = Outcome(order, capacity)
    running: list[tuple[float, int, _Running]] = []
    clock = time.thread_time  # the order's own work, whatever else the machine does
    reported = 0
    for number, request in enumerate(trace.requests):
        while running and running[0][0] <= request.time:
            _finish(pool, heappop(running)[2], hints)
        prompt: list[int] = request.prompt  # type: ignore[assignment]  # make_trace numbered them
        cached = pool.cached_prefix(prompt)
        outcome.count(request.tenant, len(cached), len(prompt))
        missed = prompt[len(cached) :]
        started = clock()
        arrival = pool.order.arrive(request.time, cached, missed)
        pool.hold(cached)
        if pin_running:
            room = pool.make_room(len(missed))
            outcome.refused += len(missed) - room
            missed = missed[:room]
        blocks = cached + pool.allocate(missed)
        item = _Running(request, blocks, arrival)
        if pin_running and (request.finish > request.time or request.output):
            heappush(running, (request.finish, number, item))
        else:
            pool.release(_departure(item, request.time, blocks, prompt[: len(blocks)], hints))
            if not pin_running:
                pool.make_room(0)
        if timed:
            outcome.latency.append(clock() - started)
        if progress is not None and number - reported >= 256:
            progress(number - reported)
            reported = number
    if progress is not None:
        progress(len(trace.requests) - reported)
    outcome.evictions = dict(pool.order.evictions)
    return outcome


def _finish(pool: Pool, item: _Running, hints: bool) -> None:
    """The output's blocks are cached, all blocks are given back."""
    request = item.request
    keys: list[int] = request.prompt[: len(item.blocks)]  # type: ignore[assignment]
    output: list[int] = []
    if len(keys) == len(request.prompt):
        for key in request.output:
            if pool.block_of[key] >= 0:  # type: ignore[call-overload]
                break
            output.append(key)  # type: ignore[arg-type]
    output = output[: pool.make_room(len(output))]
    blocks = item.blocks + pool.allocate(output)
    pool.release(_departure(item, request.finish, blocks, keys + output, hints))


def _departure(item: _Running, now: float, blocks: list[int], keys: list[int], hints: bool) -> Departure:
    request = item.request
    departure = Departure(now, blocks, keys, min(len(request.prompt), len(blocks)), item.arrival)
    departure.output_tokens = request.output_tokens
    if hints:
        departure.stop = request.stop
        departure.owner = request.session or 0  # type: ignore[assignment]
        departure.ended = request.ended
    return departure
