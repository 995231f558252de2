"""vLLM's block pool and KV cache manager, told apart by request: who asks, who departs, whose blocks are
whose.

The instances that the scheduler made keep their identity (connectors hold references to them); only their
class is replaced by a subclass of what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext_plugin.retention.block_queue import RetentionBlockQueue
    from vllm_ext_plugin.retention.engine import RetentionEngine

ENGINE = "_vllm_ext_retention"


@cache
def pool_class(base: type) -> type:
    return type(f"Retention{base.__name__}", (RetentionPool, base), {"__module__": __name__})


@cache
def manager_class(base: type) -> type:
    return type(f"Retention{base.__name__}", (RetentionManager, base), {"__module__": __name__})


class RetentionPool:
    """Mixin over `BlockPool`. `_maybe_evict_cached_block` is left alone: it is called for every victim, and
    for a single block elsewhere only to fill it anew.
    """

    free_block_queue: Any

    @property
    def _engine(self) -> RetentionEngine:
        engine: RetentionEngine = self.__dict__[ENGINE]
        return engine

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        block_mask: Any = None,
        **kwargs: Any,
    ) -> None:
        super().cache_full_blocks(  # type: ignore[misc]
            request, blocks, num_cached_blocks, num_full_blocks, *args, block_mask=block_mask, **kwargs
        )
        engine = self._engine
        if num_cached_blocks < num_full_blocks and engine.on:
            masked = block_mask is not None or len(args) > 2
            try:
                engine.cached(request, blocks, num_cached_blocks, num_full_blocks, masked)
            except Exception:
                engine.switch_off("retention_cache")

    def cache_partial_block(self, request: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().cache_partial_block(request, block, *args, **kwargs)  # type: ignore[misc]
        if result is not None:
            self._engine.guarded("retention_cache", self._engine.cached, request, [block], 0, 1)
        return result

    def move_block_hashes(self, src_block: Any, dst_block: Any, *args: Any, **kwargs: Any) -> None:
        super().move_block_hashes(src_block, dst_block, *args, **kwargs)  # type: ignore[misc]
        self._engine.guarded("retention_move", self._engine.moved, src_block.block_id, dst_block.block_id)

    def touch(self, blocks: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        engine = self._engine
        if not engine.on:
            super().touch(blocks, *args, **kwargs)  # type: ignore[misc]
            return
        queue: RetentionBlockQueue = self.free_block_queue
        unused: list[Any] = []
        queue.__dict__["remove"] = unused.append  # taken out together, below
        try:
            super().touch(blocks, *args, **kwargs)  # type: ignore[misc]
        finally:
            del queue.__dict__["remove"]
            # They are in use now: if this fails, the stock queue is built without them.
            engine.guarded("retention_touch", engine.touched, blocks, unused)
            queue.num_free_blocks -= len(unused)

    def free_blocks(self, ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        engine = self._engine
        engine.chain = chain = list(ordered_blocks)
        deferred = engine.deferred.pop(chain[0].block_id, None) if chain and engine.deferred else None
        if deferred is not None and engine.departing is None:
            engine.departing = deferred
        try:
            super().free_blocks(chain, *args, **kwargs)  # type: ignore[misc]
        finally:
            engine.chain = []
            if deferred is not None and engine.departing is deferred:
                engine.departing = None

    def evict_blocks(self, block_ids: set[int], *args: Any, **kwargs: Any) -> None:
        super().evict_blocks(block_ids, *args, **kwargs)  # type: ignore[misc]
        for block_id in block_ids:
            self._engine.guarded("retention_evict", self._engine.dropped, block_id)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self._engine.guarded("retention_reset", self._engine.reset)
        return done


class RetentionManager:
    """Mixin over `KVCacheManager`: says for whom the pool works.

    Nearly every call of `allocate_slots` is for a request that runs already, which matters only where tenants
    have shares. So it is not overridden in the class: `_slots` takes its place in the instance from the
    moment that a request's cached blocks are looked up until it gets its slots, or for good where there are
    shares.
    """

    @property
    def _engine(self) -> RetentionEngine:
        engine: RetentionEngine = self.__dict__[ENGINE]
        return engine

    def get_computed_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["allocate_slots"] = self._slots
        return super().get_computed_blocks(*args, **kwargs)  # type: ignore[misc]

    def get_computed_blocks_for_connector(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["allocate_slots"] = self._slots
        return super().get_computed_blocks_for_connector(*args, **kwargs)  # type: ignore[misc]

    def _slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        engine = self._engine
        if new_computed_blocks is not None:
            engine.guarded("retention_arrive", engine.arrive, request, new_computed_blocks)
        engine.asking = request
        try:
            slots = super().allocate_slots(  # type: ignore[misc]
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
                num_external_computed_tokens,
                *args,
                **kwargs,
            )
        finally:
            engine.asking = None
            if not engine.free.shares:
                self.__dict__.pop("allocate_slots", None)
        if slots is not None and new_computed_blocks is not None:
            engine.guarded(
                "retention_admit",
                engine.admitted,
                request,
                num_new_computed_tokens,
                num_external_computed_tokens,
            )
        return slots

    def free(self, request: Any, *args: Any, **kwargs: Any) -> None:
        engine = self._engine
        engine.departing = request
        try:
            super().free(request, *args, **kwargs)  # type: ignore[misc]
        finally:
            engine.departing = None

    def pop_blocks_for_free(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = super().pop_blocks_for_free(request, *args, **kwargs)  # type: ignore[misc]
        if blocks:
            self._engine.deferred[blocks[-1].block_id] = request
        return blocks
