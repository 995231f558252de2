"""How much of the gap between LRU and Belady the `reuse` order closes on public traces, what it costs, and
whether that holds on parts of the traces that nobody looked at.

    python benchmarks/eviction_targets.py TRACES [--seeds 7,8,9] [--splits] [--json FILE]

TRACES holds `mooncake_conversation.jsonl` (github.com/kvcache-ai/Mooncake, FAST25-release) and `agents/`
(github.com/callanjfox/kv-cache-tester, 80 sessions). "eager" and "pinned" are the two modes of
`vllm-ext replay`; all three orders are replayed in the same one. `prototype` is what an earlier study
reached. Times are CPU time of this process, for the order and the replay's pool together. Install numba, or
Belady takes an hour.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.manifest import manifest
from vllm_ext.cache.replay import Outcome, belady, gap_closed, replay
from vllm_ext.cache.traces import Trace, read_agents, read_mooncake

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
LARGE = 0.1  # from this share on, the loss against LRU counts
MAX_LOSS = 0.003
MAX_P99_MS = 0.5

# Gap closed in %, by (trace, pinned, hints) and share.
Targets = dict[float, float]
TARGETS: dict[tuple[str, bool, bool], Targets] = {
    ("conversation", False, False): {0.01: 29, 0.02: 33, 0.05: 20, 0.1: 19},
    ("agents", False, False): {0.01: 45, 0.02: 38, 0.05: 28},
    ("agents", False, True): {0.01: 48, 0.02: 45, 0.05: 45, 0.1: 45},
    ("agents", True, False): {0.01: 25, 0.02: 25, 0.05: 14},
    ("agents", True, True): {0.01: 28, 0.02: 30, 0.05: 30, 0.1: 37},
}
PROTOTYPE: dict[tuple[str, bool, bool], Targets] = {
    ("conversation", False, False): {0.01: 27.5, 0.02: 30.7, 0.05: 18.1},
    ("agents", False, False): {0.01: 47, 0.02: 36, 0.05: 23},
    ("agents", False, True): {0.01: 48.6, 0.02: 45.0, 0.05: 40.5},
}


@dataclass(slots=True)
class Measured:
    """One replay of `reuse` between its two bounds."""

    trace: str
    mode: str
    hints: bool
    share: float
    seed: int | None
    lru: float
    belady: float
    reuse: float
    gap_closed: float | None
    us_per_block: float
    p99_ms: float
    evictions: dict[str, int]


class Bench:
    """LRU and Belady are replayed once for each trace, capacity and mode."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, float, bool], tuple[float, float]] = {}

    def measure(self, trace: Trace, share: float, pinned: bool, hints: bool, seed: int | None) -> Measured:
        blocks = max(1, int(trace.num_prompt_keys * share))
        key = (trace.name, share, pinned)
        if key not in self._bounds:
            lru = replay(trace, "lru", blocks, pin_running=pinned)
            self._bounds[key] = (lru.hit_ratio, belady(trace, blocks, pin_running=pinned).hit_ratio)
        lru_ratio, best = self._bounds[key]
        ours = replay(trace, "reuse", blocks, pin_running=pinned, hints=hints, timed=True)
        return Measured(
            trace.name,
            "pinned" if pinned else "eager",
            hints,
            share,
            seed,
            lru_ratio,
            best,
            ours.hit_ratio,
            gap_closed(ours.hit_ratio, lru_ratio, best),
            1e6 * sum(ours.latency) / ours.prompt_blocks,
            1e3 * percentile(ours, 0.99),
            ours.evictions,
        )


def percentile(outcome: Outcome, share: float) -> float:
    return sorted(outcome.latency)[int(share * (len(outcome.latency) - 1))]


