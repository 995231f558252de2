"""The replay against models that are too slow to be wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.replay import (
    Outcome,
    Row,
    belady,
    gap_closed,
    parse_capacity,
    replay,
    study,
    worst_against_lru,
)
from vllm_ext.cache.replay.plot import PlotError, load_matplotlib
from vllm_ext.cache.traces import Request, Trace, make_trace, read_agents, read_mooncake

pytestmark = pytest.mark.unit


def chains(seed: int, requests: int = 60, width: int = 2, depth: int = 5) -> Trace:
    """Prompts are paths in a tree, keys their prefixes: chained, as block hashes are."""
    rng = random.Random(seed)
    out = []
    for number in range(requests):
        path = tuple(rng.randrange(width) for _ in range(rng.randint(1, depth)))
        out.append(Request(float(number), [path[: i + 1] for i in range(len(path))]))
    return make_trace(f"chains {seed}", out)


def naive_lru(trace: Trace, capacity: int) -> int:
    """A list, oldest first; a request's blocks are used deepest first."""
    cache: list[object] = []
    hits = 0
    for request in trace.requests:
        for key in request.prompt:
            if key not in cache:
                break
            hits += 1
        for key in reversed(request.prompt):
            if key in cache:
                cache.remove(key)
            cache.append(key)
        del cache[: max(0, len(cache) - capacity)]
    return hits


def naive_belady(trace: Trace, capacity: int, pinned: bool) -> int:
    """Looks through the whole future for each victim."""

    def next_use(key: object, after: int) -> int:
        later = (i for i in range(after + 1, len(trace.requests)) if key in trace.requests[i].prompt)
        return next(later, 1 << 40)

    cached: dict[object, int] = {}  # key -> depth
    hits = 0
    for number, request in enumerate(trace.requests):
        prompt = list(request.prompt)
        found = 0
        while found < len(prompt) and prompt[found] in cached:
            found += 1
        hits += found
        if pinned:
            for key in prompt[capacity:]:
                cached.pop(key, None)
            prompt = prompt[:capacity]
            others = {key: depth for key, depth in cached.items() if key not in prompt}
            new = sum(1 for key in prompt if key not in cached)
            while len(cached) + new > capacity:
                victim = max(others, key=lambda key: (next_use(key, number), others[key]))
                del others[victim], cached[victim]
        cached.update({key: depth for depth, key in enumerate(prompt)})
        while len(cached) > capacity:
            del cached[max(cached, key=lambda key: (next_use(key, number), cached[key]))]
    return hits


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40))
def test_lru(seed: int, capacity: int) -> None:
    trace = chains(seed)
    outcome = replay(trace, "lru", capacity)
    assert outcome.hit_blocks == naive_lru(trace, capacity)
    assert outcome.prompt_blocks == trace.prompt_blocks


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40), pinned=st.booleans())
def test_belady(seed: int, capacity: int, pinned: bool) -> None:
    trace = chains(seed, requests=40)
    outcome = belady(trace, capacity, pin_running=pinned, compiled=False)
    assert outcome.hit_blocks == naive_belady(trace, capacity, pinned)
    for order in ("lru", "reuse"):
        assert replay(trace, order, capacity, pin_running=pinned).hit_blocks <= outcome.hit_blocks


def test_compiled_is_the_same() -> None:
    pytest.importorskip("numba")
    for pinned in (False, True):
        for seed in range(3):
            trace = chains(seed, requests=300, width=3, depth=6)
            plain, fast = (
                belady(trace, 60, pin_running=pinned, compiled=compiled) for compiled in (False, True)
            )
            assert (plain.hit_blocks, plain.evictions) == (fast.hit_blocks, fast.evictions)


def test_an_infinite_cache_hits_all_that_came_before() -> None:
    trace = chains(1)
    everything = trace.prompt_blocks - trace.num_prompt_keys
    for order in ("lru", "reuse"):
        for pinned in (False, True):
            outcome = replay(trace, order, trace.num_keys, pin_running=pinned)
            assert outcome.hit_blocks == everything
            assert not sum(outcome.evictions.values())
    assert belady(trace, trace.num_keys).hit_blocks == everything


def turns(gap: float) -> Trace:
    """A conversation of two turns, the second with the first answer in its prompt, and a stranger between."""
    return make_trace(
        "turns",
        [
            Request(0.0, ["a", "b"], ["c"], 5.0, tenant="x"),
            Request(gap, ["u", "v"], [], gap + 0.5, tenant="y"),
            Request(20.0, ["a", "b", "c", "d"], [], 21.0, tenant="x"),
        ],
    )


def test_pinned_running_requests_keep_their_blocks_and_outputs_exist() -> None:
    roomy = replay(turns(6.0), "lru", 8, pin_running=True)
    assert roomy.hit_blocks == 3
    assert roomy.tenant_hits == {"x": 3, "y": 0}
    assert roomy.tenant_blocks == {"x": 6, "y": 2}
    assert replay(turns(6.0), "lru", 8).hit_blocks == 2  # block level knows no outputs
    # While the first runs it holds two of three blocks: the other gets one, the second finds no place.
    tight = replay(turns(1.0), "lru", 3, pin_running=True)
    assert tight.refused == 1 + 1
    assert tight.hit_blocks == 3
    # Afterwards it holds none: its blocks are victims, the deepest first.
    assert replay(turns(6.0), "lru", 3, pin_running=True).hit_blocks == 1


