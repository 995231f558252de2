"""Hit ratio over capacity as a picture. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_ext.cache.replay.study import Row


class PlotError(RuntimeError):
    """The plot cannot be drawn; the message says what to do."""


def load_matplotlib() -> Any:
    """`matplotlib.figure`, which needs no display.

    Raises:
        PlotError: it is not installed.
    """
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'vllm-ext[plot]'") from error


def plot(rows: Sequence[Row], path: Path) -> None:
    """One panel for each trace, one line for each order.

    Raises:
        PlotError: matplotlib is not installed, or cannot write `path` (its suffix names the format).
    """
    figures = load_matplotlib()
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = figures.Figure(figsize=(5.5 * len(traces), 4.0), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        mine = sorted((row for row in rows if row.trace == trace), key=lambda row: row.blocks)
        for order in mine[0].outcomes:
            panel.plot(
                [row.blocks for row in mine],
                [row.outcomes[order].hit_ratio for row in mine],
                marker="o",
                label=order,
            )
        panel.set(
            title=trace, xlabel="capacity (blocks)", ylabel="prefix hit ratio", xscale="log", ylim=(0, None)
        )
        panel.grid(alpha=0.3)
        panel.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write {path}: {error}") from error
