"""Retention inside vLLM's real block pool and KV cache manager: against stock ones step by step, and against
what must always hold. No model; every walk is seeded.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.v2 import run_in_v1

pytestmark = pytest.mark.engine

BLOCK = 4
TENANTS = 4
FREE_BLOCKS = ("pop", "take_n", "release", "release_blank", "cached_n", "protect_n", "expire", "forget")
CLASSES: dict[str, Any] = {
    "classes": {
        "keep": {"priority": 90, "ttl": "30s"},
        "warm": {"priority": 60, "decoded_priority": 50},
        "bulk": {"priority": 10, "decoded_priority": 0},
    },
    "rules": [
        {"class": "keep", "tenants": ["t0"], "tokens": "0..24"},
        {"class": "warm", "tenants": ["t1"]},
        {"class": "bulk", "tenants": ["t2"]},
    ],
    "tenants": {
        "t0": {"min_share": "20%"},
        "t1": {"max_share": "30%"},
        "t2": {"min_share": "5%", "max_share": "40%"},
    },
}


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def manager(num_blocks: int, **options: Any) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, **options
    )


def retain(pool: Any, section: dict[str, Any], clock: Clock, kv_manager: Any = None) -> Any:
    """Install retention as `RetentionFeature` does, with a policy's section; returns its engine."""
    from vllm_ext.policy import parse_policy
    from vllm_ext.tenancy.identity import DomainKind, IdentifiedBy, Identity, TrustDomain
    from vllm_ext_plugin.faults import Faults
    from vllm_ext_plugin.retention.block_queue import RetentionBlockQueue
    from vllm_ext_plugin.retention.engine import RetentionEngine
    from vllm_ext_plugin.retention.feature import _block_key
    from vllm_ext_plugin.retention.managers import ENGINE, manager_class, pool_class
    from vllm_ext_plugin.retention.requests import Requests

    names = [f"t{index}" for index in range(TENANTS)]
    body = {"version": 1, "tenancy": {"tenants": {name: {} for name in names}}, "retention": section}
    policy = parse_policy(json.dumps(body), source="test", base_dir=Path(), resolve_secrets=False)
    retention = policy.policy.retention
    assert retention is not None
    who = {
        name: Identity(name, TrustDomain(DomainKind.DECLARED, name), IdentifiedBy.API_KEY, "known")
        for name in names
    }
    requests = Requests(
        retention,
        block_size=BLOCK,
        uniform=False,
        model="test",
        identity_of=lambda request: who[request.__dict__["tenant"]],
        roles=None,
        tool_tokens=frozenset(),
        block_key=_block_key,
    )
    engine = RetentionEngine(pool, retention.order, requests, Faults(), clock)
    pool.__dict__[ENGINE] = engine
    pool.__class__ = pool_class(pool.__class__)
    pool.free_block_queue = RetentionBlockQueue(engine, pool.blocks)
    if kv_manager is not None:
        kv_manager.__dict__[ENGINE] = engine
        kv_manager.__class__ = manager_class(kv_manager.__class__)
    return engine


