"""The CPU offload tier evicts by the policy: vLLM's manager driven with made-up keys, and the real engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tenancy_helpers import BLOCK, FULL_BLOCKS, PROMPT, Engine, policy_env
from tests.engine.v2 import run_in_v1

pytestmark = pytest.mark.engine

DEVICE = 40
"""Blocks of the device's pool."""
CHUNK_BYTES = 65_536
"""Of the tiny model: keys and values of 4 layers, 32 tokens, 2 heads of 64, 2 bytes each."""


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tier:
    """vLLM's `CPUOffloadingManager` with our policy (or stock LRU) in it, and made-up requests."""

    def __init__(self, capacity: int, retention: dict[str, Any] | None, blocks_per_chunk: int = 1) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from vllm_ext.policy import parse_policy
        from vllm_ext_plugin.faults import Faults
        from vllm_ext_plugin.retention import offload, offload_config
        from vllm_ext_plugin.retention.requests import Requests

        self.clock = Clock()
        self.faults = Faults()
        name = "lru"
        extra = {"eviction_policy": offload_config.POLICY, "blocks_per_chunk": blocks_per_chunk}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector="OffloadingConnector", kv_connector_extra_config=extra
            )
        )
        if retention is not None:
            name = offload_config.POLICY
            offload_config.register(config)
        self.manager = CPUOffloadingManager(num_chunks=capacity, cache_policy=name)
        self.tokens_per_chunk = blocks_per_chunk * BLOCK
        self.tiers: Any = None
        if retention is not None:
            tenants = {"acme": {}, "globex": {}, "initech": {}}
            text = json.dumps({"version": 1, "tenancy": {"tenants": tenants}, "retention": retention})
            policy = parse_policy(text, source="test").policy.retention
            assert policy is not None
            self.requests = Requests(
                policy,
                block_size=BLOCK,
                uniform=False,
                model="model",
                identity_of=_identity,
                roles=None,
                tool_tokens=frozenset(),
                block_key=lambda block_hash: block_hash,
            )
            self.tiers = offload.OffloadTiers(config, self.requests, policy.order, self.faults, self.clock)
            assert self.tiers.policies == [self.manager._policy], "the one that was just built"

    def context(self, name: str, tenant: str, keys: list[bytes]) -> Any:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.request import RequestStatus

        from vllm_ext_plugin.retention.offload import CarriedRequest

        context = ReqContext(req_id=name)
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, (index + 1) * self.tokens_per_chunk)
        request = SimpleNamespace(
            request_id=name,
            tenant=tenant,
            num_prompt_tokens=len(keys) * self.tokens_per_chunk,
            prompt_token_ids=[1] * (len(keys) * self.tokens_per_chunk),
            output_token_ids=[],
            num_output_tokens=0,
            lora_request=None,
            sampling_params=SimpleNamespace(extra_args=None),
            pooling_params=None,
            status=RequestStatus.FINISHED_STOPPED,
        )
        context.set_state(CarriedRequest(request))
        self.manager.on_new_request(context)
        return context

    def run(self, tenant: str, keys: list[bytes]) -> list[bytes] | None:
        """A whole request that stores `keys`; returns what was evicted for it."""
        context = self.context(f"{tenant}-{self.clock.now}", tenant, keys)
        stored = self.manager.prepare_store(keys, context)
        if stored is not None:
            self.manager.complete_store(stored.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.clock.now += 1.0
        return None if stored is None else list(stored.evicted_keys)

    def kept(self, keys: list[bytes]) -> int:
        return sum(self.manager._policy.get(key) is not None for key in keys)


def _identity(request: Any) -> Any:
    from vllm_ext.tenancy.identity import IdentifiedBy, Identity, TrustDomain

    return Identity(request.tenant, TrustDomain.declared(request.tenant), IdentifiedBy.PYTHON, "")


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name:>8}{index:024d}".encode() + bytes(4) for index in range(count)]


# Stock LRU


