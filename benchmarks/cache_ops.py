"""What retention costs: our free list and accounting against vLLM's own block pool, in one process, paired.

    python benchmarks/cache_ops.py                       # everything, about ten minutes
    python benchmarks/cache_ops.py --blocks 30000 --configurations lru+classes --no-schedule

Two real `BlockPool`s, one of them with retention installed, get the same requests of 64 blocks: look up and
touch the cached head, allocate the rest, put it into the prefix cache, give all back. They take turns (A B A B);
a ratio is formed within each pair of neighbouring turns, so what slows the machine slows both. The cost of
finding out what a request's class is (once a request, by the policy) is counted as ours. Then a whole
`schedule()` of a real scheduler with 64 running requests, with and without.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from manifest import manifest
from rich.console import Console
from rich.progress import track
from rich.table import Table

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
            num_prompt_tokens=(REQUEST_BLOCKS - DECODED_BLOCKS) * BLOCK_TOKENS,
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
        clock = perf_counter_ns
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
