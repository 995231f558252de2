"""One engine's retention state: vLLM's events of the block pool, told to `FreeBlocks` in plain values."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ext.cache.free_blocks import EVERYBODY_ELSE, FreeBlocks
from vllm_ext.cache.order import Departure, make_order
from vllm_ext.cache.telemetry import CacheTelemetry
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.retention.requests import Requests, RequestView

logger = logging.getLogger("vllm_ext")


class RetentionEngine:
    """What the adapters of one scheduler share.

    Args:
        pool: vLLM's `BlockPool`, as its scheduler made it.
        order_name: `lru` or `reuse`.
        requests: turns vLLM's requests into plain values, by the policy in force.
        faults: counts our own exceptions.
        clock: seconds, never backwards; a test moves it.
        telemetry: counts what happens; by default one that keeps every tenant's name.
    """

    def __init__(
        self,
        pool: Any,
        order_name: str,
        requests: Requests,
        faults: Faults,
        clock: Callable[[], float] = time.monotonic,
        telemetry: CacheTelemetry | None = None,
    ) -> None:
        self.pool = pool
        self.requests = requests
        self.clock = clock
        self.telemetry = telemetry or CacheTelemetry(len(pool.blocks), str)
        self.on = True
        self.chain: list[Any] = []
        """The blocks that vLLM is giving back right now, the deepest first."""
        self.asking: RequestView | None = None
        self.departing: Any = None
        """The vLLM request whose blocks `chain` holds, if it is known."""
        self.deferred: dict[int, Any] = {}
        """Last block of a request whose blocks vLLM gives back later -> the request."""
        self.pending: Callable[[], None] | None = None
        """What a reloaded policy changes: left here by the thread that reloads, done by the scheduler's."""
        self.resets = 0
        self._order_name = order_name
        self._faults = faults
        self.evictions: Counter[tuple[str, int]] = Counter()
        self.victims: Counter[str] = Counter()
        """By what chose them, up to the last reset of the cache; later ones are in `free.order.evictions`."""
        self.estimates = 0
        """Of the `reuse` order, up to the last reset."""
        self.free = self._new_free_blocks()
        self.free.release_blank([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])

    # What the pool asks for

    def take_victims(self, count: int) -> list[int]:
        group = self.asking.group if self.asking else EVERYBODY_ELSE
        self.telemetry.now = now = self.clock()
        return self.free.pop(count, now, group)

    def give_back(self, unused: list[Any]) -> None:
        """`unused` cached blocks, the deepest first: those of `chain` that nobody uses any more."""
        if not unused:
            return
        now = self.clock()
        chain = [
            block
            for block in reversed(self.chain or unused)
            if block.block_hash is not None and not block.is_null
        ]
        blocks = [block.block_id for block in chain]
        departure = Departure(
            now,
            blocks,
            [block.block_hash for block in chain],
            **self.requests.departure(self.departing, now),
        )
        departure.num_prompt = min(departure.num_prompt, len(blocks))
        view = self.requests.view(self.departing) if self.departing is not None else None
        if view is not None and view.boosted:
            for index, block_id in enumerate(blocks):  # a time to live counts from the last use
                self.free.protect(block_id, view.protection(index, now), now)
        if len(unused) == len(blocks):
            indices: Sequence[int] = range(len(blocks))
        else:
            gone = {block.block_id for block in unused}
            indices = [index for index, block_id in enumerate(blocks) if block_id in gone]
        self.free.release(departure, indices)
        self.telemetry.departed([blocks[index] for index in indices], now)

    # What the pool tells

    def arrive(self, request: Any, hits: Any) -> None:
        """A request asks for slots; its first time, the order learns of it."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()
        self.asking = view = self.requests.view(request)
        if view.group and view.group not in self.free.shares:
            self.free.set_shares(self.requests.shares(len(self.pool.blocks)))
        if view.arrival is None:
            cached = [block.block_id for block in hits.blocks[0] if not block.is_null] if hits else []
            view.arrival = self.free.order.arrive(
                self.clock(), cached, self.requests.missed(request, len(cached))
            )
            self.telemetry.returned += len(view.arrival.past_hits)

    def cached(self, request: Any, blocks: list[Any], start: int, stop: int) -> None:
        view = self.requests.view(request)
        free, now = self.free, self.clock()
        owner, tenant = self.telemetry.owner, self.tenant(view)
        for index in range(start, stop):
            block = blocks[index]
            if block.is_null or block.block_hash is None:
                continue
            if not free.is_cached[block.block_id]:
                free.cached(block.block_id, view.group, view.protection(index, now))
                owner[block.block_id] = tenant

    def admitted(self, request: Any, device: int, restored: int) -> None:
        """The request got its first slots. Args: prompt tokens found in the cache, and by a KV connector."""
        view = self.requests.view(request)
        view.admitted = True
        computed = max(request.num_prompt_tokens - device - restored, 0)
        self.telemetry.prompt(self.tenant(view), device, restored, computed)

    def touched(self, blocks: Sequence[Any]) -> None:
        view = self.asking
        if view is None:
            return
        now = self.clock()
        unused = [block.block_id for block in blocks if block.ref_cnt == 1 and not block.is_null]
        self.telemetry.hit(unused, self.tenant(view), now)
        if view.plain:
            return
        for index, block in enumerate(blocks):
            if not block.is_null:
                self.free.protect(block.block_id, view.protection(index, now), now)

    def moved(self, source: int, target: int) -> None:
        free = self.free
        if free.is_cached[source]:
            group, protection = free.group[source], free.protection[source]
            free.dropped(source)
            free.cached(target, group, protection)
            self.telemetry.moved(source, target)

    def dropped(self, block: int) -> None:
        """Contents that vLLM invalidated by itself (`take_victims` has said so of its victims already)."""
        if self.free.is_cached[block]:
            self.evictions["invalidated", self.free.group[block]] += 1
            self.telemetry.invalidated(block)
            self.free.forget(block)

    def reset(self) -> None:
        """Nothing is cached any more, and every block is unused."""
        self.resets += 1
        self.telemetry.reset(self.free)
        self.victims.update(self.free.order.evictions)
        self.estimates += getattr(self.free.order, "estimates", 0)
        self.evictions.update(self.free.evictions)
        for group, resident in self.free.resident.items():
            self.evictions["reset", group] += resident
        unused = list(self.free)
        self.free = self._new_free_blocks()
        self.free.release_blank(unused)

    def tenant(self, view: RequestView) -> int:
        """The number of the request's tenant in the telemetry."""
        if view.tenant_number < 0:
            view.tenant_number = self.telemetry.tenant(view.tenant)
        return view.tenant_number

    # Health

    def guarded(self, part: str, call: Callable[..., None], *args: Any) -> None:
        """Run our code so that vLLM's goes on whatever happens; a fault ends retention, not the engine."""
        if not self.on:
            return
        try:
            call(*args)
        except Exception:
            self.switch_off(part)

    def switch_off(self, part: str, without: frozenset[int] = frozenset()) -> Any:
        """Back to stock LRU with every unused block in place. Call inside `except`. Returns the stock queue.

        Args:
            without: unused blocks that vLLM is about to append by itself.
        """
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        self._faults.caught(part)
        if self.on:
            logger.error(
                "vllm_ext: retention is switched off; evictions go by vLLM's own LRU until a restart"
            )
            self.on = False
            unused = [
                block
                for block in self.pool.blocks
                if block.ref_cnt == 0 and not block.is_null and block.block_id not in without
            ]
            stock = FreeKVCacheBlockQueue([])
            stock.prepend_n([block for block in unused if block.block_hash is None])
            stock.append_n([block for block in unused if block.block_hash is not None])
            self.pool.free_block_queue = stock
        return self.pool.free_block_queue

    def _new_free_blocks(self) -> FreeBlocks:
        count = len(self.pool.blocks)
        free = FreeBlocks(count, make_order(self._order_name, count), self.requests.shares(count))
        free.on_evict = self.telemetry.evicted
        return free
