"""Invariants of the `reuse` order against a naive oracle, and what it is for."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache import Arrival, Departure, Stop
from vllm_ext.cache.lru import LruOrder
from vllm_ext.cache.reuse import ReuseOrder
from vllm_ext.cache.reuse import order as order_module
from vllm_ext.cache.reuse.classes import BANDS

pytestmark = pytest.mark.unit


class Server:
    """A naive engine. Prompts are tuples; a block's key is the prompt up to its end."""

    def __init__(self, order: ReuseOrder | LruOrder, num_blocks: int, queues: int = 1) -> None:
        self.order = order
        self.queues = [order.queue() for _ in range(queues)]
        self.block_of: dict[tuple[int, ...], int] = {}
        self.key_of: dict[int, tuple[int, ...]] = {}
        self.users = [0] * num_blocks
        self.home: dict[int, int] = {}  # block -> queue that holds it
        self.running: list[tuple[list[int], list[tuple[int, ...]], int, Arrival]] = []
        self.queues[0].push_front(list(range(num_blocks)))
        self.home = dict.fromkeys(range(num_blocks), 0)
        self.evicted: list[tuple[int, ...]] = []

    def start(self, prompt: tuple[int, ...], now: float) -> int:
        """Returns the number of blocks found; the request runs until `finish`."""
        keys = [prompt[: depth + 1] for depth in range(len(prompt))]
        cached = []
        for key in keys:
            if key not in self.block_of:
                break
            cached.append(self.block_of[key])
        arrival = self.order.arrive(now, cached, keys[len(cached) :])
        for block in cached:
            if not self.users[block]:
                self.queues[self.home.pop(block)].remove(block)
            self.users[block] += 1
        blocks = list(cached)
        for key in keys[len(cached) :]:
            block = self.take()
            if block is None:
                break
            blocks.append(block)
            self.block_of[key], self.key_of[block] = block, key
            self.users[block] = 1
        self.running.append((blocks, keys[: len(blocks)], len(blocks), arrival))
        return len(cached)

    def take(self) -> int | None:
        scores = [(queue.peek(), index) for index, queue in enumerate(self.queues) if len(queue)]
        if not scores:
            return None
        queue = self.queues[min(scores)[1]]  # type: ignore[type-var]
        [block] = queue.pop_n(1)
        del self.home[block]
        if block in self.key_of:
            key = self.key_of.pop(block)
            if self.block_of.get(key) == block:  # else a copy, filled behind a hole
                del self.block_of[key]
            self.evicted.append(key)
        return block

    def finish(self, index: int, now: float, queue: int = 0, **facts: object) -> None:
        blocks, keys, num_prompt, arrival = self.running.pop(index)
        for block in blocks:
            self.users[block] -= 1
        start = sum(1 for block in blocks if self.users[block])
        assert all(not self.users[block] for block in blocks[start:]), "a shared head, then a tail"
        departure = Departure(now, blocks, keys, num_prompt, arrival, **facts)  # type: ignore[arg-type]
        self.queues[queue].push(departure, start)
        self.home.update(dict.fromkeys(blocks[start:], queue))

    def serve(self, prompt: tuple[int, ...], now: float, **facts: object) -> int:
        found = self.start(prompt, now)
        self.finish(len(self.running) - 1, now, **facts)  # type: ignore[arg-type]
        return found

    def check(self, leaf_first: bool = True) -> None:
        free = [block for block, users in enumerate(self.users) if not users]
        held = [block for queue in self.queues for block in queue]
        assert sorted(held) == free
        assert [len(queue) for queue in self.queues] == [
            sum(1 for home in self.home.values() if home == index) for index in range(len(self.queues))
        ]
        if leaf_first:
            for key in self.block_of:
                assert len(key) == 1 or key[:-1] in self.block_of, f"{key} is cached, its parent is not"