class Twins:
    """The same random transfers in a tier of ours and in vLLM's own."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.dice = random.Random(seed)
        self.ours, self.stock = Tier(capacity, {}), Tier(capacity, None)
        self.pairs: list[tuple[Any, Any]] = []  # running requests' contexts
        self.jobs: list[tuple[str, list[bytes], tuple[Any, Any]]] = []
        self.evicted = 0
        self.number = 0

    def step(self) -> None:
        action = self.dice.random()
        if action < 0.45 or not self.pairs:
            self.start()
        elif action < 0.7 and self.jobs:
            self.transferred(self.jobs.pop(self.dice.randrange(len(self.jobs))))
        elif action < 0.703:
            self.reset()
        else:
            self.finish(self.dice.randrange(len(self.pairs)))
        self.ours.clock.now += self.dice.random()
        ours, stock = self.ours.manager, self.stock.manager
        assert list(ours._policy.chunks) == list(stock._policy.chunks)
        assert ours._num_evictable_cache_chunks == stock._num_evictable_cache_chunks

    def start(self) -> None:
        self.number += 1
        keys = keys_of(f"c{self.dice.randrange(20)}", self.dice.randint(1, 7))
        tenant = self.dice.choice(["acme", "globex"])
        pair = tuple(tier.context(f"r{self.number}", tenant, keys) for tier in (self.ours, self.stock))
        self.pairs.append(pair)
        from vllm.v1.kv_offload.base import LookupResult

        loads = []
        for key in keys:
            found = [
                tier.manager.lookup(key, context)
                for tier, context in zip((self.ours, self.stock), pair, strict=True)
            ]
            assert found[0] is found[1]
            if found[0] is not LookupResult.HIT or self.dice.random() < 0.2:
                break
            loads.append(key)
        if loads:
            for tier, context in zip((self.ours, self.stock), pair, strict=True):
                tier.manager.prepare_load(loads, context)
            self.jobs.append(("load", loads, pair))
        rest = keys[len(loads) :]
        while rest:  # in pieces, as a chunked prefill stores them
            piece, rest = rest[:3], rest[3:]
            outputs = [
                tier.manager.prepare_store(piece, context)
                for tier, context in zip((self.ours, self.stock), pair, strict=True)
            ]
            assert (outputs[0] is None) == (outputs[1] is None)
            if outputs[0] is None:
                continue
            assert outputs[0].evicted_keys == outputs[1].evicted_keys
            assert outputs[0].keys_to_store == outputs[1].keys_to_store
            self.evicted += len(outputs[0].evicted_keys)
            if outputs[0].keys_to_store:
                self.jobs.append(("store", list(outputs[0].keys_to_store), pair))

    def transferred(self, job: tuple[str, list[bytes], tuple[Any, Any]]) -> None:
        kind, keys, pair = job
        success = self.dice.random() > 0.1
        for tier, context in zip((self.ours, self.stock), pair, strict=True):
            if kind == "load":
                tier.manager.complete_load(keys, context)
            else:
                tier.manager.complete_store(keys, context, success)

    def finish(self, index: int) -> None:
        pair = self.pairs.pop(index)
        for tier, context in zip((self.ours, self.stock), pair, strict=True):
            tier.manager.on_request_finished(context)

    def reset(self) -> None:
        for tier in (self.ours, self.stock):
            tier.manager.reset_cache()
        self.jobs.clear()
        self.pairs.clear()


def same_evictions(examples: int, steps: int) -> dict[str, Any]:
    seen = {"evicted": 0, "faults": 0}

    @given(st.integers(0, 2**32), st.integers(5, 40))
    @settings(max_examples=examples, deadline=None, database=None)
    def twins(seed: int, capacity: int) -> None:
        pair = Twins(seed, capacity)
        for _ in range(steps):
            pair.step()
        seen["evicted"] += pair.evicted
        seen["faults"] += sum(pair.ours.faults.counts.values())

    twins()
    return seen


def test_without_classes_it_evicts_exactly_what_vllms_lru_evicts() -> None:
    seen = run_in_v1(same_evictions, 40, 400)
    assert seen["faults"] == 0
    assert seen["evicted"] > 5_000, "the traffic must evict for this test to mean something"


BROKEN = ("insert", "discard", "used", "idle", "hold", "finish", "evict")


def broken(part: str) -> dict[str, Any]:
    """One of the core's methods raises, or chooses wrongly, in the middle of the traffic."""
    from vllm_ext.cache.keyed_blocks import KeyedBlocks

    pair = Twins(7, 20)
    original = getattr(KeyedBlocks, "evict" if part == "wrong victim" else part)
    calls = [0]

    def breaks(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] <= 20:
            return original(self, *args, **kwargs)
        if part != "wrong victim":
            raise RuntimeError("broken on purpose")
        return [next(iter(args[1]))] * args[0]  # a protected key

    setattr(KeyedBlocks, "evict" if part == "wrong victim" else part, breaks)
    steps = 0
    while pair.ours.tiers.on and steps < 5000:
        pair.step()
        steps += 1
    switched_off = not pair.ours.tiers.on
    before = pair.evicted
    for _ in range(500):
        pair.step()
    return {
        "off": switched_off,
        "after": pair.evicted - before,
        "faults": dict(pair.ours.faults.counts),
        "evictions": sum(pair.ours.tiers.evictions().values()),
    }


