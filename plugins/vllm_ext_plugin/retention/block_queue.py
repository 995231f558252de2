"""vLLM's `FreeKVCacheBlockQueue` interface over `FreeBlocks`: same objects in and out, our sequence.

If our code fails, the queue gives its place back to a stock one that holds the same blocks, and vLLM goes on
with LRU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext_plugin.retention.engine import RetentionEngine


class RetentionBlockQueue:
    """Takes the place of `BlockPool.free_block_queue`.

    Args:
        engine: the engine's retention state; `engine.free` is asked anew each time, since a reset replaces
            it. blocks: the pool's `KVCacheBlock`s by id.
    """

    def __init__(self, engine: RetentionEngine, blocks: list[Any]) -> None:
        self._engine = engine
        self._blocks = blocks
        self.num_free_blocks = len(engine.free)
        """A plain attribute, since vLLM reads it for every request of every step. Whoever changes the
        engine's free blocks otherwise than through this queue keeps it right.
        """

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        blocks = self._blocks
        try:
            victims = [blocks[block_id] for block_id in self._engine.take_victims(n)]
        except Exception:
            return self._engine.switch_off("retention_pop").popleft_n(n)
        self.num_free_blocks -= n
        return victims

    def remove(self, block: Any) -> None:
        try:
            self._engine.free.take(block.block_id)
            self.num_free_blocks -= 1
        except Exception:
            self._engine.switch_off("retention_remove").remove(block)

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: Iterable[Any]) -> None:
        """Blocks that are cached, the deepest first."""
        unused = list(blocks)
        if not unused:
            return
        try:
            self._engine.give_back(unused)
            self.num_free_blocks += len(unused)
        except Exception:
            self._engine.switch_off(
                "retention_append"
            )  # they are unused already, so the stock queue has them

    def prepend_n(self, blocks: Iterable[Any]) -> None:
        """Blocks that cache nothing."""
        unused = [block.block_id for block in blocks]
        if not unused:
            return
        try:
            self._engine.free.release_blank(unused)
            self.num_free_blocks += len(unused)
        except Exception:
            # `free_blocks` prepends first: it will append the cached ones of the same chain itself.
            chain = self._engine.chain
            self._engine.switch_off(
                "retention_prepend",
                frozenset(block.block_id for block in chain if block.block_hash is not None),
            )

    def get_all_free_blocks(self) -> list[Any]:
        return [self._blocks[block_id] for block_id in self._engine.free]

    def iter_blocks_after(self, cursor: Any = None) -> Iterator[Any]:
        """Free blocks in eviction order, those behind `cursor` where it is given."""
        ids = iter(self._engine.free)
        if cursor is not None:
            for block_id in ids:
                if block_id == cursor.block_id:
                    break
        return (self._blocks[block_id] for block_id in ids)
