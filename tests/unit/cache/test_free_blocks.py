"""The free list against a naive oracle that scans everything, on random traffic of chained requests."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.free_blocks import DEFAULT, EVERYBODY_ELSE, FreeBlocks, Protection, Share, cover
from vllm_ext.cache.lru import LruOrder
from vllm_ext.cache.order import Arrival, Departure, make_order
from vllm_ext.cache.reuse import ReuseOrder

pytestmark = pytest.mark.unit

GROUPS = (EVERYBODY_ELSE, 1, 2)
priorities = st.integers(0, 100)
protections = st.builds(Protection, priorities, priorities, st.integers(0, 20).map(float))


def effective(protection: Protection, now: float) -> int:
    boosted = protection.boost if protection.expires > now else 0
    return max(protection.base, boosted)


@given(protections, protections, st.integers(0, 10))
def test_a_covering_parent_is_never_below_its_child(parent: Protection, child: Protection, now: int) -> None:
    covering = cover(parent, child, now)
    for later in range(now, 25):
        assert effective(covering, later) >= max(effective(parent, later), effective(child, later))
    assert covering.base == max(parent.base, child.base), "only a boost may cover more than it must"
    assert effective(covering, now) == max(effective(parent, now), effective(child, now))


@given(protections, st.integers(0, 25))
def test_covering_itself_changes_nothing_that_is_in_force(protection: Protection, now: int) -> None:
    covered = cover(protection, protection, now)
    for later in range(now, 30):
        assert effective(covered, later) == effective(protection, later)


@dataclass
class Oracle:
    """Plain facts about every block; every question is answered by looking at all of them."""

    shares: dict[int, Share]
    blank: list[int]
    free: list[int] = field(default_factory=list)  # in the sequence in which they were given back
    group: dict[int, int] = field(default_factory=dict)  # cached blocks
    protection: dict[int, Protection] = field(default_factory=dict)

    def resident(self, group: int) -> int:
        return sum(owner == group for owner in self.group.values())

    def release(self, chain: list[int], unused: list[int], now: float) -> None:
        self.expire(now)
        for index in range(len(chain) - 1, -1, -1):
            below = [self.protection[block] for block in chain[index + 1 :]]
            merged = self.protection[chain[index]]
            for protection in below[:1]:
                merged = cover(merged, protection, now)
            self.protection[chain[index]] = cover(merged, Protection(-1), now)
        self.free += [chain[index] for index in reversed(unused)]

    def expire(self, now: float) -> None:
        ended = [
            block
            for block in self.free
            if self.protection[block].boost > self.protection[block].base
            and self.protection[block].expires <= now
        ]
        for block in sorted(ended, key=lambda block: self.protection[block].expires):
            self.protection[block] = Protection(self.protection[block].base)
            self.free.remove(block)
            self.free.append(block)

    def pop(self, count: int, now: float, asking: int) -> list[int]:
        self.expire(now)
        victims = [self.blank.pop(0) for _ in range(min(count, len(self.blank)))]
        while len(victims) < count:
            victims.append(self.victim(now, asking))
        return victims

    def victim(self, now: float, asking: int) -> int:
        def share(group: int) -> Share:
            return self.shares.get(group, Share())

        candidates = [b for b in self.free if self.resident(self.group[b]) > share(self.group[b]).maximum]
        if not candidates:
            candidates = [
                b
                for b in self.free
                if self.group[b] == asking or self.resident(self.group[b]) > share(self.group[b]).minimum
            ]
        candidates = candidates or self.free
        lowest = min(effective(self.protection[block], now) for block in candidates)
        chosen = next(block for block in candidates if effective(self.protection[block], now) == lowest)
        self.free.remove(chosen)
        del self.group[chosen], self.protection[chosen]
        return chosen


@dataclass
class Running:
    chain: list[int]
    num_prompt: int


class Traffic:
    """Requests of several groups that share heads, run together, are given back in any order."""

    def __init__(self, seed: int, num_blocks: int, shares: dict[int, Share], protect: bool) -> None:
        self.dice = random.Random(seed)
        self.num_blocks = num_blocks
        self.protect = protect
        self.free = FreeBlocks(num_blocks, LruOrder(num_blocks), shares)
        self.free.release_blank(range(num_blocks))
        self.oracle = Oracle(shares, list(range(num_blocks)))
        self.running: list[Running] = []
        self.users: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}  # of every cached block
        self.filled = [
            0
        ] * num_blocks  # how often a block got new contents: an id alone does not tell them apart
        self.parent_filled: dict[int, int] = {}
        self.children: dict[tuple[int, int | None], list[int]] = {}
        self.now = 0.0
        self.popped = 0

    def step(self) -> None:
        self.now += self.dice.choice([0.0, 0.5, 3.0])
        if self.running and (self.dice.random() < 0.5 or len(self.free) < 4):
            self.finish(self.running.pop(self.dice.randrange(len(self.running))))
        else:
            self.start()
        self.check()

    def start(self) -> None:
        group = self.dice.choice(GROUPS)
        chain = self.cached_head(group)
        for block in chain:
            if not self.users.get(block):
                self.free.take(block)
                self.oracle.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1
        count = min(self.dice.randrange(1, 9), len(self.free))
        assert len(self.free) == len(self.oracle.free) + len(self.oracle.blank)
        expected = self.oracle.pop(count, self.now, group)
        victims = self.free.pop(count, self.now, group)
        assert victims == expected
        self.popped += count
        for block in victims:
            self.forget(block)
            self.users[block] = 1
        parent = chain[-1] if chain else None
        for block in victims:
            protection = self.wish()
            self.free.cached(block, group, protection)
            self.oracle.group[block], self.oracle.protection[block] = group, protection
            self.parent[block] = parent
            self.filled[block] += 1
            self.parent_filled[block] = self.filled[parent] if parent is not None else 0
            self.children.setdefault((group, parent), []).append(block)
            parent = block
        self.running.append(Running([*chain, *victims], len(chain)))

    def wish(self) -> Protection:
        if not self.protect or self.dice.random() < 0.5:
            return DEFAULT
        expires = self.now + self.dice.choice([1.0, 10.0, 40.0])
        return Protection(self.dice.choice([0, 20, 35, 70]), self.dice.choice([0, 50, 90]), expires)

    def cached_head(self, group: int) -> list[int]:
        chain: list[int] = []
        while self.dice.random() < 0.7:
            parent = chain[-1] if chain else None
            known = self.children.get((group, parent))
            if not known:
                break
            chain.append(self.dice.choice(known))
        return chain

    def forget(self, block: int) -> None:
        if block in self.parent:
            parent = self.parent.pop(block)
            for key in [key for key in self.children if key[1] == parent]:
                if block in self.children[key]:
                    self.children[key].remove(block)

    def finish(self, request: Running) -> None:
        for block in request.chain:
            self.users[block] -= 1
        unused = [index for index, block in enumerate(request.chain) if not self.users[block]]
        departure = Departure(self.now, request.chain, request.chain, request.num_prompt, Arrival(self.now))
        self.oracle.release(request.chain, unused, self.now)
        self.free.release(departure, unused)

    def check(self) -> None:
        oracle, free = self.oracle, self.free
        assert len(free) == len(oracle.free) + len(oracle.blank)
        assert sorted(free) == sorted([*oracle.free, *oracle.blank])
        for group in GROUPS:
            assert free.resident[group] == oracle.resident(group)
        for block, parent in self.parent.items():
            assert parent is None or (
                parent in self.parent and self.filled[parent] == self.parent_filled[block]
            ), "a cached block's parent is cached"
            if parent is not None and not self.users.get(block) and not self.users.get(parent):
                mine, its = (effective(free.protection[b], self.now) for b in (block, parent))
                assert its >= mine, "priority never rises from parent to child"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 60),
    protect=st.booleans(),
    shares=st.fixed_dictionaries(
        {},
        optional={
            1: st.builds(Share, st.integers(0, 20), st.one_of(st.just(math.inf), st.integers(0, 30))),
            2: st.builds(Share, st.integers(0, 20), st.one_of(st.just(math.inf), st.integers(0, 30))),
        },
    ),
)
def test_victims_are_those_of_the_oracle(
    seed: int, num_blocks: int, protect: bool, shares: dict[int, Share]
) -> None:
    traffic = Traffic(seed, num_blocks, shares, protect)
    for _ in range(150):
        traffic.step()


def departed(
    free: FreeBlocks, blocks: list[int], group: int, protection: Protection = DEFAULT, now: float = 0.0
) -> None:
    for block in blocks:
        free.cached(block, group, protection)
    free.release(Departure(now, blocks, blocks, len(blocks), Arrival(now)), list(range(len(blocks))))


def filled(shares: dict[int, Share]) -> FreeBlocks:
    """Ten blocks, none blank: 0 to 4 of group 1, then 5 to 9 of group 2, given back in this sequence."""
    free = FreeBlocks(10, LruOrder(10), shares)
    departed(free, [0, 1, 2, 3, 4], 1)
    departed(free, [5, 6, 7, 8, 9], 2)
    return free


def test_others_cannot_evict_a_group_below_its_floor() -> None:
    free = filled({1: Share(minimum=3)})
    assert free.pop(7, 1.0, group=2) == [4, 3, 9, 8, 7, 6, 5]
    assert free.resident[1] == 3


def test_a_floor_never_fails_an_allocation() -> None:
    free = filled({1: Share(minimum=5), 2: Share(minimum=5)})
    assert len(free.pop(10, 1.0)) == 10


def test_a_group_may_evict_itself_below_its_floor() -> None:
    assert filled({1: Share(minimum=5)}).pop(2, 1.0, group=1) == [4, 3]


def test_a_group_above_its_cap_evicts_itself_first_and_only_down_to_it() -> None:
    free = filled({2: Share(maximum=2)})
    assert free.pop(5, 1.0, group=1) == [9, 8, 7, 4, 3]
    assert free.evictions == {("quota", 2): 3, ("capacity", 1): 2}


def test_a_protection_holds_until_its_time_and_not_longer() -> None:
    free = FreeBlocks(4, LruOrder(4))
    departed(free, [0, 1], EVERYBODY_ELSE, Protection(boost=90, expires=10.0))
    departed(free, [2, 3], EVERYBODY_ELSE)
    assert free.pop(1, 9.9) == [3]
    free.cached(3, EVERYBODY_ELSE)
    free.release(Departure(10.5, [2, 3], [2, 3], 2, Arrival(10.5)), [1])
    free.expire(10.0)
    assert free.pop(4, 11.0) == [2, 3, 0, 1] or free.evictions["ttl", EVERYBODY_ELSE] == 2


def test_everything_at_the_highest_priority_still_allocates() -> None:
    free = FreeBlocks(6, LruOrder(6))
    departed(free, list(range(6)), EVERYBODY_ELSE, Protection(base=100))
    assert free.pop(6, 0.0) == [5, 4, 3, 2, 1, 0]


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 blocks wanted, 0 unused"):
        FreeBlocks(3, LruOrder(3)).pop(2, 0.0)


def test_taking_a_block_that_is_in_use_is_an_error() -> None:
    free = FreeBlocks(3, LruOrder(3))
    with pytest.raises(KeyError):
        free.take(1)


def test_taking_blocks_of_several_queues_at_once() -> None:
    free = FreeBlocks(8, LruOrder(8))
    departed(free, [0, 1, 2], EVERYBODY_ELSE, Protection(base=90))
    departed(free, [3, 4, 5], EVERYBODY_ELSE)
    free.take_n([0, 1, 3])
    assert len(free) == 3
    assert free.pop(3, 0.0) == [5, 4, 2]


def test_blank_and_cached_blocks_are_taken_together() -> None:
    free = FreeBlocks(4, LruOrder(4))
    departed(free, [0, 1], EVERYBODY_ELSE)
    free.release_blank([2, 3])
    free.take_n([3, 1])
    assert list(free) == [2, 0] and len(free) == 2


def test_an_invalidated_block_keeps_its_place_where_nothing_is_protected() -> None:
    free = FreeBlocks(3, LruOrder(3))
    departed(free, [0, 1, 2], EVERYBODY_ELSE)
    free.forget(1)
    assert free.resident[EVERYBODY_ELSE] == 2
    assert free.pop(3, 0.0) == [2, 1, 0], "vLLM leaves it there, too"
    assert free.evictions == {("capacity", EVERYBODY_ELSE): 2}


def test_an_invalidated_block_that_was_protected_goes_first() -> None:
    free = FreeBlocks(3, LruOrder(3))
    departed(free, [0, 1], EVERYBODY_ELSE, Protection(base=90))
    departed(free, [2], EVERYBODY_ELSE)
    free.forget(0)
    assert free.pop(3, 0.0) == [0, 2, 1]


def test_a_busy_prompt_with_a_long_time_to_live_leaves_no_trail() -> None:
    free = FreeBlocks(4, LruOrder(4))
    protection = Protection(boost=90, expires=1e9)
    departed(free, [0, 1, 2, 3], EVERYBODY_ELSE, protection)
    for turn in range(5000):
        free.take_n([0, 1, 2, 3])
        free.release(Departure(float(turn), [0, 1, 2, 3], range(4), 4, Arrival(0.0)), range(4))
    assert len(free._deadlines) <= 1024


@pytest.mark.parametrize("name", ["lru", "reuse"])
def test_an_end_of_protection_is_no_use(name: str) -> None:
    order = make_order(name, 4)
    free = FreeBlocks(4, order)
    departed(free, [0, 1], EVERYBODY_ELSE, Protection(boost=90, expires=10.0))
    departed(free, [2, 3], EVERYBODY_ELSE, now=1.0)
    if isinstance(order, ReuseOrder):
        before = sum(order.table.hits), bytes(order.hits_of)
        entered = sum(order.table.entered)
    free.expire(20.0)
    if isinstance(order, ReuseOrder):
        assert (sum(order.table.hits), bytes(order.hits_of)) == before
        assert sum(order.table.entered) == pytest.approx(entered)
    assert free.pop(4, 20.0) == [3, 2, 1, 0]
    assert free.evictions == {("capacity", EVERYBODY_ELSE): 2, ("ttl", EVERYBODY_ELSE): 2}


def test_reuse_forgets_what_an_invalidated_block_held() -> None:
    order = ReuseOrder(4)
    free = FreeBlocks(4, order)
    departed(free, [0, 1], EVERYBODY_ELSE)
    free.take_n([0, 1])
    free.release(Departure(1.0, [0, 1], [0, 1], 2, Arrival(1.0)), [0, 1])
    assert order.hits_of[1] == 1
    free.forget(1)
    assert order.children[0] == 0 and order.parent_of[1] == -1
    assert free.pop(1, 2.0) == [1]
    free.cached(1, EVERYBODY_ELSE)
    free.release(Departure(3.0, [1], ["other"], 1, Arrival(3.0)), [0])
    assert order.hits_of[1] == 0 and order.key_of[1] == "other"
