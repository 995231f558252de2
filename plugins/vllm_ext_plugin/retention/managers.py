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
    from vllm_ext_plugin.retention.engine import RetentionEngine

ENGINE = "_vllm_ext_retention"


@cache
def pool_class(base: type) -> type:
    return type(f"Retention{base.__name__}", (RetentionPool, base), {"__module__": __name__})


@cache
def manager_class(base: type) -> type:
    return type(f"Retention{base.__name__}", (RetentionManager, base), {"__module__": __name__})


class RetentionPool:
    """Mixin over `BlockPool`."""

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
        **kwargs: Any,
    ) -> None:
        super().cache_full_blocks(  # type: ignore[misc]
            request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs
        )
        if num_cached_blocks < num_full_blocks:
            self._engine.guarded(
                "retention_cache", self._engine.cached, request, blocks, num_cached_blocks, num_full_blocks
            )

    def cache_partial_block(self, request: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().cache_partial_block(request, block, *args, **kwargs)  # type: ignore[misc]
        if result is not None:
            self._engine.guarded("retention_cache", self._engine.cached, request, [block], 0, 1)
        return result

    def move_block_hashes(self, src_block: Any, dst_block: Any, *args: Any, **kwargs: Any) -> None:
        super().move_block_hashes(src_block, dst_block, *args, **kwargs)  # type: ignore[misc]
        self._engine.guarded("retention_move", self._engine.moved, src_block.block_id, dst_block.block_id)

    def touch(self, blocks: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        super().touch(blocks, *args, **kwargs)  # type: ignore[misc]
        self._engine.guarded("retention_touch", self._engine.touched, blocks)

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

    def _maybe_evict_cached_block(self, block: Any, *args: Any, **kwargs: Any) -> bool:
        evicted: bool = super()._maybe_evict_cached_block(block, *args, **kwargs)  # type: ignore[misc]
        if evicted:
            self._engine.guarded("retention_evict", self._engine.dropped, block.block_id)
        return evicted

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self._engine.guarded("retention_reset", self._engine.reset)
        return done


class RetentionManager:
    """Mixin over `KVCacheManager`: says for whom the pool works."""

    @property
    def _engine(self) -> RetentionEngine:
        engine: RetentionEngine = self.__dict__[ENGINE]
        return engine

    def allocate_slots(
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
        engine.guarded("retention_arrive", engine.arrive, request, new_computed_blocks)
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
            if slots is not None and engine.asking is not None and not engine.asking.admitted:
                engine.guarded(
                    "retention_admit",
                    engine.admitted,
                    request,
                    num_new_computed_tokens,
                    num_external_computed_tokens,
                )
            return slots
        finally:
            engine.asking = None

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
