"""What tenancy adds to one request, in microseconds: identify and stamp in the front end, verify and salt in
the engine.

    python benchmarks/tenancy_overhead.py [--requests 20000] [--json benchmarks/results/tenancy_overhead.json]

Runs the real objects (vLLM's `EngineCoreRequest`, our middleware, stamper, salter) in one process, without
HTTP and without a model. The budget is 150 us at the median for the sum of all four steps.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.manifest import manifest
from vllm_ext.policy import PolicyStore
from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.engine_side import EngineTenancy
from vllm_ext.tenancy.gateway import SIGNATURE_HEADER, TENANT_HEADER, TIMESTAMP_HEADER, sign
from vllm_ext.tenancy.salt import Salter
from vllm_ext.tenancy.shared_prefix import RegisteredPrefix, SharedPrefixes
from vllm_ext.tenancy.stamp import STAMP_KEY, Stamper

BUDGET_US = 150.0
SECRET = b"a secret that only this benchmark has"
GATEWAY_SECRET = b"gateway secret of this benchmark"
TENANTS = 1000
PROMPT_TOKENS = 2048
PREFIX_TOKENS = 512
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 8000}]}).encode()


def policy_file(folder: Path) -> Path:
    keys = "\n".join(
        f"    t{i}: {{api_keys: ['sha256:{hashlib.sha256(f'key-number-{i}'.encode()).hexdigest()}']}}"
        for i in range(TENANTS)
    )
    secret = folder / "gateway"
    secret.write_bytes(GATEWAY_SECRET)
    path = folder / "policy.yaml"
    path.write_text(
        "version: 1\ntenancy:\n  unknown: isolate\n"
        f"  gateway: {{secret: 'file:{secret}', replay_window: 1h}}\n  tenants:\n{keys}\n"
    )
    return path


def build(folder: Path) -> tuple[Any, EngineTenancy]:
    from vllm_ext_plugin import front_end as front_ends

    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            tokenizer="org/model",
            tokenizer_revision=None,
            dtype="bfloat16",
            quantization=None,
        ),
        lora_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    store = PolicyStore(policy_file(folder))
    front_end = front_ends.FrontEnd(config, store, SECRET)
    from vllm_ext_plugin.model_identity import model_identity

    salter = Salter(SECRET, model_identity(config, None))
    prefixes = [RegisteredPrefix(f"p{i}", None, (i, *range(PREFIX_TOKENS - 1))) for i in range(10)]
    engine = EngineTenancy(
        Stamper(SECRET), salter, Authenticator(store.current), SharedPrefixes(prefixes, salter, 16)
    )
    return front_end, engine


def request(number: int, tokens: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=f"cmpl-{number:032x}-0-abcdef01",
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=16, extra_args={"a": 1}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def headers_of(how: str, number: int) -> list[tuple[bytes, bytes]]:
    common = [
        (b"host", b"x"),
        (b"content-type", b"application/json"),
        (b"user-agent", b"benchmark"),
        (b"accept", b"*/*"),
    ]
    if how == "api_key":
        return [*common, (b"authorization", f"Bearer key-number-{number % TENANTS}".encode())]
    if how == "unknown":
        return [*common, (b"authorization", f"Bearer wrong-{number}".encode())]
    timestamp = f"{time.time():.6f}"
    signature = sign(
        GATEWAY_SECRET,
        method="POST",
        target="/v1/chat/completions",
        tenant="t1",
        timestamp=timestamp,
        body=BODY,
    )
    signed = [(TENANT_HEADER, "t1"), (TIMESTAMP_HEADER, timestamp), (SIGNATURE_HEADER, signature)]
    return [*common, *((name.encode(), value.encode()) for name, value in signed)]


async def measure(how: str, requests: int, front_end: Any, engine: EngineTenancy) -> list[dict[str, float]]:
    from vllm_ext_plugin import stamping
    from vllm_ext_plugin.middleware import IdentityMiddleware

    rows: list[dict[str, float]] = []
    marks: dict[str, float] = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        marks["identified"] = time.perf_counter()
        stamping.stamp(front_end, scope["engine_request"], in_process=False)
        marks["stamped"] = time.perf_counter()

    middleware = IdentityMiddleware(application, front_end)

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    tokens = [3, *range(PREFIX_TOKENS - 1), *range(PROMPT_TOKENS - PREFIX_TOKENS)]
    for number in range(requests + requests // 10):
        engine_request = request(number, tokens)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions", "query_string": b"", "headers": headers_of(how, number),
            "engine_request": engine_request,
        }  # fmt: skip
        start = time.perf_counter()
        await middleware(scope, receive, None)
        sent = time.perf_counter()
        ruling = engine.rule(
            engine_request.sampling_params.extra_args[STAMP_KEY],
            engine_request.request_id,
            None,
            engine_request.prompt_token_ids,
        )
        ruled = time.perf_counter()
        assert (ruling.shared is not None) == (how != "unknown")
        if number >= requests // 10:  # the first tenth is warm-up
            rows.append(
                {
                    "identify": (marks["identified"] - start) * 1e6,
                    "stamp and salt": (marks["stamped"] - marks["identified"]) * 1e6,
                    "verify and rule": (ruled - sent) * 1e6,
                }
            )
            rows[-1]["sum"] = sum(rows[-1].values())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--json", type=Path, help="write the result with its manifest here")
    arguments = parser.parse_args()
    table = Table(
        "who",
        "step",
        "p50 us",
        "p90 us",
        "p99 us",
        title=f"tenancy per request, {arguments.requests} requests each",
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        front_end, engine = build(Path(folder))
        for how in ("api_key", "gateway", "unknown"):
            rows = asyncio.run(measure(how, arguments.requests, front_end, engine))
            for step in rows[0]:
                cuts = statistics.quantiles((row[step] for row in rows), n=100)
                results.setdefault(how, {})[step] = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
                table.add_row(how, step, *(f"{cuts[at]:.1f}" for at in (49, 89, 98)))
    Console().print(table)
    worst = max(result["sum"]["p50"] for result in results.values())
    print(
        f"worst median {worst:.1f} us, budget {BUDGET_US:.0f} us: {'within' if worst < BUDGET_US else 'OVER'}"
    )
    if arguments.json:
        about = manifest(
            benchmark="tenancy_overhead", requests=arguments.requests, tenants=TENANTS,
            prompt_tokens=PROMPT_TOKENS,
            shared_prefix_tokens=PREFIX_TOKENS, body_bytes=len(BODY), budget_us=BUDGET_US,
        )  # fmt: skip
        arguments.json.write_text(json.dumps({"manifest": about, "microseconds": results}, indent=2) + "\n")
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
