"""Mends vLLM's CPU speculation above temperature 0.

vLLM's CPU stand-in for `expand_kernel` converts its output tensor to int64 and lets the C++ kernel write into
that temporary, so the caller's tensor stays uninitialised: the per-token temperature, top_p and top_k of a
step with draft tokens are whatever the memory held. Sampled text is wrong without any error, and a wild top_k
can end the engine. See vllm-project/vllm issue 55005 and pull request 55006.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from vllm_ext_plugin.patching import is_patched, patch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm_ext")

MODULE = "vllm.utils.cpu_triton_utils"
FUNCTION = "_expand_kernel_impl"
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"

Outcome = Literal["mended", "not needed", "not applicable"]


def mend() -> Outcome:
    """Replace vLLM's CPU `expand_kernel` where it does not write its result. Idempotent, in any process.

    "not applicable": the platform is not the CPU. "not needed": this vLLM's function writes through, or
    Triton runs the real kernel on the CPU. As a general plugin this comes before the worker registers its
    CPU kernels; where a worker has already done so, the registration is renewed.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "not applicable"

    from vllm.triton_utils import HAS_TRITON
    from vllm.utils import cpu_triton_utils

    if is_patched(cpu_triton_utils, FUNCTION):
        return "mended"
    if HAS_TRITON:  # the platform registers its stand-ins only where Triton is off
        return "not needed"
    # The C++ operators are loaded by the worker; probing needs them now. Loading them twice is harmless.
    current_platform.import_kernels()
    if writes_through(getattr(cpu_triton_utils, FUNCTION)):
        return "not needed"

    patch(cpu_triton_utils, FUNCTION, lambda original: expand, key="cpu_sampling")
    from vllm.triton_utils import dispatcher

    if KERNEL in dispatcher._registry:
        dispatcher.register_kernels({KERNEL: expand})
    logger.debug(
        "vllm_ext: mended per-request sampling parameters under speculation on CPU (vLLM issue 55005)"
    )
    return "mended"


def writes_through(expand_impl: Any) -> bool:
    """Whether `expand_impl` fills the caller's tensor, float32 or int32 as the sampler passes them."""
    import torch

    counts = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has no tokens
    for dtype in (torch.float32, torch.int32):
        output = torch.full((5,), 7, dtype=dtype)
        per_request = torch.tensor([0, 3, 2], dtype=dtype)
        expand_impl(output, per_request, counts, 0, 1, MAX_NUM_TOKENS=8)
        if output.tolist() != [1, 1, 2, 2, 2]:
            return False
    fractions = torch.full((5,), 7.0)
    expand_impl(fractions, torch.tensor([0.25, 1.0, 0.5]), counts, 0, 0, MAX_NUM_TOKENS=8)
    return fractions.tolist() == [0.25, 0.25, 0.5, 0.5, 0.5]


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens, in place: [num_reqs] -> output[:num_tokens].

    `cu_num_tokens` [num_reqs] are inclusive running totals. Values equal to `replace_from` become
    `replace_to`. `MAX_NUM_TOKENS` is a compile-time bound of the Triton kernel and has no meaning here.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    tokens = values.repeat_interleave(counts)
    output[: tokens.shape[0]].copy_(tokens)
