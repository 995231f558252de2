"""Policy errors and explanations on a terminal, and as plain lines where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ext.cli.prompt_classes import ClassRow
from vllm_ext.policy import ExplainRow, PolicyError


def print_error(error: PolicyError, console: Console) -> None:
    """``file:line:column: field: message (hint)`` lines, each with its source line and a caret."""
    for problem in error.problems:
        place, _, _ = problem.located(error.source).partition(f": {problem}")
        line = Text(place + ": ", style="bold")
        line.append(f"{problem.field}: " if problem.field else "", style="cyan")
        line.append(problem.message, style="red")
        line.append(f" ({problem.hint})" if problem.hint else "", style="not bold")
        _print(console, line)
        if problem.excerpt is not None:
            _print(console, Text(f"    {problem.excerpt.text}", style="dim"))
            _print(console, Text(f"    {' ' * problem.excerpt.caret}^", style="red"))


def print_rows(rows: Sequence[ExplainRow], source: str, console: Console) -> None:
    """A table on a terminal; ``setting: value [file:line]`` lines elsewhere, for grep."""
    if not console.is_terminal:
        for row in rows:
            place = f"{source}:{row.position.line}" if row.position else "default"
            _print(console, Text(f"{row.setting}: {row.value} [{place}]"))
        return
    table = Table(title=Text(source), title_justify="left")
    table.add_column("setting", style="cyan")
    table.add_column("value", overflow="fold")
    table.add_column("line", justify="right")
    for row in rows:
        table.add_row(Text(row.setting), Text(row.value), str(row.position.line) if row.position else "–")
    console.print(table)


def print_classes(rows: Sequence[ClassRow], source: str, console: Console) -> None:
    """The retention classes of a prompt: a table on a terminal, lines with ``[file:line]`` elsewhere."""
    if not console.is_terminal:
        for row in rows:
            place = f"{source}:{row.position.line}" if row.position else "default"
            text = (
                f"tokens {row.tokens} ({row.part}): class {row.class_name}, priority {row.priority} {row.ttl}"
            )
            _print(console, Text(f"{text} [{place}]"))
        return
    table = Table(title=Text("retention of the prompt"), title_justify="left")
    table.add_column("tokens", style="cyan")
    for name in ("part", "class"):
        table.add_column(name, overflow="fold")
    table.add_column("priority", justify="right")
    table.add_column("how long")
    table.add_column("line", justify="right")
    for row in rows:
        place = str(row.position.line) if row.position else "–"
        table.add_row(row.tokens, Text(row.part), Text(row.class_name), row.priority, row.ttl, place)
    console.print(table)


def _print(console: Console, text: Text) -> None:
    # soft_wrap: a line stays a line, whatever reads it; Text: brackets in names are not markup.
    console.print(text, soft_wrap=True, highlight=False)
