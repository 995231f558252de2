"""The public surface: small, lazy, typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vllm_ext
import vllm_ext.policy

pytestmark = pytest.mark.unit


def test_names() -> None:
    assert set(vllm_ext.__all__) <= set(dir(vllm_ext))
    for name in vllm_ext.__all__:
        assert getattr(vllm_ext, name) is not None
    assert vllm_ext.load_policy is vllm_ext.policy.load_policy
    with pytest.raises(AttributeError, match="nothing"):
        vllm_ext.nothing  # noqa: B018
    for name in vllm_ext.policy.__all__:
        assert hasattr(vllm_ext.policy, name)


def test_typed() -> None:
    assert (Path(vllm_ext.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import vllm_ext", ("pydantic", "yaml", "typer", "rich", "watchfiles", "vllm", "torch")),
        ("import vllm_ext.policy", ("typer", "rich", "watchfiles", "vllm", "torch")),
        ("import vllm_ext.cli", ("watchfiles", "vllm", "torch")),
    ],
)
def test_imports_only_what_it_needs(statement: str, forbidden: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(*(name for name in {forbidden!r} if name in sys.modules))"
    root = str(Path(vllm_ext.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": root}
    )
    assert found.stdout.split() == []
