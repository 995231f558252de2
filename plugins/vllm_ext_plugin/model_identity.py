"""vLLM's configuration -> the plain `ModelIdentity` that enters every salt."""

from __future__ import annotations

from typing import Any

from vllm_ext.tenancy.salt import ModelIdentity


def model_identity(config: Any, model_id: str | None) -> ModelIdentity:
    """Args:
    config: a `VllmConfig`.
    model_id: the policy's `tenancy.model_id`, which stands for name, revision and tokenizer where replicas
        hold the same
        model under different paths.
    """
    import vllm

    model, lora = config.model_config, config.lora_config
    return ModelIdentity(
        model=model_id or str(model.model),
        revision="" if model_id else str(model.revision or ""),
        tokenizer="" if model_id else str(model.tokenizer or ""),
        tokenizer_revision="" if model_id else str(model.tokenizer_revision or ""),
        dtype=str(model.dtype),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        quantization=str(model.quantization or ""),
        adapters="" if lora is None else f"lora:{lora.max_lora_rank}:{lora.lora_dtype}",
        # The layout of KV blocks is no promise between versions; a build's local part (`+cpu`) says nothing
        # about it.
        engine_version=str(vllm.__version__).partition("+")[0],
    )