def chat(rng: random.Random, requests: int) -> list[tuple[tuple[int, ...], float]]:
    """Conversations that grow turn by turn over a few common heads, mixed with one-shot prompts."""
    now, chats, out = 0.0, [], []
    for number in range(requests):
        now += rng.expovariate(1.0)
        if chats and rng.random() < 0.6:
            place = rng.randrange(len(chats))
            chats[place] = chats[place] + tuple(rng.randrange(1000) for _ in range(rng.randint(1, 3)))
            prompt = chats[place]
        else:
            prompt = (rng.randrange(3), *(10_000 + number * 10 + i for i in range(rng.randint(0, 6))))
            if rng.random() < 0.5:
                chats.append(prompt)
        if len(prompt) > 14:
            chats.remove(prompt)
        out.append((prompt, now))
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(16, 120),
    learn_early=st.booleans(),
    queues=st.integers(1, 3),
)
def test_invariants(seed: int, blocks: int, learn_early: bool, queues: int) -> None:
    rng = random.Random(seed)
    order = ReuseOrder(blocks)
    if learn_early:
        order._due = 3
    server = Server(order, blocks, queues)
    for prompt, now in chat(rng, 150):
        server.start(prompt, now)
        while len(server.running) > rng.randint(0, 3):
            server.finish(
                rng.randrange(len(server.running)),
                now,
                queue=rng.randrange(queues),
                stop=Stop(rng.randrange(4)),
                owner=rng.choice((0, 1, 2)),
                ended=rng.random() < 0.1,
                output_tokens=rng.choice((0, 50, 500)),
            )
        # With several queues a block may have to die before its children in another queue, never with one.
        server.check(leaf_first=queues == 1)
    assert order.evictions["orphaned"] == 0 or queues > 1
    assert all(count >= 0 for count in order.children)
    for segment in order.segment_of:
        assert segment is None or segment.tracked >= segment.live > 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(16, 80))
def test_lru_until_the_first_estimate(seed: int, blocks: int) -> None:
    order = ReuseOrder(blocks)
    order._due = 10**9
    ours, stock = Server(order, blocks), Server(LruOrder(blocks), blocks)
    for prompt, now in chat(random.Random(seed), 120):
        assert ours.serve(prompt, now) == stock.serve(prompt, now)
    assert ours.evicted == stock.evicted


def test_a_cache_large_enough_is_lru() -> None:
    traffic = chat(random.Random(1), 3000)
    distinct = len({prompt[: i + 1] for prompt, _ in traffic for i in range(len(prompt))})
    blocks = distinct // 2
    ours, stock = Server(ReuseOrder(blocks), blocks), Server(LruOrder(blocks), blocks)
    hits = [(ours.serve(*item), stock.serve(*item)) for item in traffic]
    assert ours.order.estimates > 3  # type: ignore[union-attr]
    total = sum(len(prompt) for prompt, _ in traffic)
    assert sum(a for a, _ in hits) >= sum(b for _, b in hits) - 0.003 * total


def test_better_than_lru_where_it_is_small() -> None:
    totals = [0, 0]
    for seed in range(2, 5):
        traffic = chat(random.Random(seed), 2000)
        for place, order in enumerate((ReuseOrder(120), LruOrder(120))):
            server = Server(order, 120)
            totals[place] += sum(server.serve(*item) for item in traffic)
    assert totals[0] > 1.01 * totals[1]


def test_deterministic() -> None:
    runs = []
    for _ in range(2):
        server = Server(ReuseOrder(100), 100)
        for item in chat(random.Random(3), 1000):
            server.serve(*item)
        runs.append(server.evicted)
    assert runs[0] == runs[1]


def warmed(blocks: int = 64) -> tuple[Server, float]:
    """A server that has seen prompts come back every 10 s and others never."""
    server = Server(ReuseOrder(blocks), blocks)
    now = 0.0
    for number in range(400):
        now += 1.0
        steady = number % 10 == 0
        server.serve((1, 2, 3, 4) if steady else (100_000 + number, *range(3)), now)
    assert server.order.worth is not None  # type: ignore[union-attr]
    return server, now


