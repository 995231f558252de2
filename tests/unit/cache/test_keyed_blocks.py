"""A tier addressed by key against a naive oracle that scans everything, under random transfers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.free_blocks import DEFAULT, EVERYBODY_ELSE, Protection, Share, cover
from vllm_ext.cache.keyed_blocks import Batch, Finish, KeyedBlocks, State
from vllm_ext.cache.order import Arrival, Stop, make_order
from vllm_ext.cache.ranked import RankedOrder

pytestmark = pytest.mark.unit

Key = tuple[int, int]
"""(conversation, place in it)."""


@dataclass
class Entry:
    rank: int
    group: int
    protection: Protection
    idle: bool = False


@dataclass
class Oracle:
    """Plain facts about every key; a victim is found by looking at all of them."""

    shares: dict[int, Share]
    entries: dict[Key, Entry] = field(default_factory=dict)

    def evict(self, count: int, protected: set[Key], now: float, asking: int) -> list[Key] | None:
        if count > sum(entry.idle and key not in protected for key, entry in self.entries.items()):
            return None
        victims = []
        for _ in range(count):
            victims.append(self.victim(protected, now, asking))
            del self.entries[victims[-1]]
        return victims

    def victim(self, protected: set[Key], now: float, asking: int) -> Key:
        def resident(group: int) -> int:
            return sum(entry.group == group for entry in self.entries.values())

        def share(group: int) -> Share:
            return self.shares.get(group, Share())

        keys = [key for key, entry in self.entries.items() if entry.idle and key not in protected]
        groups = {self.entries[key].group for key in keys}
        over = {group for group in groups if resident(group) > share(group).maximum}
        above = {group for group in groups if group == asking or resident(group) > share(group).minimum}
        chosen = over or above or groups
        return min(
            (key for key in keys if self.entries[key].group in chosen),
            key=lambda key: (effective(self.entries[key].protection, now), self.entries[key].rank),
        )


def effective(protection: Protection, now: float) -> int:
    return max(protection.base, protection.boost if protection.expires > now else 0)


@dataclass
class Running:
    keys: list[Key]
    reused: set[Key]
    protection: Protection
    ttl: float


class Traffic:
    """Requests that store, load and offer heads of conversations; transfers end in any order, some of them
    after the request."""

    def __init__(self, seed: int, capacity: int, shares: dict[int, Share], order: str, protect: bool) -> None:
        self.dice = random.Random(seed)
        self.capacity = capacity
        self.protect = protect
        self.oracle = Oracle(shares)
        self.ranks = 0
        made = (
            RankedOrder(capacity, lambda key: ((float(self.oracle.entries[key].rank), 0.0), key))
            if order == "lru"
            else make_order(order, capacity)
        )
        self.exact = order == "lru"
        self.tier = KeyedBlocks(capacity, made, shares)
        self.running: list[Running] = []
        self.writing: list[Key] = []
        self.reading: list[Key] = []
        self.now = 0.0
        self.evicted = 0

    def step(self) -> None:
        self.now += self.dice.choice([0.0, 0.25, 2.0])
        action = self.dice.random()
        if self.writing and action < 0.35:
            self.wrote(self.writing.pop(self.dice.randrange(len(self.writing))))
        elif self.reading and action < 0.5:
            self.read(self.reading.pop(self.dice.randrange(len(self.reading))))
        elif self.running and action < 0.65:
            self.finish(self.running.pop(self.dice.randrange(len(self.running))))
        else:
            self.start()
        self.check()

    def start(self) -> None:
        conversation = self.dice.randrange(8)
        wanted = [(conversation, place) for place in range(self.dice.randint(1, 6))]
        entries = self.oracle.entries
        ready = [key for key in wanted if key in entries and key not in self.writing]
        reused: set[Key] = set()
        for key in ready:
            reused.add(key)
            # Else it was on the device, and is merely offered.
            if self.dice.random() < 0.7 and key not in self.reading:
                entries[key].idle = False
                self.tier.hold(key, self.now)
                self.reading.append(key)
        missing = [key for key in wanted if key not in entries]
        group = conversation % 3
        base, boost, ttl = DEFAULT.base, 0, 0.0
        if self.protect:
            # One class a conversation: when a chunk came back without those behind it, who covers whom would
            # hang on the sequence of events, which the oracle does not follow.
            base = (10, 35, 60)[conversation // 2 % 3]
            boost, ttl = ((0, 0.0), (90, 5.0))[conversation % 2]
        protection = Protection(base, boost, self.now + ttl if boost else -math.inf)
        if missing and self.store(missing, wanted, group, protection):
            reused.update(key for key in wanted if key in entries and key not in missing)
        kept = list(itertools.takewhile(entries.__contains__, wanted))
        self.running.append(Running(kept, reused & set(kept), protection, ttl))

    def store(self, missing: list[Key], offered: list[Key], group: int, protection: Protection) -> bool:
        entries = self.oracle.entries
        short = len(missing) - (self.capacity - len(entries))
        if short > 0:
            victims = self.tier.evict(short, set(offered), self.now, group)
            if self.exact:
                assert victims == self.oracle.evict(short, set(offered), self.now, group)
            else:
                possible = sum(entry.idle and key not in offered for key, entry in entries.items())
                assert (victims is None) == (short > possible)
                for key in victims or ():
                    assert entries[key].idle and key not in offered
                    del entries[key]
            if victims is None:
                return False
            self.evicted += len(victims)
        batch = Batch()
        for key in missing:
            self.ranks += 1
            entries[key] = Entry(self.ranks, group, protection)
            self.tier.insert(key, batch, group, protection)
            self.writing.append(key)
        return True

    def wrote(self, key: Key) -> None:
        if self.dice.random() < 0.05:
            self.tier.discard(key)
            del self.oracle.entries[key]
            return
        self.oracle.entries[key].idle = True
        self.tier.idle(key)

    def read(self, key: Key) -> None:
        self.oracle.entries[key].idle = True
        self.tier.idle(key)

    def finish(self, request: Running) -> None:
        entries = self.oracle.entries
        keys = request.keys
        if request.ttl:
            request.protection = request.protection._replace(expires=self.now + request.ttl)
        behind = Protection(-1)
        for key in reversed(keys):
            if key in entries:
                self.ranks += 1
                entries[key].rank = self.ranks
                wanted = cover(request.protection, behind, self.now)
                behind = entries[key].protection = cover(entries[key].protection, wanted, self.now)
        # The oracle's ranks are the tier's: a real tier hears of them before `finish`, as here.
        self.tier.finish(keys, request.reused, self.now, [request.protection] * len(keys))

    def check(self) -> None:
        assert len(self.tier) == len(self.oracle.entries)
        held = {key for key in self.oracle.entries if self.tier.state(key) is State.HELD}
        assert held == {key for key, entry in self.oracle.entries.items() if not entry.idle}
        for group in range(3):
            owned = sum(entry.group == group for entry in self.oracle.entries.values())
            assert self.tier.free.resident[group] == owned


shares = st.fixed_dictionaries(
    {},
    optional={
        1: st.builds(Share, st.integers(0, 6), st.integers(6, 12).map(float)),
        2: st.builds(Share, st.integers(0, 6), st.just(math.inf)),
    },
)


@given(st.integers(0, 2**32), st.integers(6, 24), shares, st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_victims_of_a_naive_oracle(
    seed: int, capacity: int, shares: dict[int, Share], protect: bool
) -> None:
    traffic = Traffic(seed, capacity, shares, "lru", protect)
    for _ in range(250):
        traffic.step()


@given(st.integers(0, 2**32), st.integers(6, 24), shares, st.booleans())
@settings(max_examples=80, deadline=None)
def test_an_order_that_learns_frees_as_many_and_nothing_in_use(
    seed: int, capacity: int, shares: dict[int, Share], protect: bool
) -> None:
    traffic = Traffic(seed, capacity, shares, "reuse", protect)
    for _ in range(250):
        traffic.step()


def test_the_traffic_evicts() -> None:
    traffic = Traffic(1, 12, {1: Share(2, 6)}, "lru", True)
    for _ in range(2000):
        traffic.step()
    assert traffic.evicted > 300
    assert {cause for cause, _ in traffic.tier.free.evictions} == {"capacity", "quota", "ttl"}


def lru(capacity: int) -> KeyedBlocks:
    return KeyedBlocks(capacity, RankedOrder(capacity, lambda key: ((float(key), 0.0), key)))


def filled(tier: KeyedBlocks, keys: list[int], *protections: Protection) -> Batch:
    batch = Batch()
    for index, key in enumerate(keys):
        tier.insert(key, batch, EVERYBODY_ELSE, protections[index] if protections else DEFAULT)
        tier.idle(key)
    return batch


def test_a_chunk_is_kept_as_well_as_those_behind_it() -> None:
    tier = lru(4)
    filled(tier, [1, 2, 3], Protection(10), Protection(80), Protection(35))
    tier.finish([1, 2, 3], [], 1.0)
    filled(tier, [9], Protection(50))
    assert tier.evict(4, set(), 2.0) == [3, 9, 1, 2]


def test_a_head_rises_when_another_request_has_raised_what_is_behind_it() -> None:
    """That request had the head from the device, so the tier did not see it use the head."""
    tier = lru(4)
    filled(tier, [1, 2, 3])
    filled(tier, [9], Protection(50))
    tier.finish([1, 2, 3], [], 1.0)
    assert tier.evict(0, set(), 1.0) == []
    tier.finish([2], [2], 2.0, [Protection(60)])
    assert tier.evict(0, set(), 2.0) == []
    tier.hold(3, 3.0)
    tier.idle(3)
    assert tier.evict(4, set(), 4.0) == [3, 9, 1, 2]


def test_protection_ends_while_the_chunk_is_idle() -> None:
    tier = lru(3)
    filled(tier, [1], Protection(35, 90, 10.0))
    filled(tier, [2])
    tier.finish([1], [], 0.0)
    assert tier.evict(1, set(), 5.0) == [2]
    filled(tier, [3])
    assert tier.evict(1, set(), 11.0) == [1]
    assert tier.free.evictions == {("capacity", 0): 1, ("ttl", 0): 1}


def test_a_number_that_passed_to_another_key_is_not_mistaken_for_the_first() -> None:
    """Chunks of a finished request leave one by one, and others get their numbers, before its last ones are
    written."""
    tier = lru(3)
    batch = filled(tier, [1, 2])
    tier.insert(3, batch, EVERYBODY_ELSE, Protection(90))
    tier.finish([1, 2, 3], [], 1.0, [Protection(20), Protection(20), Protection(90)])
    assert tier.evict(2, set(), 2.0) == [1, 2]
    filled(tier, [4, 5], Protection(20), Protection(20))
    tier.idle(3)
    assert tier.evict(2, set(), 3.0) == [4, 5], "they are not the parents of 3"


def test_an_order_that_learns_spares_running_requests_while_it_can() -> None:
    tier = KeyedBlocks(4, make_order("reuse", 4))
    filled(tier, [1, 2])
    filled(tier, [3, 4])
    tier.finish([3, 4], [], 1.0)
    assert tier.evict(1, set(), 2.0) == [4], "of the finished one, the deepest"
    victims = tier.evict(3, set(), 3.0)
    assert victims is not None and sorted(map(int, victims)) == [1, 2, 3], "running ones are the last resort"
    assert tier.evict(1, set(), 3.0) is None


def test_a_load_is_one_hit_and_what_is_known_elsewhere_is_kept() -> None:
    order = make_order("reuse", 4)
    tier = KeyedBlocks(4, order)
    filled(tier, [1, 2])
    tier.finish([1, 2], [], 0.0)
    tier.hold(1, 30.0)
    tier.idle(1)
    before = sum(order.table.hits)  # type: ignore[attr-defined]
    assert before == 1.0
    told = Finish(num_prompt=1, arrival=Arrival(0.0, known=2, pace=30.0, turns=1), stop=Stop.TOOL_CALL)
    tier.finish([1], [1], 31.0, None, told)
    assert sum(order.table.hits) == before  # type: ignore[attr-defined]
    assert tier.evict(1, set(), 32.0) == [2], "1 was used later, and is 2's parent"


def test_it_says_what_is_wrong() -> None:
    tier = lru(1)
    filled(tier, [1])
    with pytest.raises(ValueError, match="in the tier already"):
        tier.insert(1, Batch())
    with pytest.raises(ValueError, match="all 1 places are taken"):
        tier.insert(2, Batch())
    with pytest.raises(KeyError):
        tier.idle(2)
