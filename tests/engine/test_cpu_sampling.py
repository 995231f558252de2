"""Sampling with n-gram speculation on CPU follows the same distribution as without, request by request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.v2 import run_in_v1, run_in_v2

pytestmark = pytest.mark.engine

# The n-gram proposer looks up the last two tokens (or one) and drafts what followed them. Only the prompt's
# numbers may be sampled, so it always finds something, and few outcomes keep the noise of the comparison low.
PROMPT = " 1 2 3 4 5 6 7 8 4 3 2 1 8 7 6 5"
# Every request in a batch has other parameters than its neighbours, so that a mix-up between rows shows too.
WITHOUT_TOP_K: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.5, "top_p": 0.6},
)
WITH_TOP_K: tuple[dict[str, Any], ...] = (*WITHOUT_TOP_K, {"temperature": 1.2, "top_k": 2})
REPEATS = 600  # requests for each kind
POSITIONS = (1, 2, 3)  # the first token follows the prefill, where nothing is drafted


def sample(model: str, speculate: bool, mend: bool, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens sampled after PROMPT for each of `kinds`, and how many tokens were drafted."""
    from vllm_ext_plugin import cpu_sampling

    outcomes = [cpu_sampling.mend(), cpu_sampling.mend()] if mend else []

    from vllm import LLM, SamplingParams

    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=128,
        num_gpu_blocks_override=512,
        seed=17 if speculate else 4,
        disable_log_stats=False,
        speculative_config=speculation if speculate else None,
    )
    numbers = sorted(set(llm.get_tokenizer().encode(PROMPT)))
    params = [
        SamplingParams(max_tokens=1 + max(POSITIONS), ignore_eos=True, allowed_token_ids=numbers, **kind)
        for kind in kinds
    ]
    outputs = llm.generate([PROMPT] * len(params) * REPEATS, params * REPEATS, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {
        "outcomes": outcomes,
        "tokens": [tokens[kind :: len(kinds)] for kind in range(len(kinds))],  # [kind][repeat][position]
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
    }


def distance(left: list[list[int]], right: list[list[int]]) -> float:
    """Total variation between two samples' tokens, the largest over the positions."""

    def at(position: int) -> float:
        p, q = (Counter(tokens[position] for tokens in sample) for sample in (left, right))
        return sum(abs(p[token] / len(left) - q[token] / len(right)) for token in p | q) / 2

    return max(at(position) for position in POSITIONS)


def test_sampled_distribution_equals_the_one_without_speculation(tiny_llama: str):
    plain = run_in_v1(sample, tiny_llama, False, False, WITH_TOP_K)
    mended = run_in_v1(sample, tiny_llama, True, True, WITH_TOP_K)
    # With top_k the fault can end the engine with an index out of range, so it is left out of the
    # counter-proof.
    faulty = run_in_v1(sample, tiny_llama, True, False, WITHOUT_TOP_K)

    assert mended["outcomes"] == ["mended", "mended"]
    assert plain["drafted"] == 0
    for run, kinds in ((mended, WITH_TOP_K), (faulty, WITHOUT_TOP_K)):
        assert run["drafted"] > len(kinds) * REPEATS, (
            "hardly anything was speculated: the test would prove nothing"
        )

    halves = [(tokens[::2], tokens[1::2]) for tokens in plain["tokens"]]
    noise = max(distance(*pair) for pair in halves)  # of half the sample: about 1.4 times that of the whole
    assert noise < 0.2, "too few repeats to tell anything"
    for kind, before, after in zip(WITH_TOP_K, plain["tokens"], mended["tokens"], strict=True):
        assert distance(before, after) < 1.2 * noise, kind
    faulty_distances = [distance(*pair) for pair in zip(plain["tokens"], faulty["tokens"], strict=False)]
    assert max(faulty_distances) > 3 * noise, "vLLM samples correctly by itself: the mend can go"


def expanded(mend_when: str) -> dict[str, Any]:
    """What vLLM's `expand_batch_to_tokens` gives, mended before or after its kernels are registered."""
    import torch
    from vllm.platforms import current_platform

    from vllm_ext_plugin import cpu_sampling

    current_platform.import_kernels()
    outcomes = [cpu_sampling.mend()] if mend_when == "before" else []
    current_platform.register_triton_kernel_overrides()

    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    if mend_when == "after":
        outcomes += [cpu_sampling.mend(), cpu_sampling.mend()]
    counts = torch.tensor([1, 3, 3], dtype=torch.int32)
    temperature = expand_batch_to_tokens(
        torch.tensor([0.0, 0.5, 2.0]), counts, 3, replace_from=0, replace_to=1
    )
    top_k = expand_batch_to_tokens(torch.tensor([5, 512, 1], dtype=torch.int32), counts, 3)
    return {"outcomes": outcomes, "temperature": temperature.tolist(), "top_k": top_k.tolist()}


@pytest.mark.parametrize("mend_when", ["before", "after"])
def test_the_mend_reaches_vllms_sampler_early_or_late(mend_when: str):
    result = run_in_v1(expanded, mend_when)
    assert set(result["outcomes"]) == {"mended"}
    assert result["temperature"] == [1.0, 0.5, 0.5]
    assert result["top_k"] == [5, 512, 512]


def test_unmended_vllm_needs_it():
    result = run_in_v1(expanded, "never")
    assert (result["temperature"], result["top_k"]) != ([1.0, 0.5, 0.5], [5, 512, 512])


def outcome_when(situation: str) -> list[Any]:
    import sys

    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    from vllm_ext_plugin import cpu_sampling

    if situation == "fixed upstream":
        cpu_triton_utils._expand_kernel_impl = cpu_sampling.expand  # stands for a vLLM that writes through
    elif situation == "other platform":
        type(current_platform).is_cpu = lambda self: False
    before = cpu_triton_utils._expand_kernel_impl
    outcome = cpu_sampling.mend()
    workers = [name for name in sys.modules if name.startswith("vllm.v1.worker")]
    return [outcome, cpu_triton_utils._expand_kernel_impl is not before, workers]


@pytest.mark.parametrize(
    ("situation", "outcome", "replaced"),
    [
        ("as it is", "mended", True),
        ("fixed upstream", "not needed", False),
        ("other platform", "not applicable", False),
    ],
)
def test_it_mends_only_what_is_broken_and_imports_no_worker(situation: str, outcome: str, replaced: bool):
    assert run_in_v1(outcome_when, situation) == [outcome, replaced, []]


def test_it_is_not_needed_where_triton_runs_the_kernel():
    assert run_in_v2(outcome_when, "as it is") == ["not needed", False, []]


@given(
    rows=st.lists(st.tuples(st.floats(0, 8, width=32), st.integers(0, 5)), min_size=1, max_size=20),
    dtype=st.sampled_from(["float32", "int32", "int64"]),
)
def test_expand_repeats_each_value_and_replaces(rows: list[tuple[float, int]], dtype: str):
    import torch

    from vllm_ext_plugin.cpu_sampling import expand

    values = torch.tensor([value for value, _ in rows]).to(getattr(torch, dtype))
    counts = torch.tensor([count for _, count in rows], dtype=torch.int32)
    expected = [
        1 if value == 0 else value
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        for _ in range(count)
    ]
    output = torch.full((len(expected) + 2,), 99, dtype=values.dtype)
    expand(output, values, counts.cumsum(0, dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=8)
    assert output.tolist() == [*expected, 99, 99]
