"""``vllm-ext replay``: what an eviction order would have done with a block trace. Exit status 2 when the
input is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # numpy is loaded when the command runs, not when the command line starts
    from vllm_ext.cache.replay import Capacity, Row
    from vllm_ext.cache.traces import Trace


class Format(StrEnum):
    MOONCAKE = "mooncake"
    AGENTS = "agents"
    NATIVE = "vllm-ext"


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Trace files; with --format agents, folders of session files.", show_default=False
        ),
    ],
    trace_format: Annotated[
        Format, typer.Option("--format", help="How the traces are written.")
    ] = Format.NATIVE,
    capacity: Annotated[
        str, typer.Option(help="Cache sizes: shares of the trace's distinct prompt blocks, or blocks.")
    ] = "1%,2%,5%,10%,20%,40%",
    order: Annotated[
        str, typer.Option(help="Eviction orders; gaps are told where lru and belady are among them.")
    ] = ("lru,reuse,belady"),
    pin_running: Annotated[
        bool,
        typer.Option(
            "--pin-running",
            help="As vLLM does: running requests keep their blocks, output blocks take room."
            " Otherwise a request is admitted whole and the cache then cut back.",
        ),
    ] = False,
    hints: Annotated[
        bool,
        typer.Option("--hints/--no-hints", help="Tell the order why requests stopped and sessions ended."),
    ] = True,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            help="Start times of the agents' sessions; repeat it for several placements. [default: 7]"
        ),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    plot_out: Annotated[
        Path | None, typer.Option("--plot", help="Draw hit ratio over capacity (needs matplotlib).")
    ] = None,
) -> None:
    """Replay block traces through the eviction orders that serve, next to the best possible one."""
    from vllm_ext.cache.replay import study
    from vllm_ext.cache.replay.plot import PlotError, load_matplotlib, plot
    from vllm_ext.cache.traces import TraceError

    orders, capacities = _orders(order), _capacities(capacity)
    if seed and trace_format is not Format.AGENTS:
        _fail("--seed places the sessions of --format agents; other traces have times of their own")
    for path in (json_out, plot_out):
        if path is not None and not path.parent.is_dir():
            _fail(f"{path}: there is no folder {path.parent}")
    try:
        if plot_out is not None:
            load_matplotlib()  # say so before the work, not after
        loaded = [item for path in traces for item in _read(path, trace_format, seed or [7])]
    except (TraceError, PlotError) as error:
        _fail(str(error))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        steps = len(capacities) * len(orders)
        task = bar.add_task("", total=sum(len(trace.requests) for trace in loaded) * steps)
        rows = study(
            loaded,
            capacities,
            orders,
            pin_running=pin_running,
            hints=hints,
            progress=lambda label, done: bar.update(task, advance=done, description=label),
        )
    _print(rows, orders, Console())
    if json_out is not None:
        settings = {"format": trace_format.value, "pin_running": pin_running, "hints": hints}
        document = {"settings": settings, "rows": [row.as_json() for row in rows]}
        json_out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot_out is not None:
        try:
            plot(rows, plot_out)
        except PlotError as error:
            _fail(str(error))


def _read(path: Path, trace_format: Format, seeds: Sequence[int]) -> list[Trace]:
    from vllm_ext.cache.traces import read_agents, read_mooncake, read_native

    if trace_format is Format.MOONCAKE:
        return [read_mooncake(path)]
    if trace_format is Format.NATIVE:
        return [read_native(path)]
    placed = [read_agents(path, seed) for seed in seeds]
    if len(seeds) > 1:
        for trace, seed in zip(placed, seeds, strict=True):
            trace.name += f" seed {seed}"
    return placed


def _orders(text: str) -> list[str]:
    from vllm_ext.cache.replay import REPLAY_ORDERS

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in REPLAY_ORDERS:
            _fail(f"--order: unknown order {name!r}; choose from {', '.join(REPLAY_ORDERS)}")
    if not names:
        _fail(f"--order: name at least one of {', '.join(REPLAY_ORDERS)}")
    return names


def _capacities(text: str) -> list[Capacity]:
    from vllm_ext.cache.replay import parse_capacity

    try:
        return [parse_capacity(part) for part in text.split(",")]
    except ValueError as error:
        _fail(f"--capacity: {error}")


def _print(rows: Sequence[Row], orders: Sequence[str], console: Console) -> None:
    """A table on a terminal; one line per trace, capacity and order elsewhere, for grep."""
    _print_rows(rows, orders, console)
    if any(outcome.tenant_blocks for row in rows for outcome in row.outcomes.values()):
        _print_tenants(rows, orders, console)
    for line in _summary(rows, orders):
        console.print(Text(line), soft_wrap=True)


def _print_rows(rows: Sequence[Row], orders: Sequence[str], console: Console) -> None:
    table = Table()
    for column in ("trace", "capacity", "blocks", "order", "hit ratio", "gap closed", "vs LRU", "evicted by"):
        table.add_column(column, justify="left" if column in ("trace", "order", "evicted by") else "right")
    for row in rows:
        for order in orders:
            outcome = row.outcomes[order]
            gap, difference = row.gap_closed(order), row.against_lru(order)
            by_cause = ", ".join(f"{cause} {count}" for cause, count in outcome.evictions.items() if count)
            cells = (
                row.trace,
                row.capacity.text,
                str(row.blocks),
                order,
                f"{outcome.hit_ratio:.4f}",
                "–" if gap is None else f"{100 * gap:.1f} %",
                "–" if difference is None else f"{100 * difference:+.2f}",
                by_cause or "–",
            )
            if console.is_terminal:
                table.add_row(*(Text(cell) for cell in cells), end_section=order == orders[-1])
            else:
                names = ("hit ratio", "gap closed", "against LRU", "evicted by")
                facts = ", ".join(f"{name} {cell}" for name, cell in zip(names, cells[4:], strict=True))
                console.print(
                    Text(f"{row.trace} {row.capacity.text} ({row.blocks} blocks) {order}: {facts}"),
                    soft_wrap=True,
                )
    if console.is_terminal:
        console.print(table)


def _print_tenants(rows: Sequence[Row], orders: Sequence[str], console: Console) -> None:
    table = Table(title="hit ratio by tenant", title_justify="left")
    for column in ("trace", "capacity", "tenant", "prompt blocks", *orders):
        table.add_column(column, justify="left" if column in ("trace", "tenant") else "right")
    for row in rows:
        first = row.outcomes[orders[0]]
        for tenant, blocks in sorted(first.tenant_blocks.items()):
            ratios = [
                f"{row.outcomes[name].tenant_hits[tenant] / blocks:.4f}" if blocks else "–" for name in orders
            ]
            if console.is_terminal:
                cells = (row.trace, row.capacity.text, tenant, str(blocks), *ratios)
                table.add_row(*(Text(cell) for cell in cells))
            else:
                pairs = ", ".join(f"{name} {ratio}" for name, ratio in zip(orders, ratios, strict=True))
                console.print(
                    Text(
                        f"{row.trace} {row.capacity.text} tenant {tenant}: {pairs} of {blocks} prompt blocks"
                    ),
                    soft_wrap=True,
                )
    if console.is_terminal:
        console.print(table)


def _summary(rows: Sequence[Row], orders: Sequence[str]) -> list[str]:
    from vllm_ext.cache.replay import worst_against_lru

    lines = []
    for order in orders:
        worst = worst_against_lru(rows, order) if order not in ("lru", "belady") else None
        if worst is not None:
            difference, row = worst
            what = "worst loss against LRU" if difference < 0 else "never below LRU; smallest gain"
            lines.append(
                f"{order}: {what} {abs(100 * difference):.2f} points ({row.trace} at {row.capacity.text})"
            )
    refused = sum(outcome.refused for row in rows for outcome in row.outcomes.values())
    if refused:
        lines.append(f"{refused} blocks found no place, because running requests held the whole cache")
    return lines


def _fail(message: str) -> NoReturn:
    typer.echo(f"vllm-ext: {message}", err=True)
    raise typer.Exit(2)
