"""A cache tier that is addressed by key, over the same core as the device's blocks.

Every key that the tier holds gets a small number, its block, and `FreeBlocks` decides among blocks: share
groups, priorities that end, and the order. A key is in one of four states:

- *held*: a transfer reads or writes it. Never a victim.
- *running*: idle, but a running request stored or loaded it. An order that learns leaves it alone until the
  request is finished (on the device it would be in use) and falls back on it where there is no other victim;
  with ranks it is an ordinary victim.
- *settling*: idle, and about to enter the queues. Put off until somebody asks, because transfers end one by
  one and a request's blocks belong together.
- *free*: in the queues of `FreeBlocks`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from vllm_ext.cache.free_blocks import DEFAULT, EVERYBODY_ELSE, FreeBlocks, Protection, Share, cover
from vllm_ext.cache.order import Arrival, Departure, EvictionOrder, Stop
from vllm_ext.cache.ranked import RankedOrder


class State(IntEnum):
    """What may happen to a key; see the module's text."""

    HELD = 0
    RUNNING = 1
    SETTLING = 2
    FREE = 3


@dataclass(slots=True, eq=False)
class Batch:
    """Keys that one request stored or used, in the order of their tokens.

    Attributes:
        blocks: of these keys when they were added; a block's number may have passed on since.
        keys, fills: parallel to `blocks`; `fills` tells what a block holds from what it held before.
        departure: the request's facts; None while it runs.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[Hashable] = field(default_factory=list)
    fills: list[int] = field(default_factory=list)
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """What is known of a finished request; the fields are those of `Departure`.

    Attributes:
        num_prompt: how many of its keys hold prompt; None: all.
        arrival: what is known of its conversation from elsewhere, `known` in keys; None: nothing.
    """

    num_prompt: int | None = None
    arrival: Arrival | None = None
    output_tokens: int = 0
    stop: Stop = Stop.UNKNOWN
    owner: int = 0
    ended: bool = False


PLAIN = Finish()


class KeyedBlocks:
    """The keys in one tier.

    Args:
        capacity: keys that the tier holds at most.
        order: decides within one priority level; made for `capacity` blocks.
        shares: share group -> its limits in keys.
    """

    def __init__(self, capacity: int, order: EvictionOrder, shares: dict[int, Share] | None = None) -> None:
        self.capacity = capacity
        self.order = order
        self.free = FreeBlocks(capacity, order, shares)
        self._ranked = isinstance(order, RankedOrder)
        self._block_of: dict[Hashable, int] = {}
        self._unnumbered = list(range(capacity - 1, -1, -1))
        # Facts by block.
        self._key_of: list[Hashable | None] = [None] * capacity
        self._fill = [0] * capacity  # counts what it has held
        self._state = [State.HELD] * capacity
        self._in_use = bytearray(capacity)  # by a request that is not finished
        self._origin = [(Batch(), 0)] * capacity
        self._running: dict[int, None] = {}  # sets that keep their sequence
        self._settling: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._block_of

    def state(self, key: Hashable) -> State:
        """KeyError if the key is not here."""
        return self._state[self._block_of[key]]

    # Contents

    def insert(
        self, key: Hashable, batch: Batch, group: int = EVERYBODY_ELSE, protection: Protection = DEFAULT
    ) -> None:
        """A key that is held until `idle`; it becomes the last of `batch`.

        Raises:
            ValueError: the key is here, or the tier is full.
        """
        if key in self._block_of:
            raise ValueError(f"key {key!r} is in the tier already")
        if not self._unnumbered:
            raise ValueError(f"all {self.capacity} places are taken")
        block = self._block_of[key] = self._unnumbered.pop()
        self._key_of[block] = key
        self._state[block] = State.HELD
        self._in_use[block] = 1
        self._origin[block] = (batch, len(batch.blocks))
        batch.blocks.append(block)
        batch.keys.append(key)
        batch.fills.append(self._fill[block])
        self.free.cached(block, group, protection)

    def discard(self, key: Hashable) -> None:
        """The key was never written: its transfer failed. KeyError if it is not here."""
        block = self._block_of[key]
        self._move(block, State.HELD)
        self.free.dropped(block)
        self._forget(block)

    # Use

    def hold(self, key: Hashable, now: float) -> None:
        """A transfer uses the key from `now` on."""
        block = self._block_of[key]
        if self._state[block] is State.SETTLING:
            self._settle(self._settling, now)
        if self._state[block] is State.FREE:
            self._in_use[block] = 1
        self._move(block, State.HELD)

    def idle(self, key: Hashable) -> None:
        """No transfer uses the key any more."""
        block = self._block_of[key]
        self._move(block, State.RUNNING if self._in_use[block] else State.SETTLING)

    def used(self, keys: Iterable[Hashable]) -> None:
        """The ranks of these keys changed. An order that learns hears of uses by `hold` and `finish`."""
        if not self._ranked:
            return
        for key in keys:
            block = self._block_of.get(key)
            if block is not None and self._state[block] is State.FREE:
                self._move(block, State.SETTLING)

    def finish(
        self,
        keys: Sequence[Hashable],
        reused: Collection[Hashable],
        now: float,
        protections: Sequence[Protection] | None = None,
        finish: Finish = PLAIN,
    ) -> None:
        """A request is over.

        Args:
            keys: what it stored or used, in the order of their tokens. Those that have left meanwhile are
                ignored.
            reused: those of `keys` that were here before it.
            now: seconds.
            protections: what it wants for each of `keys`; None: nothing.
            finish: its facts.
        """
        self._settle(self._settling, now)
        kept = [index for index, key in enumerate(keys) if key in self._block_of]
        blocks = [self._block_of[keys[index]] for index in kept]
        batch = Batch(blocks, [keys[index] for index in kept], [self._fill[block] for block in blocks])
        seen = self._arrive(keys, reused, batch, now)
        prompt = len(keys) if finish.num_prompt is None else finish.num_prompt
        batch.departure = Departure(
            now,
            batch.blocks,
            batch.keys,
            num_prompt=sum(index < prompt for index in kept),
            arrival=_informed(seen, finish.arrival),
            output_tokens=finish.output_tokens,
            stop=finish.stop,
            owner=finish.owner,
            ended=finish.ended,
        )
        for position, (index, block) in enumerate(zip(kept, batch.blocks, strict=True)):
            held = self._state[block] is State.HELD
            self._move(block, State.HELD)
            if protections is not None:
                self.free.protect(block, protections[index], now)
            self._in_use[block] = 0
            self._origin[block] = (batch, position)
            if not held:
                self._move(block, State.SETTLING)

    # Victims

    def evict(
        self, count: int, protected: Collection[Hashable], now: float, group: int = EVERYBODY_ELSE
    ) -> list[Hashable] | None:
        """Exactly `count` keys that leave the tier for a request of `group`, the first victim first.

        Args:
            protected: keys that must stay: the ones that this request offers itself.

        Returns:
            None if fewer can go; none has gone then.
        """
        spared = [block for key in protected if (block := self._block_of.get(key)) is not None]
        spared = [block for block in spared if self._state[block] is not State.HELD]
        evictable = len(self.free) + len(self._running) + len(self._settling)
        if count > evictable - len(spared):
            return None
        self._settle(self._settling, now)
        for block in spared:
            self._move(block, State.HELD)
        if self._ranked or count > len(self.free):
            self._settle(self._running, now)
        victims = []
        for block in self.free.pop(count, now, group):
            key = self._key_of[block]
            assert key is not None
            victims.append(key)
            self._forget(block)
        for block in spared:
            self._in_use[block] = 1
            self._move(block, State.RUNNING)
        return victims

    # How it works

    def _arrive(
        self, keys: Sequence[Hashable], reused: Collection[Hashable], batch: Batch, now: float
    ) -> Arrival:
        """What the order says of the request, told late: only now is it known what it used. `past_hits` by
        place in `batch`."""
        hits = [block for block, key in zip(batch.blocks, batch.keys, strict=True) if key in reused]
        missed = [key for key in keys if key not in reused]
        seen = self.order.arrive(now, hits, missed)
        if seen.past_hits:
            place = {key: position for position, key in enumerate(batch.keys)}
            by_key = {missed[index - len(hits)]: past for index, past in seen.past_hits.items()}
            seen.past_hits = {place[key]: past for key, past in by_key.items() if key in place}
        return seen

    def _move(self, block: int, state: State) -> None:
        """To any state but FREE."""
        before = self._state[block]
        if before is State.FREE:
            self.free.take(block)
        elif before is State.RUNNING:
            del self._running[block]
        elif before is State.SETTLING:
            del self._settling[block]
        self._state[block] = state
        if state is State.RUNNING:
            self._running[block] = None
        elif state is State.SETTLING:
            self._settling[block] = None

    def _settle(self, blocks: dict[int, None], now: float) -> None:
        """All of them enter the queues, those of one batch together."""
        batches: dict[Batch, set[int]] = {}
        for block in blocks:
            batches.setdefault(self._origin[block][0], set()).add(block)
        blocks.clear()
        self.free.expire(now)
        for batch, settling in batches.items():
            departure = self._departure(batch, now)
            if len(settling) < len(departure.blocks):
                self._take_uncovered(departure, settling)
            self.free.release(
                departure, [index for index, block in enumerate(departure.blocks) if block in settling]
            )
            for block in settling:
                self._state[block] = State.FREE

    def _take_uncovered(self, departure: Departure, settling: set[int]) -> None:
        """Blocks of it that wait in a queue already, and must rise for what is behind them now, settle again:
        another request has raised its own part, and had the head of its prompt from elsewhere.
        """
        below: Protection | None = None
        for block in reversed(departure.blocks):
            held = self.free.protection[block]
            own = Protection(held.base, held.boost, held.expires)
            covered = own if below is None else cover(own, below, departure.time)
            if covered is not own and self._state[block] is State.FREE and block not in settling:
                self.free.take(block)
                settling.add(block)
            below = covered

    def _departure(self, batch: Batch, now: float) -> Departure:
        """Of what is left of the batch: other keys of it may be gone, and their numbers reused."""
        kept = [
            index
            for index, (block, fill) in enumerate(zip(batch.blocks, batch.fills, strict=True))
            if self._fill[block] == fill
        ]
        facts = batch.departure or Departure(now, batch.blocks, batch.keys, len(batch.keys), Arrival(now))
        if len(kept) == len(batch.blocks) and batch.departure is not None:
            return replace(facts, time=now)
        past = facts.arrival.past_hits
        past = {position: past[index] for position, index in enumerate(kept) if index in past}
        return replace(
            facts,
            time=now,
            blocks=[batch.blocks[index] for index in kept],
            keys=[batch.keys[index] for index in kept],
            num_prompt=sum(index < facts.num_prompt for index in kept),
            arrival=replace(facts.arrival, past_hits=past),
        )

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        self._fill[block] += 1
        self._state[block] = State.HELD
        self._unnumbered.append(block)


def _informed(seen: Arrival, elsewhere: Arrival | None) -> Arrival:
    """The tier's own view, and where it has none of the conversation's past, another's."""
    if elsewhere is None:
        return seen
    known = max(seen.known, elsewhere.known)
    if seen.pace >= 0:
        return replace(seen, known=known)
    return replace(seen, known=known, pace=elsewhere.pace, turns=elsewhere.turns)
