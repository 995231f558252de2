"""``vllm-ext policy``: check, explain, schema, digest. Exit status 2 when the input is wrong."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from vllm_ext.cache.wishes import parse_wish
from vllm_ext.cli.prompt import PromptError
from vllm_ext.cli.prompt_classes import explain_prompt, read_shape
from vllm_ext.cli.render import print_classes, print_error, print_rows
from vllm_ext.policy import (
    PolicyError,
    PolicySnapshot,
    explain_tenant,
    key_digest,
    load_policy,
    policy_json_schema,
)
from vllm_ext.policy.references import ReferenceProblem, checked_key, strip_line_break

app = typer.Typer(
    no_args_is_help=True, help="Check and explain policy files.", pretty_exceptions_show_locals=False
)

NoSecrets = Annotated[
    bool,
    typer.Option(
        "--no-secrets",
        help="Do not look up env: and file: references (for a machine that lacks the secrets).",
    ),
]


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Policy files.", show_default=False)],
    no_secrets: NoSecrets = False,
) -> None:
    """Check policy files; list all errors at once.

    The digest is the one that GET /vllm_ext/v1/policy shows of a running server.
    """
    sound = True
    for file in files:
        snapshot = _load(file, no_secrets)
        sound = sound and snapshot is not None
        if snapshot is not None:
            summary = f"{_summary(snapshot)}{_retention_summary(snapshot)}"
            typer.echo(f"{file}: ok ({summary}), digest {snapshot.digest}")
    if not sound:
        raise typer.Exit(2)


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(help="The policy file.", show_default=False)],
    tenant: Annotated[
        str | None, typer.Option(help="The tenant; by default the one the key belongs to.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="VAR", help="Environment variable with an API key to identify; never printed."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show the retention classes of this prompt: plain text, or JSON with chat messages.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model's folder, to count the prompt's tokens.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Without a tokenizer: take the prompt to have N tokens."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model's served name, for rules that ask.")] = "",
    adapter: Annotated[str | None, typer.Option(help="The LoRA adapter, for rules that ask.")] = None,
    wish: Annotated[
        str | None, typer.Option(metavar="JSON", help="What the client asks for, as in vllm_xargs.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="vLLM's --block-size, for shared prefixes.")] = 16,
    no_secrets: NoSecrets = False,
) -> None:
    """What a tenant gets, and which line says so; with a prompt, also how each part of it is kept."""
    if (prompt_file is not None) and (tokenizer is None) == (tokens is None):
        _fail("to count the prompt's tokens give either --tokenizer DIR (the model's folder) or --tokens N")
    if tenant is None and api_key_env is None:
        _fail("name a tenant with --tenant, or an environment variable that holds its key with --api-key-env")
    digest = _key_digest_from_env(api_key_env) if api_key_env is not None else None
    snapshot = _load(file, no_secrets)
    if snapshot is None:
        raise typer.Exit(2)
    rows = explain_tenant(
        snapshot, tenant, key_source=f"${api_key_env}" if digest else None, key_digest=digest
    )
    print_rows(rows, str(file), Console())
    if prompt_file is None:
        return
    if tenant is None and digest is not None:
        tenant = snapshot.key_digests.get(digest)
    asked, reasons = parse_wish(wish)
    try:
        shape = read_shape(snapshot, tenant, prompt_file, tokenizer, tokens, block_size)
    except PromptError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot read {prompt_file}: {error.strerror}")
    shape = replace(shape, model=model, adapter=adapter, wish=asked)
    if snapshot.policy.retention is None:
        typer.echo("the policy has no `retention`: every block has one priority, in vLLM's own order")
    class_rows, more = explain_prompt(snapshot, shape)
    print_classes(class_rows, str(file), Console())
    for reason in dict.fromkeys([*reasons, *more]):
        typer.echo(f"the client's wish is not followed as asked: {reason}")


@app.command()
def schema(out: Annotated[Path | None, typer.Option(help="Write to this file.")] = None) -> None:
    """Print the JSON Schema of policy files, for editors."""
    text = json.dumps(policy_json_schema(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        _fail(f"cannot write {out}: {error.strerror}")


@app.command()
def digest(
    env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable that holds the key.")
    ] = None,
) -> None:
    """Print the line to paste into a policy for an API key, read from standard input or --env.

    The key is never an argument: arguments show up in process lists and shell histories.
    """
    if env is not None:
        found = _key_digest_from_env(env)
    elif sys.stdin.isatty():
        found = _digest_of(typer.prompt("API key", hide_input=True, err=True).encode(), "the prompt")
    else:
        found = _digest_of(strip_line_break(sys.stdin.buffer.read()), "standard input")
    typer.echo(f"sha256:{found.hex()}")


def _load(file: Path, no_secrets: bool) -> PolicySnapshot | None:
    try:
        return load_policy(file, resolve_secrets=not no_secrets)
    except PolicyError as error:
        print_error(error, Console(stderr=True))
        return None


def _summary(snapshot: PolicySnapshot) -> str:
    tenancy = snapshot.policy.tenancy
    if tenancy is None:
        return "no tenancy: one cache for all"
    counts = [
        (len(tenancy.tenants), "tenant"),
        (len(snapshot.domains), "trust domain"),
        (len(tenancy.shared_prefixes), "shared prefix"),
    ]
    plurals = {"shared prefix": "shared prefixes"}
    words = [f"{count} {noun if count == 1 else plurals.get(noun, noun + 's')}" for count, noun in counts]
    return ", ".join([*words, f"unknown: {tenancy.unknown}"])


def _retention_summary(snapshot: PolicySnapshot) -> str:
    retention = snapshot.policy.retention
    if retention is None:
        return ""
    count = len(retention.rules)
    return f"; retention: {retention.order}, {count} rule{'s' if count != 1 else ''}"


def _key_digest_from_env(variable: str) -> bytes:
    value = os.environ.get(variable)
    if value is None:
        _fail(f"environment variable {variable} is not set")
    return _digest_of(strip_line_break(os.fsencode(value)), f"${variable}")


def _digest_of(key: bytes, source: str) -> bytes:
    try:
        return key_digest(checked_key(key, source))
    except ReferenceProblem as error:
        _fail(f"{error.message} ({error.hint})")


def _fail(message: str) -> NoReturn:
    typer.echo(f"vllm-ext: {message}", err=True)
    raise typer.Exit(2)
