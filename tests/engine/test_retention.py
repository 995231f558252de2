"""What stays cached follows the policy, on the real engine with a small pool; V1 and V2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tenancy_helpers import BLOCK, FULL_BLOCKS, PROMPT, Engine, policy_env
from tests.engine.v2 import ENGINE_ENV, RUNNERS, run_in_v1

pytestmark = pytest.mark.engine

POOL = 40
"""Blocks, one of them vLLM's null block."""
PROTECT_ACME = {
    "classes": {"keep": {"priority": 90, "ttl": "1h"}},
    "rules": [{"class": "keep", "tenants": ["acme"]}],
}


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def small(model: str, **options: Any) -> Engine:
    return Engine(model, num_gpu_blocks_override=POOL, **options)


def flood(engine: Engine, tenant: str | None, pools: float = 3.0, seed: int = 1) -> None:
    """Prompts that nobody sends again, `pools` times as many blocks as there are."""
    dice = random.Random(seed)
    blocks = 0
    while blocks < pools * POOL:
        length = dice.randrange(4, 9)
        engine.reused(tenant, [dice.randrange(5, 500) for _ in range(length * BLOCK + 5)])
        blocks += length


def flooded(model: str) -> dict[str, Any]:
    engine = small(model)
    result: dict[str, Any] = {"cold": engine.reused("acme"), "warm": engine.reused("acme")}
    flood(engine, "globex")
    result["after the flood"] = engine.reused("acme")
    extension = getattr(engine.scheduler, "vllm_ext", None)
    if extension is not None and extension.retention is not None:
        pool = engine.scheduler.kv_cache_manager.block_pool
        result["free"] = pool.get_num_free_blocks()
        result["listed"] = len(set(extension.retention.engine.free))
        result["faults"] = dict(extension.faults.counts)
        result["reset"] = engine.llm.reset_prefix_cache()
        result["after reset"] = [engine.reused("acme"), engine.reused("acme")]
    return result


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_protected_prefix_survives_a_flood_of_three_times_the_pool(
    runner: str, tiny_llama: str, tmp_path: Path
):
    result = RUNNERS[runner](flooded, tiny_llama, env=policy_env(tmp_path, retention=PROTECT_ACME))
    assert result == {
        "cold": 0,
        "warm": FULL_BLOCKS,
        "after the flood": FULL_BLOCKS,
        "free": POOL - 1,
        "listed": POOL - 1,
        "faults": {},
        "reset": True,
        "after reset": [0, FULL_BLOCKS],
    }


def test_stock_vllm_forgets_it(tiny_llama: str, tmp_path: Path):
    without = run_in_v1(flooded, tiny_llama, env=policy_env(tmp_path))
    assert without == {"cold": 0, "warm": FULL_BLOCKS, "after the flood": 0}


def scanned(model: str) -> dict[str, Any]:
    engine = small(model)
    system = PROMPT[: 4 * BLOCK]
    clock = Clock()
    engine.scheduler.vllm_ext.retention.engine.clock = clock
    dice = random.Random(3)

    def asked() -> int:
        clock.now += 5.0
        return engine.reused("acme", [*system, *[dice.randrange(5, 500) for _ in range(20)]])

    for turn in range(60):  # ordinary traffic: a system prompt that comes back, and questions that do not
        asked()
        if turn % 2:
            clock.now += 5.0
            engine.reused("globex", [dice.randrange(5, 500) for _ in range(3 * BLOCK)])
    before = asked()
    blocks = 0
    while blocks < 3 * POOL:
        clock.now += 0.2
        engine.reused("globex", [dice.randrange(5, 500) for _ in range(8 * BLOCK + 3)])
        blocks += 8
    free = engine.scheduler.vllm_ext.retention.engine.free
    return {
        "before": before,
        "after": asked(),
        "evictions": free.order.evictions,
        "faults": dict(engine.scheduler.vllm_ext.faults.counts),
    }


