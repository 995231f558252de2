"""What a vLLM `Request` says of itself: free-form parameters, why it stopped, whether its session ends."""

from __future__ import annotations

from typing import Any

from vllm_ext.cache.order import Stop

SESSION_END_KEY = "vllm_ext.session_end"
"""Key in `vllm_xargs` / `extra_args`: anything true says that the session ends with this request."""

TOOL_CALL_TOKENS = (
    "<tool_call>",
    "<|tool_call|>",
    "<|tool_call_begin|>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<function_calls>",
    "<|call|>",
)
"""Special tokens by which models begin a tool call: an answer that holds one is continued when the tool is
done.
"""


def extra_args(request: Any) -> dict[str, Any]:
    """The request's free-form parameters, as the client sent them."""
    params = request.sampling_params or request.pooling_params
    extra: dict[str, Any] | None = getattr(params, "extra_args", None) or getattr(
        params, "extra_kwargs", None
    )
    return extra or {}


def session_ends(extra: dict[str, Any]) -> bool:
    return bool(extra.get(SESSION_END_KEY))


def stop_of(request: Any, tool_tokens: frozenset[int]) -> Stop:
    """Why a finished request stopped. Args: tool_tokens: ids that only a tool call holds."""
    from vllm.v1.request import RequestStatus

    if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
        return Stop.LENGTH
    if request.status != RequestStatus.FINISHED_STOPPED:
        return Stop.UNKNOWN
    if tool_tokens and not tool_tokens.isdisjoint(request.output_token_ids):
        return Stop.TOOL_CALL
    return Stop.END_TURN


def tool_call_tokens(model_config: Any) -> frozenset[int]:
    """Ids of `TOOL_CALL_TOKENS` in the model's vocabulary; none where there is no tokenizer."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return frozenset()
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[token] for token in TOOL_CALL_TOKENS if token in vocabulary)
