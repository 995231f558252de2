"""Can an attacker tell by the clock whether a guessed prompt is in the cache?

Within a domain yes, across domains no.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tenancy_helpers import Engine, policy_env
from tests.engine.v2 import run_in_v1

pytestmark = pytest.mark.engine

PAIRS = 200
PROMPT_TOKENS = 800


def probe(model: str, attacker: str, pairs: int) -> dict[str, list[float]]:
    """Seconds to first token of a guess that the victim has just warmed, and of one nobody has sent.

    The two kinds take turns in random order, so that drift of the machine's speed meets both alike.
    """
    import random
    import time

    dice = random.Random(7)
    engine = Engine(model, num_gpu_blocks_override=512)
    times: dict[str, list[float]] = {"warm": [], "cold": []}

    def prompt() -> list[int]:
        return [dice.randrange(5, 500) for _ in range(PROMPT_TOKENS)]

    for _ in range(pairs + 10):
        guesses = {"warm": prompt(), "cold": prompt()}
        engine.reused("acme", guesses["warm"])
        for kind in dice.sample(["warm", "cold"], 2):
            start = time.perf_counter()
            engine.reused(attacker, guesses[kind])
            times[kind].append(time.perf_counter() - start)
    return {kind: measured[10:] for kind, measured in times.items()}  # the first ten warm the process up


def p_value(times: dict[str, Any]) -> float:
    from scipy.stats import ks_2samp

    return float(ks_2samp(times["warm"], times["cold"]).pvalue)


def test_timing_tells_nothing_across_domains_and_everything_within(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path)
    control = run_in_v1(probe, tiny_llama, "acme", PAIRS, env=env)
    attack = run_in_v1(probe, tiny_llama, "globex", PAIRS, env=env)
    assert len(attack["warm"]) == len(attack["cold"]) == PAIRS
    assert p_value(control) < 1e-12, "within the domain the cache must show, or this test could not fail"
    assert p_value(attack) > 1e-3, "an attacker in another domain can tell warm from cold"