def test_a_scan_does_not_evict_a_system_prompt_that_comes_back(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path, retention={"order": "reuse"})
    result = run_in_v1(scanned, tiny_llama, env=env)
    assert result["faults"] == {}
    assert result["before"] == 4 * BLOCK
    assert result["after"] == 4 * BLOCK
    lru = run_in_v1(scanned, tiny_llama, env=policy_env(tmp_path, retention={"order": "lru"}))
    assert lru["before"] == 4 * BLOCK and lru["after"] == 0


def shared_pool(model: str) -> dict[str, Any]:
    engine = small(model)
    retention = engine.scheduler.vllm_ext.retention
    groups, free = retention.requests.groups, retention.engine.free
    flood(engine, "globex", 2.0)
    result: dict[str, Any] = {"globex alone": free.resident[groups["globex"]]}
    flood(engine, "acme", 2.0, seed=2)
    result["acme"] = free.resident[groups["acme"]]
    low = POOL
    dice = random.Random(5)
    for _ in range(40):
        engine.reused("globex", [dice.randrange(5, 500) for _ in range(6 * BLOCK)])
        low = min(low, free.resident[groups["acme"]])
    result["acme's lowest"] = low
    causes = {cause for cause, _ in free.evictions}
    return {**result, "causes": sorted(causes), "faults": dict(engine.scheduler.vllm_ext.faults.counts)}


def test_a_floor_holds_and_is_free_for_others_while_it_is_not_used(tiny_llama: str, tmp_path: Path):
    env = policy_env(
        tmp_path, retention={"tenants": {"acme": {"min_share": "40%"}, "globex": {"min_share": "0%"}}}
    )
    result = run_in_v1(shared_pool, tiny_llama, env=env)
    floor = int(0.4 * POOL)
    assert result["faults"] == {}
    assert result["globex alone"] >= POOL - 8, "nobody else is here: globex may use it all"
    assert result["acme"] > floor
    assert result["acme's lowest"] == floor


def capped(model: str) -> dict[str, Any]:
    engine = small(model)
    engine.reused("acme")
    flood(engine, "globex")
    retention = engine.scheduler.vllm_ext.retention
    return {
        "acme": engine.reused("acme"),
        "evictions": {f"{cause} {group}": n for (cause, group), n in retention.engine.free.evictions.items()},
        "groups": retention.requests.groups,
    }


def test_a_tenant_above_its_cap_evicts_its_own_blocks_first(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path, retention={"tenants": {"globex": {"max_share": "50%"}}})
    result = run_in_v1(capped, tiny_llama, env=env)
    assert result["acme"] == FULL_BLOCKS, "globex evicted only its own"
    assert result["evictions"][f"quota {result['groups']['globex']}"] > POOL


def timed(model: str) -> dict[str, Any]:
    engine = small(model)
    clock = Clock()
    engine.scheduler.vllm_ext.retention.engine.clock = clock
    engine.reused("acme")
    result = {}
    for hours, name in ((0.9, "within"), (0.9, "within, from its last use"), (1.1, "after")):
        clock.now += hours * 3600
        flood(engine, "globex", seed=int(hours * 10))
        result[name] = engine.reused("acme")
    return result