@pytest.mark.parametrize("part", [*BROKEN, "wrong victim"])
def test_a_fault_of_ours_leaves_vllms_lru_in_place(part: str) -> None:
    result = run_in_v1(broken, part)
    assert result["off"], "the broken part must have been called"
    assert list(result["faults"].values()) == [1]
    assert result["after"] > 100, "evictions went on, the same as the stock twin's"


# The policy's vocabulary

CLASSES = {
    "classes": {"keep": {"priority": 90, "ttl": "60s"}, "junk": {"priority": 0}},
    "rules": [
        {"class": "keep", "tenants": ["acme"], "tokens": f"0..{2 * BLOCK}"},
        {"class": "junk", "tenants": ["globex"]},
    ],
}


def classes(blocks_per_chunk: int) -> dict[str, Any]:
    tier = Tier(10, CLASSES, blocks_per_chunk)
    head = 2 // blocks_per_chunk
    acme, globex, other = keys_of("acme", 4), keys_of("globex", 4), keys_of("other", 4)
    tier.run("acme", acme)
    tier.run("globex", globex)
    result: dict[str, Any] = {"junk goes first": tier.run("initech", other) == globex[::-1][:2]}
    tier.run("initech", keys_of("more", 10 - head))
    result["the protected head stays"] = [tier.kept(acme[:head]), tier.kept(acme[head:])]
    tier.run("acme", acme[:1])  # used again: the time counts from now
    tier.clock.now += 50.0
    tier.run("initech", keys_of("a", 9))
    result["before the end"] = tier.kept(acme[:1])
    tier.clock.now += 60.0
    tier.run("initech", keys_of("b", 10))
    result["after the end"] = tier.kept(acme)
    result["causes"] = sorted({cause for cause, _ in tier.tiers.evictions()})
    result["faults"] = dict(tier.faults.counts)
    return result


@pytest.mark.parametrize(("blocks_per_chunk", "head"), [(1, 2), (2, 1)])
def test_priorities_and_times_hold_in_the_tier(blocks_per_chunk: int, head: int) -> None:
    assert run_in_v1(classes, blocks_per_chunk) == {
        "junk goes first": True,
        "the protected head stays": [head, 0],
        "before the end": 1,
        "after the end": 0,
        "causes": ["capacity", "ttl"],
        "faults": {},
    }


SHARES = {"tenants": {"acme": {"min_share": "30%"}, "globex": {"max_share": "50%"}}}


