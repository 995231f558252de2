"""What retention costs: our free list and accounting against vLLM's own block pool, in one process, paired.

    python benchmarks/cache_ops.py                       # everything, about two minutes
    python benchmarks/cache_ops.py --blocks 30000 --configurations lru+classes --no-schedule

Two real `BlockPool`s, one of them with retention installed, get the same requests of 64 blocks: look up and
touch the cached head, allocate the rest, put it into the prefix cache, give all back. They take turns (A B A
B); a ratio is formed within each pair of neighbouring turns, so what slows the machine slows both. The cost
of finding out what a request's class is (once a request, by the policy) is counted as ours. Then a whole
`schedule()` of a real scheduler with 64 running requests, with and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.manifest import manifest

REQUEST_BLOCKS = 64
DECODED_BLOCKS = 8
BLOCK_TOKENS = 16
OPERATIONS = ("lookup", "arrive", "touch", "allocate", "cache", "free")
TARGETS = {"lru": 1.3, "lru+classes": 1.3, "reuse": 3.0}
SCHEDULE_TARGET = 1.03
POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"order": "lru"},
    "lru+classes": {
        "order": "lru",
        "classes": {"keep": {"priority": 90, "ttl": "60s"}, "bulk": {"priority": 10, "decoded_priority": 0}},
        "rules": [
            {"class": "keep", "tenants": ["t0", "t1"], "tokens": "0..512"},
            {"class": "bulk", "tenants": ["t2", "t3"]},
        ],
        "tenants": {
            "t0": {"min_share": "20%"},
            "t1": {"max_share": "30%"},
            "t2": {"min_share": "5%", "max_share": "40%"},
        },
    },
    "reuse": {"order": "reuse"},
}
TENANTS = 5


class Request(SimpleNamespace):
    """What the pool and retention read of vLLM's `Request`."""


class Traffic:
    """Requests whose heads are drawn from families, some much more popular than others. Seeded: a second one
    yields equal requests.
    """

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.dice = random.Random(seed)
        count = max(4, num_blocks // 40)
        self.families = [[self.hash() for _ in range(REQUEST_BLOCKS // 2)] for _ in range(count)]
        self.count = 0

    def hash(self) -> bytes:
        return self.dice.randbytes(32)

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        self.count += 1
        family = int(len(self.families) * self.dice.random() ** 3)
        head = self.families[family]
        hashes = [*head, *(self.hash() for _ in range(REQUEST_BLOCKS - len(head)))]
        from vllm.v1.request import RequestStatus

        return Request(
            request_id=str(self.count),
            tenant=f"t{family % TENANTS}",
            block_hashes=hashes,
            num_prompt_tokens=(REQUEST_BLOCKS - DECODED_BLOCKS) * BLOCK_TOKENS - self.dice.randrange(200),
            prompt_token_ids=None,
            output_token_ids=(),
            num_output_tokens=DECODED_BLOCKS * BLOCK_TOKENS,
            lora_request=None,
            sampling_params=None,
            pooling_params=None,
            kv_hints=None,
            session_id=None,
            status=RequestStatus.FINISHED_STOPPED,
        )


@dataclass
class Turn:
    """Nanoseconds of one turn, by operation, and whole requests'."""

    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0))
    handled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0))
    requests: list[int] = field(default_factory=list)


