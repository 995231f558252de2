"""The V2 runner really runs here, so that tests on it mean something; and the helper reports what goes
wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.engine.v2 import V1_RUNNER, V2_RUNNER, ChildFailed, model_runner, run_in_v1, run_in_v2

pytestmark = pytest.mark.engine

PROMPTS = (
    "The system prompt is shared by every tenant",
    "Once upon a time there was a little server",
    "def add(a: int, b: int)",
)


def greedy(model: str, max_tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(model, enforce_eager=True, max_model_len=256, num_gpu_blocks_override=32, seed=0)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    first = llm.generate(list(PROMPTS), sampling)
    again = llm.generate(list(PROMPTS), sampling)
    runner = type(model_runner(llm))
    return {
        "runner": [f"{cls.__module__}.{cls.__name__}" for cls in runner.__mro__],
        "tokens": [list(output.outputs[0].token_ids) for output in first],
        "again": [list(output.outputs[0].token_ids) for output in again],
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
    }


def test_v2_runs_under_the_interpreter_and_agrees_with_v1(tiny_llama: str):
    v1 = run_in_v1(greedy, tiny_llama, 12)
    v2 = run_in_v2(greedy, tiny_llama, 12)
    assert f"{V2_RUNNER}.GPUModelRunner" in v2["runner"]
    assert v1["runner"][0].startswith(V1_RUNNER) and not any(V2_RUNNER in name for name in v1["runner"])
    assert v2["tokens"] == v1["tokens"] == v1["again"] == v2["again"]
    assert len({tuple(tokens) for tokens in v1["tokens"]}) == len(PROMPTS), "the prompts tell the model apart"


def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def fail() -> None:
    raise ValueError("a reason to be seen")


def sleep() -> None:
    import time

    time.sleep(60)


def test_the_child_gets_its_own_environment(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_EXT_POLICY", "/nowhere.yaml")
    names = ("TRITON_INTERPRET", "VLLM_EXT_POLICY", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS")
    assert run_in_v1(environment, *names, env={"VLLM_PLUGINS": "vllm_ext"}) == {
        "TRITON_INTERPRET": None,
        "VLLM_EXT_POLICY": None,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_PLUGINS": "vllm_ext",
    }


def test_a_failure_in_the_child_shows_its_traceback():
    with pytest.raises(ChildFailed, match=r"(?s)fail.*exited with status 1.*a reason to be seen"):
        run_in_v1(fail)


def test_a_child_that_hangs_is_ended():
    with pytest.raises(ChildFailed, match="did not return within 1 s"):
        run_in_v1(sleep, timeout=1)
