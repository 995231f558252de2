"""`make demo`: two tenants send the same prompts; each reuses its own, neither the other's.

python tools/demo.py [--rounds 3] [--without-plugin]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from server import (
    DEMO_KEYS,
    DEMO_POLICY,
    SERVED_MODEL,
    Server,
    ServerFailed,
    serve_arguments,
    stop_signals_interrupt,
)
from vllm_ext.policy import load_policy

SENTENCES = (
    "The grey heron stands in the shallows and waits for the fish to forget that it is there.",
    "A bridge is at its most honest in winter, when nobody crosses it for pleasure.",
    "Every harbour keeps a list of the ships that left, and no list of the reasons.",
    "The baker's clock runs four hours ahead of the town's, and the town has never noticed.",
    "Snow on the railway line makes the timetable a work of fiction, read aloud with conviction.",
)


@dataclass(frozen=True)
class Answer:
    """What one streamed chat request told: prompt and reused tokens, and seconds to the first token."""

    prompt_tokens: int
    reused_tokens: int
    ttft: float


@dataclass(frozen=True)
class Pair:
    """One tenant's first request with a prompt (cold for it) and its repeat (warm)."""

    cold: Answer
    warm: Answer


def prompt(number: int) -> list[dict[str, str]]:
    """A chat of about 600 tokens; different numbers differ from the first block on: rounds share nothing."""
    text = " ".join(SENTENCES[(number + line) % len(SENTENCES)] for line in range(30))
    system = f"{number}: you are reader number {number} of a short book."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{text}\nWhich sentence is the saddest?"},
    ]


def ask(client: httpx.Client, key: str, messages: list[dict[str, str]]) -> Answer:
    """Sends one streamed request. Raises httpx.HTTPError, or RuntimeError on an incomplete answer."""
    body = {
        "model": SERVED_MODEL,
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    ) as response:
        if response.is_error:
            response.read()
            raise RuntimeError(f"the server answered {response.status_code}: {response.text.strip()[:300]}")
        return read_stream(response.iter_lines(), began)


def read_stream(lines: Iterable[str], began: float) -> Answer:
    """Reads a chat completion's event stream to its usage record."""
    ttft, usage = None, None
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[len("data: ") :])
        if "error" in event:
            raise RuntimeError(f"the server broke off: {event['error']}")
        # The first event carries the role only; the first one with text is the first token.
        if ttft is None and any(choice["delta"].get("content") for choice in event["choices"]):
            ttft = time.perf_counter() - began
        usage = event.get("usage") or usage
    if ttft is None or usage is None:
        raise RuntimeError("the stream ended without a token or without its usage")
    # vLLM leaves the details out where nothing was reused.
    details = usage.get("prompt_tokens_details") or {}
    return Answer(usage["prompt_tokens"], details.get("cached_tokens") or 0, ttft)


@dataclass(frozen=True)
class Shared:
    """The demo policy's shared prefix: its length in tokens, how many of them the second tenant reused."""

    name: str
    tokens: int
    reused_tokens: int


def drive(client: httpx.Client, rounds: int) -> dict[str, list[Pair]]:
    """In each round the tenants, one after the other, send the same prompt twice."""
    pairs: dict[str, list[Pair]] = {tenant: [] for tenant in DEMO_KEYS}
    for key in DEMO_KEYS.values():  # the first request of a server's life pays for lazy initialisation
        ask(client, key, prompt(0))
    for number in range(1, rounds + 1):
        for tenant, key in DEMO_KEYS.items():
            cold, warm = ask(client, key, prompt(number)), ask(client, key, prompt(number))
            pairs[tenant].append(Pair(cold, warm))
    return pairs


