"""What the engine counts of its cache, and the block trace that it writes of itself."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tenancy_helpers import BLOCK, FULL_BLOCKS, Engine, policy_env
from tests.engine.v2 import run_in_v1
from vllm_ext.cache.replay.simulate import replay
from vllm_ext.cache.traces import read_native

pytestmark = pytest.mark.engine

POOL = 40
"""Blocks, one of them vLLM's null block."""


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def asked(engine: Engine) -> dict[str, Any]:
    """What the front end fetches when `/metrics` is asked for: through the engine's own method, as JSON."""
    core = engine.llm.llm_engine.engine_core.engine_core
    return json.loads(core.vllm_ext_call("metrics", ""))


def flat(report: dict[str, Any]) -> dict[str, float]:
    return {" ".join([kind, *labels]): value for kind, entries in report.items() for labels, value in entries}


def counted(model: str) -> dict[str, Any]:
    engine = Engine(model, num_gpu_blocks_override=POOL)
    retention = engine.scheduler.vllm_ext.retention.engine
    retention.clock = clock = Clock()
    engine.reused("acme")  # 7 blocks, and 9 tokens more
    clock.now += 10
    engine.reused("acme")  # hits them all
    clock.now += 100
    dice = random.Random(1)
    for _ in range(9):  # 36 blocks of 4: acme's are protected for the first hour, globex evicts its own
        engine.reused("globex", [dice.randrange(5, 500) for _ in range(4 * BLOCK + 1)])
    clock.now += 4000
    result: dict[str, Any] = {"expired": asked(engine)}
    for _ in range(9):
        engine.reused(None, [dice.randrange(5, 500) for _ in range(4 * BLOCK + 1)])
    result["after"] = asked(engine)
    engine.llm.reset_prefix_cache()
    result["reset"] = asked(engine)
    result["faults"] = dict(engine.scheduler.vllm_ext.faults.counts)
    return result


RETENTION = {
    "classes": {"keep": {"priority": 90, "ttl": "1h"}},
    "rules": [{"class": "keep", "tenants": ["acme"]}],
    "tenants": {"acme": {"min_share": "10%", "max_share": "50%"}},
}


def test_a_known_sequence_gives_known_numbers(tiny_llama: str, tmp_path: Path) -> None:
    result = run_in_v1(counted, tiny_llama, env=policy_env(tmp_path, retention=RETENTION))
    assert result["faults"] == {}
    totals, gauges = (flat(result["expired"][part]) for part in ("totals", "gauges"))
    assert totals["cache_tokens acme device"] == FULL_BLOCKS
    assert totals["cache_tokens acme computed"] == FULL_BLOCKS + 2 * 9
    assert totals["cache_tokens globex computed"] == 9 * (4 * BLOCK + 1)
    assert totals["cache_tokens globex restored"] == 0
    # 39 blocks: 7 are acme's, and of globex's 36 some died for the rest and for its requests' last tokens.
    assert "cache_evictions acme capacity" not in totals
    evicted = totals["cache_evictions globex capacity"]
    assert 4 <= evicted <= 6
    assert gauges["cache_resident_blocks globex 35"] == 36 - evicted
    assert gauges["cache_resident_blocks acme 35"] == 7, "its hour is over"
    assert gauges["cache_resident_bytes acme 35"] == 7 * gauges["cache_resident_bytes globex 35"] / (
        36 - evicted
    )
    per_block = 2 * 4 * 2 * 64 * 2 * BLOCK  # keys and values, layers, KV heads, head size, bfloat16
    assert gauges["cache_resident_bytes acme 35"] == 7 * per_block
    assert gauges["cache_pool_blocks"] == POOL and gauges["cache_retention_on"] == 1
    assert gauges["cache_share_resident_blocks acme"] == 7
    assert gauges["cache_share_min_blocks acme"] == 4 and gauges["cache_share_max_blocks acme"] == 20
    assert totals["cache_reuse_distance acme 3"] == 7 and totals["cache_reuse_distance_sum acme"] == 70
    assert totals["cache_eviction_age globex 0"] == evicted, "the clock stood still"
    assert totals["cache_victims lru lru"] >= evicted

    after = flat(result["after"]["totals"])
    assert after["cache_evictions acme ttl"] == 3, "the floor of 4 blocks holds"
    assert after["cache_eviction_age acme 8"] == 3 and after["cache_eviction_age_sum acme"] == 3 * 4100
    assert after["cache_evictions globex capacity"] > evicted
    assert after["cache_tokens (unknown) computed"] == 9 * (4 * BLOCK + 1)

    reset, none = (flat(result["reset"][part]) for part in ("totals", "gauges"))
    assert reset["cache_evictions acme reset"] == 4
    assert not any(name.startswith("cache_resident") for name in none)
    assert reset["cache_victims lru lru"] == after["cache_victims lru lru"], "a reset forgets no count"


def learned(model: str) -> dict[str, Any]:
    engine = Engine(model, num_gpu_blocks_override=POOL)
    engine.scheduler.vllm_ext.retention.engine.clock = clock = Clock()
    dice = random.Random(2)
    prompts = [[dice.randrange(5, 500) for _ in range(6 * BLOCK)] for _ in range(12)]
    for _ in range(80):
        clock.now += 3.0
        engine.reused("acme", dice.choice(prompts))
    report = asked(engine)
    return {**flat(report["totals"]), **flat(report["gauges"])}


