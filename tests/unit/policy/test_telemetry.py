"""The `telemetry` section."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.policy import PolicyError, PolicyStore, explain_tenant, parse_policy

pytestmark = pytest.mark.unit

TENANCY = "tenancy: {tenants: {acme: {}}}\n"


def test_defaults_and_paths() -> None:
    nothing = parse_policy("version: 1\n").policy
    assert nothing.telemetry is None and not nothing.is_for_the_engine
    empty = parse_policy("version: 1\ntelemetry: {}\n").policy
    assert empty.is_for_the_engine and empty.telemetry is not None
    assert empty.telemetry.trace_path(Path("/etc")) is None
    named = parse_policy(
        "version: 1\ntelemetry: {block_trace: logs/t.jsonl, max_size: 2MiB}\n"
    ).policy.telemetry
    assert named is not None and named.max_size == 2 << 20
    assert named.trace_path(Path("/etc")) == Path("/etc/logs/t.jsonl")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("telemetry:\n", "telemetry"),
        ("telemetry: {block_trace: ''}\n", "telemetry.block_trace"),
        ("telemetry: {max_size: 0}\n", "telemetry.max_size"),
        ("telemetry: {block_traces: x}\n", "telemetry"),
    ],
)
def test_mistakes_are_named(text: str, field: str) -> None:
    with pytest.raises(PolicyError, match=field):
        parse_policy(f"version: 1\n{text}")


def test_explain_shows_what_is_written() -> None:
    snapshot = parse_policy(f"version: 1\n{TENANCY}telemetry:\n  block_trace: t.jsonl\n")
    (row,) = [row for row in explain_tenant(snapshot, "acme") if row.setting == "block trace"]
    assert row.value.startswith("t.jsonl: keyed hashes") and row.position is not None
    assert row.position.line == 4
    without = parse_policy(f"version: 1\n{TENANCY}")
    assert not [row for row in explain_tenant(without, "acme") if row.setting == "block trace"]


def test_it_is_reloaded_where_our_scheduler_is_in_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"version: 1\n{TENANCY}")
    store = PolicyStore(file)
    assert store.apply(f"version: 1\n{TENANCY}telemetry: {{block_trace: t}}\n").outcome == "reloaded"
    assert store.apply(f"version: 1\n{TENANCY}").outcome == "reloaded"


def test_it_needs_a_restart_where_vllm_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\n")
    result = PolicyStore(file).apply("version: 1\ntelemetry: {block_trace: t}\n")
    assert result.outcome == "refused" and "telemetry" in result.message and "restart" in result.message
