"""One engine's retention state: vLLM's events of the block pool, told to `FreeBlocks` in plain values."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm_ext.cache.free_blocks import EVERYBODY_ELSE, FreeBlocks, Protection
from vllm_ext.cache.order import Arrival, Departure, make_order
from vllm_ext.cache.telemetry import CacheTelemetry
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.retention.requests import Requests, RequestView

logger = logging.getLogger("vllm_ext")

_NO_PAST = Arrival(0.0)


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
        self.asking: Any = None
        """The vLLM request that asks for slots right now, where it matters: see `RetentionManager`."""
        self.departing: Any = None
        """The vLLM request whose blocks `chain` holds, if it is known."""
        self.deferred: dict[int, Any] = {}
        """Last block of a request whose blocks vLLM gives back later -> the request."""
        self.pending: Callable[[], None] | None = None
        """What a reloaded policy changes: left here by the thread that reloads, done by the scheduler's."""
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
        free, group = self.free, EVERYBODY_ELSE
        if free.shares and self.asking is not None:
            group = self.requests.view(self.asking).group
        self.telemetry.now = now = self.clock()
        return free.pop(count, now, group)

    def give_back(self, unused: list[Any]) -> None:
        """`unused` blocks, the deepest first: those of `chain` that nobody uses any more."""
        free, chain, now = self.free, self.chain, self.clock()
        gone = [block.block_id for block in unused]
        gone.reverse()
        if len(chain) > len(unused):
            is_cached = free.is_cached
            blocks = [block_id for block in reversed(chain) if is_cached[block_id := block.block_id]]
        else:
            blocks = gone
        if 0 in map(free.is_cached.__getitem__, gone):  # nobody told us that it was cached
            free.release_blank([block_id for block_id in gone if not free.is_cached[block_id]])
            gone = [block_id for block_id in gone if free.is_cached[block_id]]
            blocks = [block_id for block_id in blocks if free.is_cached[block_id]]
        if not gone:
            return
        if free.order.uses_keys:
            known = self.pool.blocks
            keys = [known[block_id].block_hash for block_id in blocks]
            departure = Departure(now, blocks, keys, **self.requests.departure(self.departing, now))
            departure.num_prompt = min(departure.num_prompt, len(blocks))
        else:
            departure = Departure(now, blocks, (), len(blocks), _NO_PAST)
        view = self.requests.view(self.departing) if self.departing is not None else None
        if view is not None and view.boosted:  # a time to live counts from the last use
            for start, stop, protection in view.protections(0, len(blocks), now):
                free.protect_n(blocks[start:stop], protection, now)
        if len(gone) == len(blocks):
            indices: Sequence[int] = range(len(blocks))
        else:
            place = {block_id: index for index, block_id in enumerate(blocks)}
            indices = [place[block_id] for block_id in gone]
        free.release(departure, indices)
        self.telemetry.departed(gone, now)

    # What the pool tells

    def arrive(self, request: Any, hits: Any) -> None:
        """A request asks for slots; its first time, the order learns of it."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending()
        view = self.requests.view(request)
        if view.group and view.group not in self.free.shares:
            self.free.set_shares(self.requests.shares(len(self.pool.blocks)))
        if view.arrival is None:
            cached = [block.block_id for block in hits.blocks[0] if not block.is_null] if hits else []
            order = self.free.order
            missed = self.requests.missed(request, len(cached)) if order.uses_keys else ()
            view.arrival = order.arrive(self.clock(), cached, missed)
            self.telemetry.returned += len(view.arrival.past_hits)

    def cached(
        self, request: Any, blocks: Sequence[Any], start: int, stop: int, masked: bool = False
    ) -> None:
        """`blocks[start:stop]` of the request's were put into the prefix cache, but for null blocks and, with
        `masked`, those that vLLM keeps out.
        """
        view = self.requests.view(request)
        free, now = self.free, self.clock()
        filled = [block.block_id for block in blocks[start:stop]]
        skipped: list[int] = []
        if masked or self.pool.null_block.block_id in filled:
            skipped = [block.block_id for block in blocks[start:stop] if block.block_hash is None]
        owner, tenant = self.telemetry.owner, self.tenant(view)
        shared = view.num_shared_blocks
        if view.plain and start >= shared and not skipped:
            free.cached_n(filled, view.group)
            for block_id in filled:
                owner[block_id] = tenant
            return
        for first, end, protection in view.protections(start, stop, now):
            for begin, until, group in (
                (first, min(end, shared), EVERYBODY_ELSE),
                (max(first, shared), end, view.group),
            ):
                if begin < until:
                    run = filled[begin - start : until - start]
                    if skipped:
                        run = [block_id for block_id in run if block_id not in skipped]
                    free.cached_n(run, group, protection)
        for block_id in filled:
            owner[block_id] = tenant

    def admitted(self, request: Any, device: int, restored: int) -> None:
        """The request got its first slots. Args: prompt tokens found in the cache, and by a KV connector."""
        view = self.requests.view(request)
        if view.admitted:
            return
        view.admitted = True
        computed = max(request.num_prompt_tokens - device - restored, 0)
        self.telemetry.prompt(self.tenant(view), device, restored, computed)

    def touched(self, blocks: Sequence[Any], unused: list[Any]) -> None:
        """A request found `blocks` in the cache; `unused`, a part of them, were used by nobody else."""
        free = self.free
        taken = [block.block_id for block in unused]
        if taken:
            free.take_n(taken)
        if self.asking is None:
            return
        view = self.requests.view(self.asking)
        now = self.clock()
        if taken:
            self.telemetry.hit(taken, self.tenant(view), now)
        if view.plain and free.uniform:
            return
        found = [block.block_id for block in blocks]
        for start, stop, protection in view.protections(0, len(found), now):
            free.protect_n(found[start:stop], protection, now)

    def moved(self, source: int, target: int) -> None:
        """The cache keeps the contents of `source` in `target` from now on."""
        free = self.free
        if free.is_cached[source]:
            holding = free.protection[source]
            free.dropped(source)
            free.cached(target, holding.group, Protection(holding.base, holding.boost, holding.expires))
            self.telemetry.moved(source, target)

    def dropped(self, block: int) -> None:
        """Contents that vLLM invalidated by itself (`take_victims` has said so of its victims already)."""
        if self.free.is_cached[block]:
            self.evictions["invalidated", self.free.group_of(block)] += 1
            self.telemetry.invalidated(block)
            self.free.forget(block)

    def reset(self) -> None:
        """Nothing is cached any more, and every block is unused."""
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