def test_hints_are_passed_on_and_can_be_hidden() -> None:
    requests = []
    for number in range(200):
        name = f"s{number}"
        requests.append(Request(2.0 * number, [name, (name, 1), (name, 2)], session=name))
        requests.append(Request(2.0 * number + 1, [name, (name, 1), (name, 3)], session=name, ended=True))
    trace = make_trace("ends", requests)
    assert replay(trace, "reuse", 30).evictions["ended"] > 100
    assert replay(trace, "reuse", 30, hints=False).evictions["ended"] == 0


def test_capacities() -> None:
    trace = chains(1)
    assert parse_capacity("50%").of(trace) == trace.num_prompt_keys // 2
    assert parse_capacity(" 7 ").of(trace) == 7
    assert parse_capacity("0.001%").of(trace) == 1
    for wrong in ("", "0", "-3", "0%", "101%", "x", "1.5", "nan%"):
        with pytest.raises(ValueError, match=r"give a share such as 5% .* or a number of blocks"):
            parse_capacity(wrong)


def test_gap_and_worst_case() -> None:
    assert gap_closed(0.5, 0.4, 0.6) == pytest.approx(0.5)
    assert gap_closed(0.5, 0.5, 0.5005) is None
    rows = [
        Row("t", parse_capacity("4"), 4, {n: Outcome(n, 4, hits, 100) for n, hits in counts.items()})
        for counts in ({"lru": 40, "reuse": 50, "belady": 60}, {"lru": 60, "reuse": 59, "belady": 61})
    ]
    assert rows[0].gap_closed("reuse") == pytest.approx(0.5)
    found = worst_against_lru(rows, "reuse")
    assert found is not None and found[1] is rows[1] and found[0] == pytest.approx(-0.01)
    alone = Row("t", parse_capacity("4"), 4, {"reuse": Outcome("reuse", 4, 5, 10)})
    assert alone.gap_closed("reuse") is None
    assert worst_against_lru([alone], "reuse") is None


def test_progress_adds_up() -> None:
    trace = chains(3, requests=700)
    done: dict[str, int] = {}

    def progress(label: str, count: int) -> None:
        done[label] = done.get(label, 0) + count

    study([trace], [parse_capacity("5")], ["lru", "belady"], progress=progress)
    assert done == {"chains 3 5 lru": 700, "chains 3 5 belady": 700}


def test_the_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("vllm_ext.cache.replay.plot.import_module", absent)
    with pytest.raises(PlotError, match=r"pip install 'vllm-ext\[plot\]'"):
        load_matplotlib()


# -- the public traces, where somebody has them (VLLM_EXT_TRACES=folder) -----------------------------------

SHARES = ("1%", "2%", "5%", "10%", "20%", "40%")
CONVERSATION_LRU = (0.0525, 0.0793, 0.1958, 0.2789, 0.3453, 0.3604)
CONVERSATION_BELADY = (0.2464, 0.3142, 0.3664, 0.3664, 0.3664, 0.3664)
AGENTS_LRU = (0.1470, 0.3133, 0.6845, 0.8645, 0.9389, 0.9523)
AGENTS_BELADY = (0.3828, 0.5787, 0.8166, 0.9177)
AGENTS_PINNED = (0.2311, 0.4791, 0.7878, 0.9148)


@pytest.fixture
def traces() -> Path:
    folder = os.environ.get("VLLM_EXT_TRACES")
    if not folder:
        pytest.skip("VLLM_EXT_TRACES names no folder with mooncake_conversation.jsonl and agents/")
    pytest.importorskip("numba")
    return Path(folder)


def test_conversation_rows(traces: Path) -> None:
    trace = read_mooncake(traces / "mooncake_conversation.jsonl")
    sizes = [parse_capacity(share).of(trace) for share in SHARES]
    assert [replay(trace, "lru", n).hit_ratio for n in sizes] == pytest.approx(CONVERSATION_LRU, abs=1e-3)
    assert [belady(trace, n).hit_ratio for n in sizes] == pytest.approx(CONVERSATION_BELADY, abs=1e-3)
    # The order itself: most of the gap that was ever closed.
    ours = replay(trace, "reuse", sizes[1])
    closed = gap_closed(ours.hit_ratio, CONVERSATION_LRU[1], CONVERSATION_BELADY[1])
    assert closed is not None and closed > 0.3


def test_agents_rows(traces: Path) -> None:
    trace = read_agents(traces / "agents", seed=7)
    sizes = [parse_capacity(share).of(trace) for share in SHARES]
    assert [replay(trace, "lru", n).hit_ratio for n in sizes] == pytest.approx(AGENTS_LRU, abs=1e-3)
    for pinned, expected in ((False, AGENTS_BELADY), (True, AGENTS_PINNED)):
        found = [belady(trace, n, pin_running=pinned).hit_ratio for n in sizes[:4]]
        assert found == pytest.approx(expected, abs=1e-3)