def test_a_scan_does_not_evict_what_is_used_steadily() -> None:
    server, now = warmed()
    stock = Server(LruOrder(64), 64)
    for either in (server, stock):
        either.serve((1, 2, 3, 4), now)
        for number in range(3 * 64 // 4):
            either.serve((200_000 + number, 0, 1, 2), now + 0.05 * number)
    assert server.start((1, 2, 3, 4), now + 3.0) == 4
    assert stock.start((1, 2, 3, 4), now + 3.0) == 0


def test_a_hundred_simultaneous_hits_count_once() -> None:
    server, now = warmed()
    server.serve((7, 7, 7), now)
    for _ in range(100):
        server.start((7, 7, 7), now)
    block = server.block_of[7,]
    for _ in range(100):
        server.finish(0, now)
    assert server.order.hits_of[block] == 1  # type: ignore[union-attr]


def test_an_ended_session_dies_first_but_not_what_others_used() -> None:
    server, now = warmed()
    server.serve((5, 1), now, owner=1)
    server.serve((5, 2, 9), now, owner=2)  # block (5,) is shared
    server.serve((5, 2, 9, 8), now, owner=2, ended=True)
    while (5, 2) in server.block_of:
        assert server.take() is not None
    mine = [key for key in server.evicted if key[:2] == (5, 2)]
    assert mine == [(5, 2, 9, 8), (5, 2, 9), (5, 2)]
    assert server.evicted[-3:] == mine  # nobody else's block in between
    assert (5,) in server.block_of
    assert server.order.evictions["ended"] == 3


def test_an_end_without_a_session_is_no_licence_to_evict() -> None:
    server, now = warmed()
    server.serve((5, 1), now, ended=True)
    for _ in range(8):
        server.take()
    assert server.order.evictions["ended"] == 0


def test_children_in_another_queue_hold_their_parent_while_there_is_a_choice() -> None:
    order = ReuseOrder(4)
    above, below = order.queue(), order.queue()
    departure = Departure(0.0, [0, 1], ["a", "b"], 2, order.arrive(0.0, [], ["a", "b"]))
    above.push(departure, 0, 1)
    below.push(departure, 1, 2)
    other = Departure(1.0, [2], ["c"], 1, order.arrive(1.0, [], ["c"]))
    above.push(other)
    assert above.pop_n(1) == [2]  # block 0 is older, but 1 hangs on it
    assert above.pop_n(1) == [0]  # nothing else is left: who needs a block gets one
    assert order.evictions["orphaned"] == 1
    assert below.pop_n(5) == [1]
    assert order.children == [0] * 4


def test_ghosts_tell_of_the_past_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "MIN_GHOSTS", 0)
    server = Server(ReuseOrder(8), 8)
    server.serve((1, 2, 3), 0.0)
    server.serve((4, 5, 6, 7, 8, 9, 10), 1.0)
    cached = server.block_of[1,]
    arrival = server.order.arrive(21.0, [cached], [(1, 2), (1, 2, 3), (1, 2, 3, 4)])
    assert arrival.known == 3
    assert arrival.pace == 21.0
    assert arrival.turns == 1
    assert arrival.past_hits == {1: 1, 2: 1}
    for number in range(100):
        server.serve((1000 + number, 1, 2), 30.0 + number)
    assert len(server.order.ghosts) <= 24  # type: ignore[union-attr]


def test_the_work_of_a_call_is_bounded() -> None:
    order = ReuseOrder(4096)
    queue = order.queue()
    for block in range(2000):
        queue.push(Departure(0.0, [block], [block], 1, Arrival(0.0)))
    last = BANDS - 1
    for calls in range(1, 2000 // order_module.PROMOTIONS + 2):
        order.tick(10_000.0)
        moved = sum(1 for segment in queue._line if segment.band == last)
        assert moved == min(2000, calls * order_module.PROMOTIONS)
    # They count in every band that they skipped.
    row = queue._line[0].row
    assert order.table.entered[row : row + BANDS].tolist() == [2000.0] * BANDS


def test_reset_forgets_contents_and_keeps_blocks() -> None:
    server, now = warmed()
    queue = server.queues[0]
    sequence = list(queue)
    queue.void()
    assert list(queue) == sequence
    assert server.order.arrive(now, [], [(1,)]).known == 0  # no ghosts of void contents
    assert queue.pop_n(100) == sequence
    assert server.order.evictions["empty"] >= 64


def test_wrong_queue() -> None:
    order = ReuseOrder(4)
    here, there = order.queue(), order.queue()
    here.push(Departure(0.0, [0], ["a"], 1, Arrival(0.0)))
    for queue, block in ((there, 0), (here, 1)):
        with pytest.raises(KeyError, match=f"block {block}"):
            queue.remove(block)
    assert here.pop_n(0) == []
    assert there.peek() is None


def test_decoded_blocks_and_the_last_are_classes_of_their_own() -> None:
    order = ReuseOrder(8)
    queue = order.queue()
    queue.push(Departure(0.0, [0, 1, 2, 3], "abcd", 3, Arrival(0.0)))
    queue.push(Departure(0.0, [4, 5, 6], "efg", 3, Arrival(0.0)))
    rows = [order.segment_of[block].row for block in range(7)]  # type: ignore[union-attr]
    assert rows[0] == rows[1] == rows[2] == rows[4] == rows[5]
    assert len({rows[0], rows[3], rows[6]}) == 3
    assert all(a != b for a, b in pairwise((rows[2], rows[3])))


def test_a_cache_that_never_evicts_keeps_no_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt that nobody asks for again stays in front; behind it, hits leave dead segments all day."""
    monkeypatch.setattr("vllm_ext.cache.reuse.queue.MIN_SWEEP", 16)
    order = ReuseOrder(64)
    server = Server(order, 64)
    server.start((9, 9, 9), 0.0)
    server.finish(0, 0.0)
    for turn in range(1, 2000):
        server.start((1, 2, 3, 4), float(turn))
        server.finish(0, turn + 0.5)
    (queue,) = server.queues
    assert len(queue._line) <= 16 + 8
    assert sum(len(ring) for ring in queue._rings.values()) <= 18 * (16 + 8)
    assert not server.evicted
    assert server.start((9, 9, 9), 3000.0) == 3