def test_a_protection_lasts_for_its_ttl_from_the_last_use(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(timed, tiny_llama, env=policy_env(tmp_path, retention=PROTECT_ACME))
    assert result == {"within": FULL_BLOCKS, "within, from its last use": FULL_BLOCKS, "after": 0}


def everything_pinned(model: str) -> dict[str, Any]:
    engine = small(model)
    flood(engine, "acme", 4.0)
    flood(engine, "globex", 4.0, seed=2)
    pool = engine.scheduler.kv_cache_manager.block_pool
    return {"free": pool.get_num_free_blocks(), "faults": dict(engine.scheduler.vllm_ext.faults.counts)}


def test_everything_at_the_highest_priority_still_runs(tiny_llama: str, tmp_path: Path):
    pinned = {"classes": {"top": {"priority": 100, "ttl": "10h"}}, "rules": [{"class": "top"}]}
    result = run_in_v1(everything_pinned, tiny_llama, env=policy_env(tmp_path, retention=pinned))
    assert result == {"free": POOL - 1, "faults": {}}


def wishes(model: str) -> dict[str, Any]:
    import json

    engine = small(model)
    wish = {"ranges": [{"start": 0, "end": FULL_BLOCKS, "priority": 100, "duration_ms": 3_600_000}]}
    engine.reused("acme", **{"vllm_ext.retention": json.dumps(wish)})
    flood(engine, "globex")
    kept = engine.reused("acme")
    junk = [
        engine.reused("acme", **{"vllm_ext.retention": value}) for value in (7, "{", [1], {"ranges": "x"})
    ]
    return {"kept": kept, "junk": junk, "counted": dict(engine.scheduler.vllm_ext.retention.requests.wishes)}


def test_a_clients_wish_is_heard_within_its_bounds(tiny_llama: str, tmp_path: Path):
    allowed = {"client_wishes": {"allow": "clamped", "max_priority": 60, "max_ttl": "10m"}}
    heard = run_in_v1(wishes, tiny_llama, env=policy_env(tmp_path, retention=allowed))
    assert heard["kept"] == FULL_BLOCKS
    assert heard["counted"]["priority_clamped"] == heard["counted"]["ttl_clamped"] == 1
    assert heard["counted"]["unreadable"] >= 2 and heard["junk"] == [FULL_BLOCKS] * 4
    ignored = run_in_v1(wishes, tiny_llama, env=policy_env(tmp_path, retention={}))
    assert ignored["kept"] == 0 and ignored["counted"]["not_allowed"] == 1


def speculating(model: str, speculate: bool) -> list[int]:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = small(model, **({"speculative_config": config} if speculate else {}))
    dice = random.Random(11)
    reused = []
    prompts = [[dice.randrange(5, 60) for _ in range(dice.randrange(40, 250))] for _ in range(6)]
    for _ in range(30):
        reused.append(engine.reused(dice.choice(["acme", "globex"]), dice.choice(prompts)))
    return reused


def test_speculation_changes_no_hit(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path, retention={**PROTECT_ACME, "order": "reuse"})
    plain = run_in_v1(speculating, tiny_llama, False, env=env)
    assert sum(plain) > 0
    assert run_in_v1(speculating, tiny_llama, True, env=env) == plain


def broken(model: str) -> dict[str, Any]:
    from vllm_ext.cache.free_blocks import FreeBlocks

    result = {}
    for name in ("pop", "take_n", "release", "release_blank", "cached_n", "protect_n"):
        engine = small(model)
        engine.reused("acme")
        original = getattr(FreeBlocks, name)

        def boom(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a bug of ours")

        setattr(FreeBlocks, name, boom)
        flood(engine, "globex", 1.5)
        engine.reused("acme")
        warm = engine.reused("acme")
        setattr(FreeBlocks, name, original)
        pool = engine.scheduler.kv_cache_manager.block_pool
        free = pool.free_block_queue.get_all_free_blocks()
        result[name] = [
            warm,
            pool.get_num_free_blocks(),
            len({block.block_id for block in free}),
            sum(engine.scheduler.vllm_ext.faults.counts.values()),
        ]
    return result


def test_a_crash_in_our_code_hands_back_to_stock_lru_and_loses_no_block(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(broken, tiny_llama, env=policy_env(tmp_path, retention=PROTECT_ACME), timeout=500)
    for name, (warm, free, distinct, faults) in result.items():
        assert (warm, free, distinct) == (FULL_BLOCKS, POOL - 1, POOL - 1), name
        assert faults >= 1, name


def retention_alone(model: str) -> dict[str, Any]:
    engine = small(model)
    engine.reused(None)
    flood(engine, None)
    return {"kept": engine.reused(None), "salt": engine.seen[-1].cache_salt}


def test_retention_works_without_tenancy(tiny_llama: str, tmp_path: Path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "version: 1\nretention:\n  classes: {keep: {priority: 90}}\n"
        "  rules: [{class: keep, tokens: 0..224}]\n"
    )
    env = {"VLLM_PLUGINS": "vllm_ext", "VLLM_EXT_POLICY": str(path)}
    assert set(ENGINE_ENV) >= {"VLLM_PLUGINS"}
    result = run_in_v1(retention_alone, tiny_llama, env=env)
    assert result["salt"] is None