class Side:
    """One pool and the traffic that it gets."""

    def __init__(self, num_blocks: int, retention: dict[str, Any] | None, seed: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Any = BlockPool(num_blocks + 1, True, BLOCK_TOKENS)
        self.engine = install(self.pool, retention) if retention is not None else None
        self.traffic = Traffic(num_blocks, seed)
        self.running: deque[tuple[Request, list[Any]]] = deque()
        self.concurrent = min(64, max(1, num_blocks // (3 * REQUEST_BLOCKS)))

    def turn(self, requests: list[Request]) -> Turn:
        turn = Turn()
        clock = thread_time_ns
        pool, engine, spent, handled = self.pool, self.engine, turn.spent, turn.handled
        for request in requests:
            start = clock()
            hits = []
            for block_hash in request.block_hashes:
                found = pool.get_cached_block(block_hash, [0])
                if not found:
                    break
                hits.append(found[0])
            looked = clock()
            if engine is not None:
                engine.guarded("retention_arrive", engine.arrive, request, SimpleNamespace(blocks=(hits,)))
                engine.asking = request
            arrived = clock()
            pool.touch(hits)
            touched = clock()
            missing = REQUEST_BLOCKS - len(hits)
            blocks = [*hits, *pool.get_new_blocks(missing)]
            allocated = clock()
            pool.cache_full_blocks(request, blocks, len(hits), REQUEST_BLOCKS, BLOCK_TOKENS, 0)
            if engine is not None:
                engine.asking = None
            cached = clock()
            whole = cached - start
            self.running.append((request, blocks))
            if len(self.running) > self.concurrent:
                leaving, blocks = self.running.popleft()
                before = clock()
                if engine is not None:
                    engine.departing = leaving
                pool.free_blocks(reversed(blocks))
                if engine is not None:
                    engine.departing = None
                freed = clock() - before
                whole += freed
                spent["free"] += freed
                handled["free"] += len(blocks)
            spent["lookup"] += looked - start
            spent["arrive"] += arrived - looked
            spent["touch"] += touched - arrived
            spent["allocate"] += allocated - touched
            spent["cache"] += cached - allocated
            handled["lookup"] += len(hits) + 1
            handled["arrive"] += REQUEST_BLOCKS
            handled["touch"] += len(hits)
            handled["allocate"] += missing
            handled["cache"] += missing
            turn.requests.append(whole)
        return turn


def install(pool: Any, retention: dict[str, Any]) -> Any:
    """Retention over `pool` as `RetentionFeature` sets it up, by a policy section; returns its engine."""
    from vllm_ext.policy import parse_policy
    from vllm_ext.tenancy.identity import DomainKind, IdentifiedBy, Identity, TrustDomain
    from vllm_ext_plugin.faults import Faults
    from vllm_ext_plugin.retention.block_queue import RetentionBlockQueue
    from vllm_ext_plugin.retention.engine import RetentionEngine
    from vllm_ext_plugin.retention.feature import _block_key
    from vllm_ext_plugin.retention.managers import ENGINE, pool_class
    from vllm_ext_plugin.retention.requests import Requests

    body = {
        "version": 1,
        "tenancy": {"tenants": {f"t{index}": {} for index in range(TENANTS)}},
        "retention": retention,
    }
    policy = parse_policy(json.dumps(body), source="benchmark", base_dir=Path(), resolve_secrets=False)
    identities = {
        f"t{index}": Identity(
            f"t{index}", TrustDomain(DomainKind.DECLARED, f"t{index}"), IdentifiedBy.API_KEY, "known"
        )
        for index in range(TENANTS)
    }
    assert policy.policy.retention is not None
    requests = Requests(
        policy.policy.retention,
        block_size=BLOCK_TOKENS,
        uniform=False,
        model="benchmark",
        identity_of=lambda request: identities[request.tenant],
        roles=None,
        tool_tokens=frozenset(),
        block_key=_block_key,
    )
    engine = RetentionEngine(pool, policy.policy.retention.order, requests, Faults())
    pool.__dict__[ENGINE] = engine
    pool.__class__ = pool_class(pool.__class__)
    pool.free_block_queue = RetentionBlockQueue(engine, pool.blocks)
    return engine


def compare(name: str, num_blocks: int, requests: int, pairs: int, seed: int = 7) -> dict[str, Any]:
    """us per block and ratios of one configuration at one size."""
    sides = [Side(num_blocks, None, seed), Side(num_blocks, POLICIES[name], seed)]
    # Warm: both pools are full and evict.
    warm = 2 * num_blocks // REQUEST_BLOCKS + 100
    while warm > 0:
        for side in sides:
            side.turn([next(side.traffic) for _ in range(min(warm, 500))])
        warm -= 500
    turns: list[list[Turn]] = [[], []]
    for _ in range(pairs):
        for index, side in enumerate(sides):
            batch = [next(side.traffic) for _ in range(requests)]
            gc.collect()
            gc.freeze()
            turns[index].append(side.turn(batch))
    engine = sides[1].engine
    assert engine is not None and engine.on, "retention switched itself off"
    ratios = [sum(b.requests) / sum(a.requests) for a, b in zip(*turns, strict=True)]
    row: dict[str, Any] = {
        "configuration": name,
        "blocks": num_blocks,
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "target": TARGETS[name],
    }
    for label, side_turns in zip(("stock", "ours"), turns, strict=True):
        whole = sorted(ns for turn in side_turns for ns in turn.requests)
        row[label] = {
            "us_per_block": statistics.median(
                sum(turn.requests) / len(turn.requests) / REQUEST_BLOCKS / 1000 for turn in side_turns
            ),
            "p99_us_per_request": whole[int(0.99 * len(whole))] / 1000,
            "highest_us_per_request": whole[-1] / 1000,
            "us_per_block_by_operation": {
                operation: statistics.median(
                    turn.spent[operation] / max(1, turn.handled[operation]) / 1000 for turn in side_turns
                )
                for operation in OPERATIONS
            },
        }
    return row


def memory(name: str, num_blocks: int) -> dict[str, float]:
    """Bytes per block, as tracemalloc counts what is allocated by building it and by filling and evicting it
    twice. `stock` is a whole stock pool, its hash map included.
    """
    seed = 3
    Side(100, POLICIES[name], seed)  # what is imported and cached once for all
    found = {}
    for label, retention in (("stock", None), ("with retention", POLICIES[name])):
        gc.collect()
        tracemalloc.start()
        side = Side(num_blocks, retention, seed)
        for _ in range(2 * num_blocks // REQUEST_BLOCKS + 50):
            side.turn([next(side.traffic)])
        side.traffic.families.clear()
        gc.collect()
        found[label] = tracemalloc.get_traced_memory()[0] / num_blocks
        tracemalloc.stop()
        del side
    return {
        "stock_bytes_per_block": found["stock"],
        "added_bytes_per_block": found["with retention"] - found["stock"],
    }


def schedule_step(pairs: int, steps: int) -> dict[str, Any]:
    """A whole `schedule()` with 64 running requests that decode, on vLLM's scheduler: us, stock and with each
    policy. Requests of 1024 tokens of prompt; nothing runs them, tokens are made up.
    """
    names = ("stock", *POLICIES)
    schedulers = {name: Decoding(POLICIES.get(name)) for name in names}
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(20):
        for one in schedulers.values():
            one.steps(steps)
    for _ in range(pairs):
        for name, one in schedulers.items():
            gc.collect()
            spent[name].append(one.steps(steps))
    rows = {"stock": {"us": statistics.median(spent["stock"])}}
    for name in POLICIES:
        ratios = [a / b for a, b in zip(spent[name], spent["stock"], strict=True)]
        rows[name] = {
            "us": statistics.median(spent[name]),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "target": SCHEDULE_TARGET,
        }
    return {"running_requests": RUNNING, "pairs": pairs, "steps_per_turn": steps, "rows": rows}


RUNNING = 64
PROMPT_TOKENS = 1024
ANSWER_TOKENS = 512


class Decoding:
    """A scheduler whose requests are replaced as they end, so that 64 run at any time."""

    def __init__(self, retention: dict[str, Any] | None) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            ParallelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        blocks = 6 * RUNNING * (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        model = ModelConfig(model=str(tiny_model()), dtype="float32", skip_tokenizer_init=True)
        config = VllmConfig(
            model_config=model,
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            parallel_config=ParallelConfig(),
            scheduler_config=SchedulerConfig(
                max_num_seqs=RUNNING,
                max_num_batched_tokens=16 * PROMPT_TOKENS,
                max_model_len=model.max_model_len,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        self.dice = random.Random(5)
        self.count = 0
        if retention is not None:
            from vllm_ext_plugin.retention.managers import ENGINE, manager_class

            kv = self.scheduler.kv_cache_manager
            kv.__dict__[ENGINE] = install(kv.block_pool, retention)
            kv.__class__ = manager_class(kv.__class__)
        for _ in range(RUNNING):
            self.add(self.dice.randrange(1, ANSWER_TOKENS))

    def add(self, answer: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request as VllmRequest

        if not self.count:
            init_none_hash(sha256)
        self.count += 1
        tenant = self.dice.randrange(TENANTS)
        head = [tenant + 3] * (PROMPT_TOKENS // 2)
        tail = [self.dice.randrange(3, 200) for _ in range(PROMPT_TOKENS - len(head))]
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = VllmRequest(str(self.count), [*head, *tail], params, None, block_hasher=hasher)
        request.__dict__["tenant"] = f"t{tenant}"
        self.scheduler.add_request(request)

    def steps(self, count: int) -> float:
        """Mean us of CPU time of `schedule()`."""
        from vllm.v1.outputs import ModelRunnerOutput

        spent = 0
        for _ in range(count):
            start = thread_time_ns()
            output = self.scheduler.schedule()
            spent += thread_time_ns() - start
            ids = list(output.num_scheduled_tokens)
            tokens = [
                [7]
                if self.scheduler.requests[i].num_computed_tokens >= self.scheduler.requests[i].num_tokens
                else []
                for i in ids
            ]
            self.scheduler.update_from_output(
                output,
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={name: index for index, name in enumerate(ids)},
                    sampled_token_ids=tokens,
                ),
            )
            while len(self.scheduler.requests) < RUNNING:
                self.add(ANSWER_TOKENS)
        return spent / count / 1000


def tiny_model() -> Path:
    """A folder with a model configuration and nothing else."""
    import tempfile

    folder = Path(tempfile.gettempdir()) / "vllm_ext_cache_ops_model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 4,
                "vocab_size": 256,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
            }
        )
    )
    return folder


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(
        title=f"us of CPU per block of a request ({REQUEST_BLOCKS} blocks), medians of paired turns"
    )
    for heading in (
        "order", "blocks", "stock", "ours", "ratio", "lowest to highest", "target", "p99 us/request",
        "stock's",
        "added bytes/block",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in result["pool"]:
        met = row["ratio"] <= row["target"]
        table.add_row(
            row["configuration"],
            f"{row['blocks']:,}",
            f"{row['stock']['us_per_block']:.2f}",
            f"{row['ours']['us_per_block']:.2f}",
            f"[{'green' if met else 'red'}]{row['ratio']:.2f}[/]",
            f"{row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f}",
            f"{row['target']:.2f}",
            f"{row['ours']['p99_us_per_request']:.0f}",
            f"{row['stock']['p99_us_per_request']:.0f}",
            f"{row['memory']['added_bytes_per_block']:.0f}" if "memory" in row else "",
        )
    console.print(table)
    detail = Table(title="the same by operation, us per block handled (arrive: per block of the request)")
    for heading in ("order", "blocks", *OPERATIONS):
        detail.add_column(heading, justify="right")
    for row in result["pool"]:
        stock, ours = (row[side]["us_per_block_by_operation"] for side in ("stock", "ours"))
        cells = [f"{ours[name]:.2f} / {stock[name]:.2f}" for name in OPERATIONS]
        detail.add_row(row["configuration"], f"{row['blocks']:,}", *cells)
    console.print(detail)
    if "schedule" in result:
        steps = Table(title=f"us of CPU per schedule() step, {RUNNING} running requests")
        for heading in ("order", "us", "ratio", "lowest to highest", "target"):
            steps.add_column(heading, justify="right")
        for name, row in result["schedule"]["rows"].items():
            if name == "stock":
                steps.add_row(name, f"{row['us']:.0f}", "", "", "")
                continue
            met = row["ratio"] <= row["target"]
            steps.add_row(
                name,
                f"{row['us']:.0f}",
                f"[{'green' if met else 'red'}]{row['ratio']:.3f}[/]",
                f"{row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f}",
                f"{row['target']:.2f}",
            )
        console.print(steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="1000,30000,300000", help="pool sizes, with commas")
    parser.add_argument("--configurations", default=",".join(POLICIES), help="with commas")
    parser.add_argument("--requests", type=int, default=400, help="per turn")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--no-schedule", action="store_true")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "cache_ops.json")
    arguments = parser.parse_args()
    console = Console()
    sizes = [int(size) for size in arguments.blocks.split(",")]
    cases = [(name, size) for size in sizes for name in arguments.configurations.split(",")]
    pool = []
    for name, size in track(cases, "pools", console=console):
        row = compare(name, size, arguments.requests, arguments.pairs)
        if size <= MEMORY_UP_TO:
            row["memory"] = memory(name, size)
        pool.append(row)
    result: dict[str, Any] = {"pool": pool}
    if not arguments.no_schedule:
        result["schedule"] = schedule_step(3 * arguments.pairs, 20)
    result["manifest"] = manifest(
        what=__doc__.splitlines()[0] if __doc__ else "",
        clock="time.thread_time_ns: CPU time of the thread, so that other processes' turns do not count",
        load_average=os.getloadavg(),
        requests_per_turn=arguments.requests,
        pairs=arguments.pairs,
        policies=POLICIES,
    )
    show(console, result)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {arguments.json.name}")


MEMORY_UP_TO = 30_000
"""Blocks; tracemalloc makes larger pools too slow, and bytes per block do not depend on the size by then."""

if __name__ == "__main__":
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
