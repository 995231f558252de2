"""What vLLM is told of our environment variables: their names, never what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tenancy_helpers import policy_env
from tests.engine.v2 import run_in_v1

pytestmark = pytest.mark.engine


def told(model: str) -> dict[str, Any]:
    import os

    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, enforce_eager=True, fail_on_environ_validation=True)
    config = arguments.create_engine_config()
    ours = {name for name in os.environ if name.startswith("VLLM_EXT_")}
    return {
        "known": ours <= set(envs.environment_variables),
        "values": [envs.environment_variables[name]() for name in sorted(ours)],
        "factors": repr(envs.compile_factors()),
        "config": repr(config),
        "names": sorted(ours),
    }


def test_vllm_knows_our_variables_and_none_of_their_values(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path, salt_secret=None)
    secret = "a secret that an operator put into the environment"
    result = run_in_v1(told, tiny_llama, env={**env, "VLLM_EXT_GATEWAY_SECRET": secret})
    assert {"VLLM_EXT_POLICY", "VLLM_EXT_GATEWAY_SECRET", "VLLM_EXT_EPHEMERAL_SECRET"} <= set(result["names"])
    assert result["known"] and set(result["values"]) == {None}
    assert secret not in result["factors"] and secret not in result["config"]
