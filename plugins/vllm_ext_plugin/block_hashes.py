"""Block hashes whose salt changes along the prompt: the shared head under one salt, everything after under
another.

vLLM puts `cache_salt` into block 0 alone. A request with a shared head carries a *split*: from the block that
holds token `split.start` on, `split.salt` enters the hash too (once; later blocks inherit it through their
parent's hash).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from vllm_ext_plugin.patching import patch

SPLIT = "_vllm_ext_split"
SHARED_NAME = "_vllm_ext_shared_name"
"""On a request with a split: the registered prefix that its head is."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the private part of a request begins, in tokens (a multiple of the hash block size), and its
    salt.
    """

    start: int
    salt: str


def install() -> None:
    """Wrap vLLM's extra keys, also where loaded modules (KV events) have imported them by name.
    Idempotent.
    """
    from vllm.v1.core import kv_cache_utils

    name = "generate_block_hash_extra_keys"
    original = getattr(kv_cache_utils, name)
    importers = [
        module_name
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("vllm.")
        and module is not kv_cache_utils
        and vars(module).get(name) is original
    ]
    patch(kv_cache_utils, name, _with_split, imported_by=importers)


def _with_split(original: Any) -> Any:
    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx, *args, **kwargs)
        split = request.__dict__.get(SPLIT)
        if split is not None and start_token_idx <= split.start < end_token_idx:
            keys = (*(keys or ()), ("cache_salt", split.salt))
        return keys, next_mm_idx

    return generate_block_hash_extra_keys