def test_the_estimate_of_reuse_and_its_switch_are_shown(tiny_llama: str, tmp_path: Path) -> None:
    shown = run_in_v1(learned, tiny_llama, env=policy_env(tmp_path, retention={"order": "reuse"}))
    assert shown["cache_estimates"] >= 1
    assert shown["cache_ghosts"] > 0 and shown["cache_returned"] > 0 and 0.1 <= shown["cache_margin"] <= 0.8
    victims = {name.split()[-1]: count for name, count in shown.items() if name.startswith("cache_victims")}
    assert set(victims) >= {"lru", "estimate"} and sum(victims.values()) > POOL


def recorded(model: str, trace: str) -> dict[str, Any]:
    engine = Engine(model, num_gpu_blocks_override=POOL)
    dice = random.Random(4)
    prompts = [[dice.randrange(5, 500) for _ in range(dice.randrange(2, 8) * BLOCK)] for _ in range(6)]
    reused = blocks = 0
    for _ in range(30):
        prompt = dice.choice(prompts)
        blocks += (len(prompt) - 1) // BLOCK
        reused += engine.reused(dice.choice(["acme", None]), prompt, **{"vllm_ext.session_end": True})
    report = asked(engine)
    hashes = engine.last_hashes()
    engine.llm.llm_engine.engine_core.shutdown()
    text = Path(trace).read_text()
    return {
        "reused": reused / BLOCK,
        "blocks": blocks,
        "on": flat(report["gauges"])["block_trace_on"],
        "leaked": [value for value in hashes if value[:16] in text or value[-16:] in text],
        "mode": oct(Path(trace).stat().st_mode & 0o777),
        "faults": dict(engine.scheduler.vllm_ext.faults.counts),
    }


@pytest.mark.parametrize("tenancy", [True, False])
def test_the_trace_of_a_run_replays_to_the_same_hits(tenancy: bool, tiny_llama: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    env = policy_env(tmp_path)
    body = json.loads((tmp_path / "policy.yaml").read_text())
    body["telemetry"] = {"block_trace": "trace.jsonl", "max_size": "1MiB"}
    if not tenancy:
        del body["tenancy"]
    (tmp_path / "policy.yaml").write_text(json.dumps(body))
    result = run_in_v1(recorded if tenancy else recorded_without_tenants, tiny_llama, str(trace), env=env)
    assert result["faults"] == {} and result["on"] == 1 and result["mode"] == "0o600"
    assert result["leaked"] == []
    read = read_native(trace)
    assert len(read.requests) == 30 and read.prompt_blocks == result["blocks"]
    tenants = {request.tenant for request in read.requests}
    assert tenants == ({"acme", "(unknown)"} if tenancy else {"(unknown)"})
    assert all(request.finish > request.time for request in read.requests)
    outcome = replay(read, "lru", POOL - 1, pin_running=True)
    assert result["reused"] > 20
    assert outcome.hit_ratio == pytest.approx(result["reused"] / result["blocks"], abs=0.02)


def recorded_without_tenants(model: str, trace: str) -> dict[str, Any]:
    original = Engine.reused

    def reused(self: Engine, tenant: str | None, *args: Any, **extra: Any) -> int:
        return original(self, None, *args, **extra)

    Engine.reused = reused  # type: ignore[method-assign]
    return recorded(model, trace)


def switched(model: str, policy: str) -> dict[str, Any]:
    engine = Engine(model)
    store = engine.scheduler.vllm_ext.store
    body = json.loads(Path(policy).read_text())
    result: dict[str, Any] = {"none": flat(asked(engine)["gauges"])["block_trace_on"]}

    def reload(**telemetry: Any) -> str:
        body["telemetry"] = telemetry
        return store.apply(json.dumps(body)).outcome

    result["outcomes"] = [reload(block_trace="missing/trace.jsonl"), reload(block_trace="trace.jsonl")]
    engine.reused("acme")
    result["on"] = flat(asked(engine)["gauges"])["block_trace_on"]
    recorder = engine.scheduler.vllm_ext.block_trace._recorder
    deadline = time.monotonic() + 10
    while recorder.written < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    recorder._file.close()  # as a disk that fails
    engine.reused("acme")
    recorder._thread.join(10)
    warm = engine.reused("acme")
    report = asked(engine)
    result["broken"] = [flat(report["gauges"])["block_trace_on"], warm]
    result["failed"] = flat(report["totals"])["block_trace_requests failed"]
    result["outcomes"].append(reload())
    result["outcomes"].append(reload(block_trace="trace.jsonl"))
    engine.reused("acme")
    engine.scheduler.vllm_ext.block_trace.close()
    result["written"] = flat(asked(engine)["totals"])["block_trace_requests written"]
    return result


def test_a_reload_switches_the_trace_and_a_fault_ends_only_it(tiny_llama: str, tmp_path: Path) -> None:
    result = run_in_v1(switched, tiny_llama, str(tmp_path / "policy.yaml"), env=policy_env(tmp_path))
    assert result["outcomes"] == ["refused", "reloaded", "reloaded", "reloaded"]
    assert result["none"] == 0 and result["on"] == 1
    assert result["broken"] == [0, FULL_BLOCKS] and result["failed"] >= 1
    assert len(read_native(tmp_path / "trace.jsonl").requests) == 1
    assert result["written"] == 2