def shares() -> dict[str, Any]:
    tier = Tier(20, SHARES)
    tier.run("acme", keys_of("acme", 10))
    for number in range(30):
        tier.run("initech", keys_of(f"i{number}", 3))
    flooded = dict(tier.tiers.resident())
    for number in range(30):
        tier.run("globex", keys_of(f"g{number}", 3))
    for number in range(4):
        tier.run("initech", keys_of(f"j{number}", 3))
    over = dict(tier.tiers.resident())
    causes = sorted({cause for cause, _ in tier.tiers.evictions()})
    return {"flooded": flooded, "over": over, "causes": causes, "faults": dict(tier.faults.counts)}


def test_shares_are_of_the_tiers_chunks() -> None:
    result = run_in_v1(shares)
    assert result["faults"] == {}
    assert result["flooded"]["acme"] == 6, "30 % of 20 chunks"
    assert result["over"]["acme"] == 6
    assert result["over"]["globex"] <= 10 and "quota" in result["causes"]


def learned() -> dict[str, Any]:
    """A head that comes back every few seconds, and prompts that never do."""

    def traffic(order: str) -> tuple[int, int, dict[str, int]]:
        tier = Tier(40, {"order": order})
        dice = random.Random(3)
        hits = asked = 0
        for turn in range(600):
            head = keys_of(f"head{dice.randrange(4)}", 5)
            hits += tier.kept(head) if turn > 200 else 0
            asked += len(head) if turn > 200 else 0
            load(tier, head)
            tier.clock.now += 5.0
            for part in range(2):
                tier.run("globex", keys_of(f"{turn}.{part}", 8))
        return hits, asked, dict(tier.faults.counts)

    return {order: traffic(order) for order in ("lru", "reuse")}


def load(tier: Tier, keys: list[bytes]) -> None:
    """A request that loads what is there and stores the rest."""
    context = tier.context(f"head-{tier.clock.now}", "acme", keys)
    here = [key for key in keys if tier.manager._policy.get(key) is not None]
    tier.manager.prepare_load(here, context)
    stored = tier.manager.prepare_store([key for key in keys if key not in here], context)
    tier.manager.complete_load(here, context)
    tier.manager.complete_store(stored.keys_to_store, context)
    tier.manager.on_request_finished(context)


def test_the_reuse_order_learns_what_comes_back_to_the_tier() -> None:
    result = run_in_v1(learned)
    assert result["lru"][2] == result["reuse"][2] == {}
    lru, reuse = result["lru"][0] / result["lru"][1], result["reuse"][0] / result["reuse"][1]
    assert reuse > lru + 0.2


# The real engine


def offloading(model: str, chunks: int, **extra: Any) -> Engine:
    from vllm.config import KVTransferConfig

    from tests.engine import host_worker

    host_worker.install()
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": chunks * CHUNK_BYTES, **extra},
    )
    return Engine(model, num_gpu_blocks_override=DEVICE, kv_transfer_config=transfer)


def flood(engine: Engine, tenant: str, blocks: int, seed: int = 1) -> None:
    """Prompts that nobody sends again."""
    dice = random.Random(seed)
    while blocks > 0:
        engine.reused(tenant, [dice.randrange(5, 500) for _ in range(8 * BLOCK + 5)])
        blocks -= 8


def restored(model: str) -> dict[str, Any]:
    engine = offloading(model, 1000)
    first = engine.output("acme").outputs[0].token_ids
    flood(engine, "globex", 3 * DEVICE)
    again = engine.output("acme")
    retention = engine.scheduler.vllm_ext.retention
    result: dict[str, Any] = {
        "restored": again.num_cached_tokens,
        "same answer": list(again.outputs[0].token_ids) == list(first),
        "policy": type(engine.scheduler.connector.connector_scheduler.manager._policy).__name__,
    }
    tokens = {tuple(labels): count for labels, count in retention.engine.telemetry.totals()["cache_tokens"]}
    result["counted"] = [tokens["acme", "device"], tokens["acme", "restored"]]
    engine.llm.reset_prefix_cache()  # the device's alone
    result["same domain"] = engine.reused("acme-eu")
    engine.llm.reset_prefix_cache()
    result["another domain"] = engine.reused("globex", PROMPT)
    result["unknown"] = engine.reused(None, PROMPT)
    result["resident"] = sorted(retention.offload.resident())
    result["faults"] = dict(engine.scheduler.vllm_ext.faults.counts)
    return result