def target_table(bench: Bench, folder: Path, seeds: list[int], console: Console) -> list[Measured]:
    traces: dict[str, list[tuple[Trace, int | None]]] = {
        "conversation": [(conversation(folder), None)],
        "agents": [(agents(folder, seed), seed) for seed in seeds],
    }
    gc.freeze()  # the traces are no part of what is timed
    table = Table(title=f"gap closed, % (agents: seeds {', '.join(map(str, seeds))})", title_justify="left")
    for column in (
        "trace",
        "mode",
        "hints",
        "share",
        "ours",
        "target",
        "prototype",
        "vs LRU",
        "us/block",
        "p99 ms",
    ):
        table.add_column(column, justify="left" if column in ("trace", "mode", "hints") else "right")
    found: list[Measured] = []
    for setting, targets in TARGETS.items():
        name, pinned, hints = setting
        for share in SHARES:
            cell = [bench.measure(trace, share, pinned, hints, seed) for trace, seed in traces[name]]
            found += cell
            closed = [100 * item.gap_closed for item in cell if item.gap_closed is not None]
            target, before = targets.get(share), PROTOTYPE.get(setting, {}).get(share)
            ours = statistics.mean(closed) if closed else None
            mark = "" if target is None or ours is None else " ok" if ours >= target else " MISSED"
            spread = f" ({min(closed):.1f} to {max(closed):.1f})" if len(closed) > 1 else ""
            table.add_row(
                name,
                cell[0].mode,
                "yes" if hints else "no",
                f"{share:.0%}",
                ("–" if ours is None else f"{ours:.1f}") + spread,
                ("–" if target is None else f"{target:g}") + mark,
                "–" if before is None else f"{before:g}",
                f"{100 * min(item.reuse - item.lru for item in cell):+.2f}",
                f"{statistics.mean(item.us_per_block for item in cell):.2f}",
                f"{max(item.p99_ms for item in cell):.2f}",
            )
            print(
                f"{name} {cell[0].mode} hints={hints} {share:.0%}: {ours} (target {target})", file=sys.stderr
            )
    console.print(table)
    losses = [item.lru - item.reuse for item in found if item.share >= LARGE]
    verdict = "ok" if max(losses) <= MAX_LOSS else "MISSED"
    console.print(
        f"worst loss against LRU from {LARGE:.0%} on: {100 * max(0.0, *losses):.2f} points"
        f" (allowed {100 * MAX_LOSS:.1f}): {verdict}"
    )
    slow = max(item.p99_ms for item in found if item.trace == traces["conversation"][0][0].name)
    console.print(f"p99 of a request, conversation: {slow:.2f} ms (budget {MAX_P99_MS} ms)")
    return found


def split_table(bench: Bench, folder: Path, console: Console) -> list[Measured]:
    """The same on parts: whoever tuned to the whole would do worse here."""
    table = Table(title="gap closed on parts of the traces, %, eager", title_justify="left")
    for column in ("part", "hints", *(f"{share:.0%}" for share in SHARES), "worst vs LRU"):
        table.add_column(column, justify="left" if column in ("part", "hints") else "right")
    found = []
    for part, hints in parts(folder):
        row = [bench.measure(part, share, False, hints, None) for share in SHARES]
        found += row
        cells = ["–" if item.gap_closed is None else f"{100 * item.gap_closed:.1f}" for item in row]
        worst = min(100 * (item.reuse - item.lru) for item in row)
        table.add_row(part.name, "yes" if hints else "no", *cells, f"{worst:+.2f}")
        print(part.name, hints, cells, f"{worst:+.2f}", file=sys.stderr)
    console.print(table)
    return found


def parts(folder: Path) -> Iterator[tuple[Trace, bool]]:
    whole = conversation(folder)
    half = len(whole.requests) // 2
    yield whole.part(0, half, "conversation, first half"), False
    yield whole.part(half, 2 * half, "conversation, second half"), False
    for name, sessions, window in (
        ("agents, even sessions", slice(0, None, 2), 7200.0),
        ("agents, odd sessions", slice(1, None, 2), 7200.0),
        ("agents, starts over 30 min", slice(None), 1800.0),
        ("agents, starts over 6 h", slice(None), 21600.0),
    ):
        part = read_agents(folder / "agents", 11, window, sessions)
        part.name = name
        yield part, False
        yield part, True


def conversation(folder: Path) -> Trace:
    return read_mooncake(folder / "mooncake_conversation.jsonl")


def agents(folder: Path, seed: int) -> Trace:
    trace = read_agents(folder / "agents", seed)
    trace.name = f"agents seed {seed}"
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seeds", default="7,8,9", help="placements of the agents' sessions")
    parser.add_argument("--splits", action="store_true", help="parts of the traces instead of the whole")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    bench, console = Bench(), Console(width=150)
    if options.splits:
        found = split_table(bench, options.traces, console)
    else:
        found = target_table(bench, options.traces, seeds, console)
    if options.json is not None:
        document = manifest(
            benchmark="eviction_targets",
            what="splits" if options.splits else "targets",
            seeds=seeds,
            repeats=1,
            warm_up="none: learning from nothing is part of what is measured",
            results=[asdict(item) for item in found],
        )
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
