"""Installed but not named, nothing in vLLM changes but two options in its help.

Named, only what the policy names is touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engine.tenancy_helpers import Engine, policy_env
from tests.engine.v2 import run_in_v1

pytestmark = pytest.mark.engine

ENTRY = ("vllm.engine.arg_utils", "EngineArgs", "add_cli_args")


def touched() -> dict[str, Any]:
    """A fingerprint of every class and module that the table of seams names: each attribute, by identity."""
    import importlib

    from vllm_ext_plugin.seams import SEAMS

    found = {}
    for seam in SEAMS:
        module = importlib.import_module(seam.module)
        owners = {"": module}
        head = seam.qualname.split(".")[0]
        if isinstance(getattr(module, head, None), type):
            owners[head] = getattr(module, head)
        for owner_name, owner in owners.items():
            for name, value in vars(owner).items():
                found[seam.module, owner_name, name] = value
    return found


def changed_by_loading(named: str | None, times: int) -> list[list[str]]:
    os.environ.pop("VLLM_PLUGINS", None)
    if named is not None:
        os.environ["VLLM_PLUGINS"] = named
    from vllm.plugins import load_general_plugins

    from vllm_ext_plugin import register

    touched()  # imports everything first
    before = touched()
    load_general_plugins()
    for _ in range(times):
        register()
    after = touched()
    keys = before.keys() | after.keys()
    return sorted(
        [
            list(key)
            for key in keys
            # A submodule becomes an attribute of its package when anybody imports it; the flag is vLLM's own.
            if before.get(key) is not after.get(key)
            and not isinstance(after.get(key), ModuleType)
            and key[2] != "plugins_loaded"
        ]
    )


def test_installed_but_not_named_only_the_options_are_added():
    assert run_in_v1(changed_by_loading, None, 3) == [list(ENTRY)]


def test_another_plugin_named_ours_stays_out():
    assert run_in_v1(changed_by_loading, "lora_filesystem_resolver", 0) == []


def test_named_the_front_end_is_touched_only_where_the_engine_is_configured():
    changed = run_in_v1(changed_by_loading, "vllm_ext", 3)
    assert [*ENTRY[:2], "create_engine_config"] in changed
    allowed = {tuple(ENTRY), (*ENTRY[:2], "create_engine_config")}
    mends = {("vllm.utils.cpu_triton_utils", "", "_expand_kernel_impl")}
    assert {tuple(key) for key in changed} <= allowed | mends


def without_tenancy(model: str) -> dict[str, Any]:
    import importlib

    engine = Engine(model)
    processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    engine.reused(None)
    return {
        "scheduler": type(engine.scheduler).__module__,
        "stamping": hasattr(processor.add_request, "__wrapped__"),
        "extra_args": engine.seen[-1].sampling_params.extra_args,
        "salt": engine.seen[-1].cache_salt,
    }


def test_a_policy_without_tenancy_leaves_requests_alone(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path)
    Path(env["VLLM_EXT_POLICY"]).write_text(json.dumps({"version": 1}))
    assert run_in_v1(without_tenancy, tiny_llama, env=env) == {
        "scheduler": "vllm.v1.core.sched.scheduler",
        "stamping": False,
        "extra_args": None,
        "salt": None,
    }


def vllm(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    command = [str(Path(sys.executable).parent / "vllm"), *arguments]
    return subprocess.run(
        command, env={**environment, **env}, capture_output=True, text=True, timeout=300, check=False
    )


def test_help_shows_both_options():
    shown = vllm("serve", "--help=all")
    assert shown.returncode == 0
    assert "--plugins" in shown.stdout and "--policy" in shown.stdout


def test_an_unknown_plugin_is_an_error_that_lists_the_known_ones():
    refused = vllm("serve", "model", "--plugins", "nosuch")
    assert refused.returncode == 2
    assert "'nosuch'" in refused.stderr and "Plugins found" in refused.stderr and "vllm_ext" in refused.stderr


def test_a_policy_without_the_plugin_is_an_error():
    refused = vllm("serve", "model", "--policy", "policies/demo.yaml")
    assert refused.returncode == 2 and "--policy needs --plugins vllm_ext" in refused.stderr


def test_a_broken_policy_is_an_error_with_file_line_and_field(tmp_path: Path):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\ntenancy:\n  unknown: isolated\n  tennants: {}\n")
    refused = vllm("serve", "model", "--policy", str(path), "--plugins", "vllm_ext")
    assert refused.returncode == 2
    assert "policy.yaml:3:" in refused.stderr and "policy.yaml:4:" in refused.stderr
    assert "tenants" in refused.stderr and "Traceback" not in refused.stderr


def configured(model: str, **options: Any) -> str:
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(model=model, enforce_eager=True, **options).create_engine_config()
    except ValueError as error:
        return str(error)
    return repr(config.scheduler_config.scheduler_cls)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "xxhash"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "ExampleConnector",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "connectors": [
                            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                            {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
                        ]
                    },
                }
            },
            "LMCacheConnectorV1",
        ),
    ],
)
def test_what_would_undo_isolation_is_refused_at_start(
    options: dict[str, Any], said: str, tiny_llama: str, tmp_path: Path
):
    answer = run_in_v1(configured, tiny_llama, env=policy_env(tmp_path), **options)
    assert "refuses to start" in answer and said in answer


def test_headless_engines_need_a_secret_that_they_can_share(tiny_llama: str, tmp_path: Path):
    answer = run_in_v1(headless, tiny_llama, env=policy_env(tmp_path, salt_secret=None))
    assert "tenancy.salt_secret" in answer


def headless(model: str) -> str:
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(model=model, enforce_eager=True).create_engine_config(headless=True)
    except ValueError as error:
        return str(error)
    return "started"


def own_scheduler(model: str) -> list[str]:
    engine = Engine(model, scheduler_cls="tests.engine.user_scheduler.CountingScheduler")
    reused = [engine.reused("acme"), engine.reused("acme"), engine.reused("globex")]
    return [
        str(engine.scheduler.steps > 0),
        *(cls.__name__ for cls in type(engine.scheduler).__mro__[:3]),
        *map(str, reused),
    ]


def test_a_scheduler_of_the_users_own_is_composed_with_ours(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(own_scheduler, tiny_llama, env=policy_env(tmp_path))
    assert result == [
        "True",
        "VllmExtCountingScheduler",
        "ExtensionScheduler",
        "CountingScheduler",
        "0",
        "224",
        "0",
    ]


def test_a_policy_in_the_environment_without_the_plugin_is_refused(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path)
    refused = vllm("serve", "model", VLLM_EXT_POLICY=env["VLLM_EXT_POLICY"])
    assert refused.returncode == 2 and "--plugins vllm_ext" in refused.stderr
    assert "the plugin is not named" in run_in_v1(
        unnamed, tiny_llama, env["VLLM_EXT_POLICY"], env={"TEST_SALT_SECRET": env["TEST_SALT_SECRET"]}
    )


def unnamed(model: str, policy: str) -> str:
    os.environ.pop("VLLM_PLUGINS", None)
    os.environ["VLLM_EXT_POLICY"] = policy
    return configured(model)
