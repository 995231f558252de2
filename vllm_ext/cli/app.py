"""The command line's root: one sub-command per part of the project."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_ext import __version__
from vllm_ext.cli import policy
from vllm_ext.cli.replay import replay

# Tracebacks with local variables would print secrets.
main = typer.Typer(
    name="vllm-ext",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Tools for the vllm_ext plugin of vLLM.",
)
main.add_typer(policy.app, name="policy")
main.command()(replay)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-ext {__version__}")
        raise typer.Exit


@main.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Tools for the vllm_ext plugin of vLLM."""