def drive_shared(client: httpx.Client) -> Shared:
    """One tenant sends the registered prefix with a question, the other then with another question."""
    tenancy = load_policy(DEMO_POLICY).policy.tenancy
    assert tenancy is not None, "the demo's policy is about tenants"
    prefix = next(prefix for prefix in tenancy.shared_prefixes if prefix.messages)
    system = [{"role": message.role, "content": message.content} for message in prefix.messages or ()]
    body = {"model": SERVED_MODEL, "messages": system, "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=body).raise_for_status().json()["count"]
    first, second = DEMO_KEYS.values()
    ask(client, first, [*system, {"role": "user", "content": "How do I reset my password?"}])
    answer = ask(client, second, [*system, {"role": "user", "content": "Where do I find my invoices?"}])
    return Shared(prefix.name, tokens, answer.reused_tokens)


def show(console: Console, pairs: dict[str, list[Pair]], shared: Shared | None) -> bool:
    """Prints the table and what it shows; True when repeats were reused and nothing private crossed over."""
    table = Table(title="Each prompt twice by each tenant, the same prompts (TTFT: median)")
    table.add_column("tenant")
    for column in ("prompt tokens", "reused tokens", "H_tokens", "cold TTFT", "warm TTFT"):
        table.add_column(column, justify="right")
    for tenant, own in pairs.items():
        tokens = statistics.mean(pair.warm.prompt_tokens for pair in own)
        reused = statistics.mean(pair.warm.reused_tokens for pair in own)
        times = (
            statistics.median(times) for times in zip(*((p.cold.ttft, p.warm.ttft) for p in own), strict=True)
        )
        cells = [
            f"{tokens:.0f}",
            f"{reused:.0f}",
            f"{reused / tokens:.2f}",
            *(f"{time * 1e3:.0f} ms" for time in times),
        ]
        table.add_row(tenant, *cells)
    console.print(table)
    first, second = pairs
    crossed = sum(pair.cold.reused_tokens for pair in pairs[second])
    console.print(
        f"{second}'s first requests were {first}'s prompts word for word, already cached for {first}: "
        f"{crossed} private tokens reused."
    )
    problems = []
    if not all(pair.warm.reused_tokens for own in pairs.values() for pair in own):
        problems.append("a tenant's own repeat reused nothing: prefix caching is not at work")
    if crossed:
        problems.append(f"not isolated: {second} can find out what {first} sent")
    if shared is not None:
        console.print(
            f"The shared prefix {shared.name} ({shared.tokens} tokens), computed for {first}, then sent by "
            f"{second} with another question: {shared.reused_tokens} tokens reused."
        )
        if not 0 < shared.reused_tokens <= shared.tokens:
            problems.append(f"the shared prefix {shared.name} is not shared as the policy says")
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    return not problems


def run(console: Console, rounds: int, plugin: bool) -> bool:
    """Starts the server, drives it, stops it; True as `show`. The log is kept only where something failed."""
    arguments = serve_arguments(DEMO_POLICY) if plugin else serve_arguments(plugins=None)
    with tempfile.NamedTemporaryFile(prefix="vllm_ext-demo-", suffix=".log", delete=False) as handle:
        log = Path(handle.name)
    try:
        with console.status("starting vLLM ...") as status, Server(arguments, log=log) as server:
            server.wait_ready(
                on_wait=lambda waited: status.update(f"starting vLLM ... {waited:.0f} s (log: {log})")
            )
            status.update("two tenants at work ...")
            try:
                with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
                    pairs = drive(client, rounds)
                    shared = drive_shared(client) if plugin else None
            except (httpx.HTTPError, RuntimeError) as error:
                raise server.failure(str(error)) from error
            status.update("stopping vLLM ...")
    except KeyboardInterrupt:
        log.unlink()
        raise
    log.unlink()
    return show(console, pairs, shared)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="prompts per tenant (default 3)")
    parser.add_argument("--without-plugin", action="store_true", help="plain vLLM, to see the difference")
    arguments = parser.parse_args()
    console = Console()
    try:
        with stop_signals_interrupt():
            return 0 if run(console, arguments.rounds, not arguments.without_plugin) else 1
    except (ServerFailed, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