def test_blocks_are_restored_for_their_own_domain_only(tiny_llama: str, tmp_path: Path) -> None:
    env = policy_env(tmp_path, retention={"tenants": {"acme": {"min_share": "10%"}}})
    result = run_in_v1(restored, tiny_llama, env=env)
    on_the_device, from_the_tier = result.pop("counted")
    assert on_the_device + from_the_tier == FULL_BLOCKS and from_the_tier > 0
    assert result == {
        "restored": FULL_BLOCKS,
        "same answer": True,
        "policy": "OffloadPolicy",
        "same domain": FULL_BLOCKS,
        "another domain": 0,
        "unknown": 0,
        "resident": ["acme", "other"],
        "faults": {},
    }


TEXT = "You are a helpful assistant. Answer the question of the user in a short sentence. " * 6


def restored_prefix(model: str) -> dict[str, Any]:
    engine = offloading(model, 1000)
    tokenizer = engine.llm.get_tokenizer()
    prompts = {
        who: tokenizer.encode(TEXT + f"What does {who} keep private? " * 6) for who in ("acme", "globex")
    }
    engine.reused("acme", prompts["acme"])
    flood(engine, "acme-eu", 3 * DEVICE)
    return {
        "text": len(tokenizer.encode(TEXT)),
        "globex": engine.reused("globex", prompts["globex"]),
        "acme's own": engine.reused("globex", prompts["acme"]),
        "faults": dict(engine.scheduler.vllm_ext.faults.counts),
    }


def test_a_registered_prefix_is_restored_for_every_domain_it_is_shared_with(
    tiny_llama: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    shared = [{"name": "text", "domains": "all", "file": "prompt.txt"}]
    result = run_in_v1(
        restored_prefix, tiny_llama, env=policy_env(tmp_path, retention={}, shared_prefixes=shared)
    )
    head = result["text"] // BLOCK * BLOCK
    assert result["globex"] == result["acme's own"] and result["globex"] in (head, head - BLOCK)
    assert head >= 2 * BLOCK and result["faults"] == {}


TIER = 64


def protected(model: str, **extra: Any) -> dict[str, Any]:
    engine = offloading(model, TIER, **extra)
    engine.output("acme")
    flood(engine, "globex", 3 * TIER)
    engine.llm.reset_prefix_cache()
    return {
        "restored": engine.reused("acme"),
        "policy": type(engine.scheduler.connector.connector_scheduler.manager._policy).__name__,
        "faults": dict(engine.scheduler.vllm_ext.faults.counts),
    }


PROTECT_ACME = {
    "classes": {"keep": {"priority": 90, "ttl": "1h"}},
    "rules": [{"class": "keep", "tenants": ["acme"]}],
}


def test_a_protected_prefix_survives_a_flood_of_the_tier(tiny_llama: str, tmp_path: Path) -> None:
    env = policy_env(tmp_path, retention=PROTECT_ACME)
    kept = run_in_v1(protected, tiny_llama, env=env)
    assert kept == {"restored": FULL_BLOCKS, "policy": "OffloadPolicy", "faults": {}}


def test_an_eviction_policy_that_the_user_chose_stays(tiny_llama: str, tmp_path: Path) -> None:
    env = policy_env(tmp_path, retention=PROTECT_ACME)
    gone = run_in_v1(protected, tiny_llama, env=env, eviction_policy="lru")
    assert gone == {"restored": 0, "policy": "LRUCachePolicy", "faults": {}}