class Walk:
    """The same random requests through one or several managers; they must agree on everything they return.

    Tenants' blocks never match each other's, as salting sees to in a server. `operations` counts blocks
    allocated, cached, touched and freed.
    """

    def __init__(self, managers: list[Any], seed: int, clock: Clock, *, evict: bool = False) -> None:
        self.managers = managers
        self.dice = random.Random(seed)
        self.clock = clock
        self.evict = evict
        self.waiting: list[list[Any]] = []
        self.running: list[list[Any]] = []
        self.families = [[self.words(24) for _ in range(6)] for _ in range(TENANTS)]
        self.parent: dict[bytes, bytes] = {}
        self.done: Counter[str] = Counter()
        self.refused = self.operations = self.count = 0

    def words(self, count: int) -> list[int]:
        return [self.dice.randrange(1000) for _ in range(count)]

    def step(self) -> None:
        self.clock.now += self.dice.choice([0.0, 0.0, 0.3, 5.0])
        action = self.dice.choices(
            ("start", "decode", "finish", "abort", "preempt", "evict", "reset"), (20, 20, 16, 2, 2, 1, 0.05)
        )[0]
        if action == "start" or not self.running:
            self.start()
        elif action == "decode":
            for requests in list(self.running):
                self.decode(requests)
        elif action in ("finish", "abort", "preempt"):
            self.leave(self.running.pop(self.dice.randrange(len(self.running))), action)
        elif action == "evict" and self.evict:
            ids = set(self.dice.sample(range(1, len(self.managers[0].block_pool.blocks)), 3))
            self.done[action] += 1
            for one in self.managers:
                one.evict_blocks(ids)
        elif action == "reset":
            self.drain()
            assert self.agreed([one.reset_prefix_cache() for one in self.managers])
            self.done[action] += 1

    def start(self) -> None:
        if not self.waiting:
            self.waiting.append(self.request())
        requests = self.waiting[0]
        found = [one.get_computed_blocks(r) for one, r in zip(self.managers, requests, strict=True)]
        hits = self.agreed([answer[1] for answer in found])
        self.agreed([answer[0].get_block_ids() for answer in found])
        fit, busy = self.dice.random() < 0.5, self.dice.random() < 0.5
        chunk = self.dice.choice([0, 0, 9])
        slots = []
        for one, request, (blocks, _, _) in zip(self.managers, requests, found, strict=True):
            wanted = request.num_tokens - hits
            slots.append(
                one.allocate_slots(
                    request,
                    min(wanted, chunk) if chunk else wanted,
                    num_new_computed_tokens=hits,
                    new_computed_blocks=blocks,
                    full_sequence_must_fit=fit,
                    has_scheduled_reqs=busy,
                )
            )
            if slots[-1] is not None:
                request.num_computed_tokens = hits + (min(wanted, chunk) if chunk else wanted)
        new = self.agreed([None if slot is None else slot.get_block_ids()[0] for slot in slots])
        self.done["start"] += 1
        if new is None:
            self.refused += 1
            if self.running:
                self.leave(self.running.pop(), self.dice.choice(["finish", "preempt"]))
            return
        self.operations += len(new) + hits // BLOCK + requests[0].num_computed_tokens // BLOCK - hits // BLOCK
        self.running.append(self.waiting.pop(0))

    def request(self) -> list[Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        tenant = self.dice.randrange(TENANTS)
        family = self.dice.choice(self.families[tenant])
        self.count += 1
        prompt = [*family[: self.dice.choice([8, 24])], *self.words(self.dice.randrange(2, 60))]
        if self.dice.random() < 0.1:
            family[8:] = prompt[8:24] or family[8:]
        made = []
        for _ in self.managers:
            request = Request(
                f"r{self.count}", prompt, SamplingParams(max_tokens=64), None, block_hasher=None
            )
            request.__dict__["tenant"] = f"t{tenant}"
            self.hash(request)
            made.append(request)
        return made

    def hash(self, request: Any) -> None:
        hashes = request.block_hashes
        tokens = request.all_token_ids
        while (len(hashes) + 1) * BLOCK <= request.num_tokens:
            start = len(hashes) * BLOCK
            before = hashes[-1] if hashes else request.__dict__["tenant"].encode()
            text = str(tokens[start : start + BLOCK]).encode()
            hashes.append(blake2b(before + text, digest_size=16).digest())
            if len(hashes) > 1:
                self.parent[hashes[-1]] = before

    def decode(self, requests: list[Any]) -> None:
        before = requests[0].num_computed_tokens
        slots = []
        token = self.dice.randrange(1000)
        for one, request in zip(self.managers, requests, strict=True):
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids(token)
                self.hash(request)
            slot = one.allocate_slots(request, request.num_tokens - request.num_computed_tokens)
            slots.append(None if slot is None else slot.get_block_ids()[0])
            if slot is not None:
                request.num_computed_tokens = request.num_tokens
        new = self.agreed(slots)
        self.done["decode"] += 1
        if new is None:
            self.refused += 1
            self.running.remove(requests)
            self.leave(requests, "preempt")
        else:
            self.operations += len(new) + requests[0].num_computed_tokens // BLOCK - before // BLOCK

    def leave(self, requests: list[Any], why: str) -> None:
        from vllm.v1.request import RequestStatus

        self.done[why] += 1
        status = {
            "finish": RequestStatus.FINISHED_STOPPED,
            "abort": RequestStatus.FINISHED_ABORTED,
            "preempt": RequestStatus.PREEMPTED,
        }[why]
        deferred = self.dice.random() < 0.2
        for index, (one, request) in enumerate(zip(self.managers, requests, strict=True)):
            request.status = status
            if index == 0:
                self.operations += len(one.coordinator.get_blocks(request.request_id)[0])
            if deferred:  # as with async scheduling
                one.block_pool.free_blocks(reversed(one.pop_blocks_for_free(request)))
            else:
                one.free(request)
            request.num_computed_tokens = 0
        if why == "preempt":
            self.waiting.insert(0, requests)

    def drain(self) -> None:
        while self.running:
            self.leave(self.running.pop(), "finish")

    def agreed(self, answers: list[Any]) -> Any:
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


def beside_stock(seed: int, steps: int) -> dict[str, Any]:
    """`lru` without classes and a stock manager, step by step."""
    clock = Clock()
    ours, stock = (manager(90, enable_kv_cache_events=True, watermark=0.05) for _ in range(2))
    engine = retain(ours.block_pool, {"order": "lru"}, clock, ours)
    walk = Walk([ours, stock], seed, clock, evict=True)
    events = 0
    for step in range(steps):
        walk.step()
        told = [one.take_events() for one in (ours, stock)]
        assert told[0] == told[1], step
        events += len(told[0])
        free = [
            [block.block_id for block in one.block_pool.free_block_queue.get_all_free_blocks()]
            for one in (ours, stock)
        ]
        assert free[0] == free[1], step
        assert ours.block_pool.get_num_free_blocks() == len(free[0])
    walk.drain()
    return {
        "operations": walk.operations,
        "refused": walk.refused,
        "events": events,
        "kinds": sorted(walk.done),
        "on": engine.on,
        "free": ours.block_pool.get_num_free_blocks(),
        "deferred": len(engine.deferred),
    }


def test_lru_without_classes_is_stock_vllm_step_by_step():
    result = run_in_v1(beside_stock, 3, 12_000, timeout=600)
    assert result["operations"] >= 100_000, result
    assert result["refused"] >= 300, "watermark and full_sequence_must_fit were never in the way"
    assert result["events"] >= 10_000
    assert result["kinds"] == ["abort", "decode", "evict", "finish", "preempt", "reset", "start"]
    assert result["on"] and result["free"] == 89 and result["deferred"] == 0


def check(walk: Walk, engine: Any, *, chains: bool) -> None:
    """What must hold between any two operations."""
    pool = engine.pool
    free = engine.free
    now = walk.clock.now
    unused = sorted(block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null)
    assert pool.get_num_free_blocks() == len(free) == len(unused)
    assert sorted(free) == unused
    cached: dict[bytes, list[Any]] = {}
    resident: Counter[int] = Counter()
    for block in pool.blocks:
        assert bool(free.is_cached[block.block_id]) == (block.block_hash is not None)
        if block.block_hash is not None:
            cached.setdefault(block.block_hash[:-4], []).append(block)
            resident[free.group_of(block.block_id)] += 1
    assert {group: count for group, count in free.resident.items() if count} == resident
    if not chains:
        return
    for block_hash, blocks in cached.items():
        parent = walk.parent.get(block_hash)
        if parent is None:
            continue
        assert parent in cached, "a cached block's parent is cached"
        best = max(effective(free, one.block_id, now) for one in cached[parent])
        for block in blocks:
            if block.ref_cnt == 0 and all(one.ref_cnt == 0 for one in cached[parent]):
                assert effective(free, block.block_id, now) <= best, "priority rises to a child"


def effective(free: Any, block: int, now: float) -> int:
    holding = free.protection[block]
    return max(holding.base, holding.boost if holding.expires > now else 0)


def hold(section: dict[str, Any], seed: int, operations: int, evict: bool, every: int) -> dict[str, Any]:
    clock = Clock()
    ours = manager(120, watermark=0.02)
    engine = retain(ours.block_pool, section, clock, ours)
    walk = Walk([ours], seed, clock, evict=evict)
    steps = 0
    while walk.operations < operations:
        walk.step()
        steps += 1
        if steps % every == 0:
            check(walk, engine, chains=not evict)
    walk.drain()
    check(walk, engine, chains=not evict)
    assert engine.on, engine._faults.counts
    causes: Counter[str] = Counter()
    for (cause, _), count in (engine.evictions + engine.free.evictions).items():
        causes[cause] += count
    taken = ours.block_pool.get_new_blocks(119)
    assert len({block.block_id for block in taken}) == 119
    return {"operations": walk.operations, "steps": sum(walk.done.values()), "causes": dict(causes)}


WALKS = {
    "classes": ({"order": "lru", **CLASSES}, False),
    "reuse": ({"order": "reuse"}, False),
    "reuse, classes": ({"order": "reuse", **CLASSES}, False),
    "invalidated": ({"order": "lru", **CLASSES}, True),
    "reuse, invalidated": ({"order": "reuse", **CLASSES}, True),
    "all at 100": (
        {
            "order": "lru",
            "classes": {"top": {"priority": 100, "ttl": "720h", "decoded_priority": 100}},
            "rules": [{"class": "top"}],
        },
        False,
    ),
}


def hold_all(operations: int) -> dict[str, Any]:
    return {
        name: hold(section, seed, operations, evict, 10)
        for seed, (name, (section, evict)) in enumerate(WALKS.items())
    }


def test_what_must_hold_holds_over_a_million_block_operations():
    result = run_in_v1(hold_all, 180_000, timeout=900)
    assert sum(one["operations"] for one in result.values()) >= 1_000_000
    assert all(one["steps"] >= 10_000 for one in result.values()), result
    for name in ("classes", "reuse, classes"):
        assert {"capacity", "quota", "ttl"} <= set(result[name]["causes"]), name


def broken_anywhere(seed: int) -> dict[str, Any]:
    """Each method of FreeBlocks raises once, at a random call, before or after it did its work."""
    from vllm_ext.cache.free_blocks import FreeBlocks

    dice = random.Random(seed)
    tried: Counter[str] = Counter()
    for name in FREE_BLOCKS:
        for attempt in range(12):
            clock = Clock()
            ours = manager(60)
            engine = retain(ours.block_pool, {"order": dice.choice(["lru", "reuse"]), **CLASSES}, clock, ours)
            walk = Walk([ours], dice.randrange(1 << 30), clock, evict=True)
            original = getattr(FreeBlocks, name)
            left = [dice.randrange(1, 8 if name == "forget" else 60)]

            def failing(
                self: Any,
                *args: Any,
                _call: Any = original,
                _left: Any = left,
                _late: bool = attempt % 2 == 0,
                **kwargs: Any,
            ) -> Any:
                _left[0] -= 1
                if _left[0] == 0 and not _late:
                    raise RuntimeError("a bug of ours")
                result = _call(self, *args, **kwargs)
                if _left[0] == 0:
                    raise RuntimeError("a bug of ours")
                return result

            setattr(FreeBlocks, name, failing)
            try:
                for _ in range(400):
                    walk.step()
                    pool = ours.block_pool
                    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
                    unused = [
                        block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null
                    ]
                    assert sorted(free) == unused, (name, attempt)
                    assert pool.get_num_free_blocks() == len(unused), (name, attempt)
            finally:
                setattr(FreeBlocks, name, original)
            walk.drain()
            assert ours.block_pool.get_num_free_blocks() == 59
            tried[name] += not engine.on
    return dict(tried)


def test_no_block_is_lost_or_doubled_wherever_our_code_fails():
    result = run_in_v1(broken_anywhere, 5, timeout=600)
    for name in FREE_BLOCKS:
        assert result[name] >= 6, (name, result)


def junk(seed: int) -> dict[str, Any]:
    """A steadily used prefix, one that gets 100 hits at one time and none later, then a scan."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    clock = Clock()
    ours = manager(400)
    engine = retain(ours.block_pool, {"order": "reuse"}, clock, ours)
    walk = Walk([ours], seed, clock)
    dice = walk.dice
    steady, popular = walk.words(32), walk.words(32)
    count = [0]

    def begin(tokens: list[int]) -> tuple[Any, int]:
        count[0] += 1
        request = Request(f"q{count[0]}", tokens, SamplingParams(max_tokens=1), None, block_hasher=None)
        request.__dict__["tenant"] = "t0"
        walk.hash(request)
        blocks, hits, _ = ours.get_computed_blocks(request)
        slots = ours.allocate_slots(
            request, len(tokens) - hits, num_new_computed_tokens=hits, new_computed_blocks=blocks
        )
        assert slots is not None
        return request, hits

    def serve(tokens: list[int]) -> int:
        from vllm.v1.request import RequestStatus

        request, hits = begin(tokens)
        request.status = RequestStatus.FINISHED_STOPPED
        ours.free(request)
        return hits

    for _ in range(150):
        clock.now += 5.0
        serve([*steady, *walk.words(9)])
        clock.now += 5.0
        serve(walk.words(dice.randrange(12, 40)))
    serve([*popular, 1])
    together = [begin([*popular, index, index]) for index in range(100)]
    assert all(hits == 32 for _, hits in together)
    for request, _ in together:
        ours.free(request)
    for _ in range(3):
        clock.now += 5.0
        serve([*steady, *walk.words(9)])
    lost: dict[str, int] = {}
    order = {"steady": steady, "junk": popular}
    hashes = {}
    for name, tokens in order.items():
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=None)
        request.__dict__["tenant"] = "t0"
        walk.hash(request)
        hashes[name] = request.block_hashes[-1]
    for scanned in range(600):
        for name, block_hash in hashes.items():
            if name not in lost and ours.block_pool.get_cached_block(block_hash, [0]) is None:
                lost[name] = scanned
        clock.now += 0.2
        serve(walk.words(32))
    return {"lost": lost, "on": engine.on, "evictions": engine.free.order.evictions}


def test_a_hundred_hits_at_once_do_not_make_junk_outlive_a_steadily_used_prefix(
    small: dict[str, Any],
):
    result = small["junk"]
    assert result["on"]
    assert "junk" in result["lost"], result
    assert result["lost"].get("steady", 10**9) > result["lost"]["junk"], result


def shared_prefix() -> dict[str, Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from vllm_ext_plugin.block_hashes import SPLIT, Split

    clock = Clock()
    ours = manager(60)
    engine = retain(ours.block_pool, {"order": "lru", **CLASSES}, clock, ours)
    walk = Walk([ours], 1, clock)
    request = Request("s", list(range(30)), SamplingParams(max_tokens=1), None, block_hasher=None)
    request.__dict__["tenant"] = "t1"
    request.__dict__[SPLIT] = Split(18, "salt")
    walk.hash(request)
    ours.allocate_slots(request, 30)
    blocks = ours.coordinator.get_blocks("s")[0]
    names = engine.requests.names
    return {
        "groups": [names[engine.free.group_of(block.block_id)] for block in blocks if block.block_hash],
        "resident": {names[group]: count for group, count in engine.free.resident.items()},
    }


def test_blocks_of_a_shared_prefix_belong_to_nobody(small: dict[str, Any]):
    result = small["shared_prefix"]
    assert result["groups"] == ["other"] * 4 + ["t1"] * 3
    assert result["resident"] == {"other": 4, "t1": 3}


def pools(seed: int, operations: int) -> dict[str, Any]:
    """`BlockPool` alone, stock and ours: the same ids for the same calls."""
    from vllm.v1.core.block_pool import BlockPool

    sides = [BlockPool(300, True, BLOCK) for _ in range(2)]
    clock = Clock()
    engine = retain(sides[0], {"order": "lru"}, clock)
    dice = random.Random(seed)
    families = [[dice.randbytes(16) for _ in range(12)] for _ in range(20)]
    running: list[tuple[Any, list[list[Any]]]] = []
    done: Counter[str] = Counter()
    while sum(done.values()) < operations:
        action = dice.choices(("start", "finish", "abort", "evict", "reset"), (10, 8, 2, 0.5, 0.02))[0]
        clock.now += 0.01
        if action == "start" and sides[0].get_num_free_blocks() >= 20:
            head = dice.choice(families)[: dice.randrange(13)]
            request = SimpleNamespace(
                block_hashes=[*head, *(dice.randbytes(16) for _ in range(dice.randrange(1, 8)))],
                tenant="t0", prompt_token_ids=None, num_prompt_tokens=len(head) * BLOCK, lora_request=None,
                sampling_params=None, pooling_params=None, kv_hints=None, session_id=None, status=None,
                output_token_ids=(), num_output_tokens=0,
            )  # fmt: skip
            chains = []
            for pool in sides:
                hits = []
                for block_hash in request.block_hashes:
                    found = pool.get_cached_block(block_hash, [0])
                    if found is None:
                        break
                    hits.append(found[0])
                pool.touch(hits)
                chains.append([*hits, *pool.get_new_blocks(len(request.block_hashes) + 1 - len(hits))])
                pool.cache_full_blocks(request, chains[-1], len(hits), len(request.block_hashes), BLOCK, 0)
            ids = [[block.block_id for block in chain] for chain in chains]
            assert ids[0] == ids[1]
            running.append((request, chains))
            done["touch"] += len(hits)
            done["allocate"] += len(ids[0]) - len(hits)
            done["cache"] += len(request.block_hashes) - len(hits)
        elif action in ("finish", "abort") and running:
            _, chains = running.pop(dice.randrange(len(running)))
            for pool, chain in zip(sides, chains, strict=True):
                pool.free_blocks(reversed(chain))
            done["free"] += len(chains[0])
        elif action == "evict":
            ids = set(dice.sample(range(1, 300), 4))
            for pool in sides:
                pool.evict_blocks(ids)
            done["evict"] += 4
        elif action == "reset":
            for _, chains in running:
                for pool, chain in zip(sides, chains, strict=True):
                    pool.free_blocks(reversed(chain))
            running.clear()
            assert all(pool.reset_prefix_cache() for pool in sides)
            done["reset"] += 1
    order = [[block.block_id for block in pool.free_block_queue.get_all_free_blocks()] for pool in sides]
    assert order[0] == order[1]
    return {"done": dict(done), "on": engine.on}


def test_the_pool_gives_the_same_blocks_as_stock_over_1e5_operations(small: dict[str, Any]):
    result = small["pools"]
    assert result["on"]
    assert set(result["done"]) == {"touch", "allocate", "cache", "free", "evict", "reset"}
    assert result["done"]["allocate"] >= 100_000


def small_cases() -> dict[str, Any]:
    return {"pools": pools(9, 400_000), "shared_prefix": shared_prefix(), "junk": junk(2)}


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """Of several cases: importing vLLM takes longer than they do."""
    result: dict[str, Any] = run_in_v1(small_cases)
    return result
