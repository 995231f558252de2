"""A vLLM that lacks what a section of the policy needs is refused at start where the policy has it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.policy import parse_policy
from vllm_ext_plugin import engine_config, seams
from vllm_ext_plugin.seam_table import SEAMS

pytestmark = pytest.mark.unit

POOL = next(seam for seam in SEAMS if seam.qualname == "BlockPool.free_blocks")
LEAVES = next(seam for seam in SEAMS if seam.qualname == "Scheduler._free_request")
TIER = next(seam for seam in SEAMS if seam.qualname == "LRUCachePolicy")
OFFLOADING = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={})


def refusals(
    monkeypatch: pytest.MonkeyPatch, policy: str, transfer: Any = None, breaking: bool = True
) -> str:
    problems = [seams.SeamProblem(seam, "0.34.0", "def f()", None, breaking) for seam in (POOL, LEAVES, TIER)]
    monkeypatch.setattr(seams, "check", lambda: problems)
    snapshot = parse_policy(f"version: 1\n{policy}")
    return "\n".join(engine_config.start_refusals(SimpleNamespace(kv_transfer_config=transfer), snapshot))


def test_retention_needs_its_own_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusals(monkeypatch, "retention: {}\n")
    assert "BlockPool.free_blocks is gone" in told and "remove that section" in told
    assert "_free_request" not in told and "LRUCachePolicy" not in told
    assert "LRUCachePolicy" in refusals(monkeypatch, "retention: {}\n", OFFLOADING)
    assert "_free_request" in refusals(monkeypatch, "telemetry: {block_trace: t}\n")
    assert refusals(monkeypatch, "telemetry: {}\n") == ""
    assert refusals(monkeypatch, "retention: {}\n", breaking=False) == ""


def test_salting_starts_without_them() -> None:
    for seam in (POOL, LEAVES, TIER):
        assert not seam.fatal and seam.feature
        assert not dataclasses.replace(seam, when_missing="less is shown").feature
