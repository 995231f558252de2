"""`vllm-ext replay …` as an operator runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ext.cli import main

pytestmark = pytest.mark.unit


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "night.jsonl"
    with path.open("w") as file:
        file.write('{"vllm_ext_trace": 1, "block_size": 16}\n')
        for number in range(60):
            tenant = "acme" if number % 2 else "globex"
            head = [tenant, f"{tenant}-1"]
            record = {"arrival": float(number), "prompt": [*head, f"{number}"], "tenant": tenant}
            file.write(json.dumps(record) + "\n")
    return path


def test_lines_for_each_order_and_tenant(trace: Path) -> None:
    result = run(trace, "--capacity", "8,50%")
    assert result.exit_code == 0, result.output
    out = result.stdout.splitlines()
    assert out[0] == (
        "night 8 (8 blocks) lru: hit ratio 0.6444, gap closed –, against LRU +0.00, evicted by lru 56"
    )
    assert sum(line.startswith("night 50% (32 blocks) ") for line in out) == 3
    assert "night 8 tenant acme: lru 0.6444, reuse 0.6444, belady 0.6444 of 90 prompt blocks" in out
    assert any(line.startswith("reuse: never below LRU") for line in out)


def test_json(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        trace, "--capacity", "8", "--order", "lru,reuse", "--pin-running", "--no-hints", "--json", out
    )
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["settings"] == {"format": "vllm-ext", "pin_running": True, "hints": False}
    [row] = document["rows"]
    assert row["capacity_blocks"] == 8
    assert set(row["orders"]) == {"lru", "reuse"}
    assert row["orders"]["reuse"]["tenants"]["acme"]["prompt_blocks"] == 90
    assert row["orders"]["reuse"]["gap_closed"] is None  # Belady was not asked for


def test_seeds_of_agents(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    session = {"block_size": 64, "tool_tokens": 64, "requests": [{"t": 0.0, "hash_ids": [1, 2]}]}
    for name in "ab":
        (folder / f"{name}.json").write_text(json.dumps(session))
    result = run(folder, "--format", "agents", "--seed", 1, "--seed", 2, "--capacity", 9, "--order", "lru")
    assert result.exit_code == 0, result.output
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [
        "agents seed 1 9 (9 blocks) lru",
        "agents seed 2 9 (9 blocks) lru",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--order", "fifo"], "unknown order 'fifo'; choose from lru, reuse, belady"),
        (["--order", ","], "name at least one"),
        (["--capacity", "lots"], "capacity 'lots': give a share such as 5%"),
        (["--seed", "1"], "--seed places the sessions of --format agents"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--format", "mooncake"], "night.jsonl:1: timestamp: expected a number"),
    ],
)
def test_wrong_input_is_told_without_a_traceback(trace: Path, args: list[str], message: str) -> None:
    result = run(trace, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_plot_without_matplotlib(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("vllm_ext.cache.replay.plot.import_module", absent)
    result = run(trace, "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "--plot needs matplotlib: pip install" in result.stderr


def test_plot(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert run(trace, "--capacity", "8,20", "--plot", out).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_starts_without_numpy() -> None:
    code = (
        "import vllm_ext.cli, sys; print(*(n for n in ('numpy', 'numba', 'matplotlib') if n in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
