"""What an eviction order is: which of the unused blocks dies next.

An *order* holds what it has learned and hands out *queues*. The caller keeps one queue per group of blocks
that it wants to drain separately (a retention level, a tenant with a quota) and one order for all of them, so
that they learn from the same traffic.

Blocks are small integers (vLLM's block ids, 0 to ``num_blocks - 1``); all facts about a block live in arrays
indexed by it. Keys (block hashes) identify contents: they are only compared and hashed.

No order reads a clock: every time is the caller's, in seconds, and never runs backwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol


class Stop(IntEnum):
    """Why a request stopped, as a hint to how soon the next turn of its conversation comes."""

    UNKNOWN = 0
    TOOL_CALL = 1
    END_TURN = 2
    LENGTH = 3


@dataclass(slots=True)
class Arrival:
    """What an order noted when a request came; the caller carries it to the request's `Departure`.

    Attributes:
        time: seconds.
        known: leading prompt blocks that were seen before, whether they are still cached or not.
        pace: seconds between the turns of this conversation, smoothed; negative where it has no past.
        turns: earlier turns of this conversation, as far as its blocks tell.
        past_hits: index of a prompt block -> earlier hits, for blocks that were evicted and come back.
    """

    time: float
    known: int = 0
    pace: float = -1.0
    turns: int = 0
    past_hits: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Departure:
    """A request gives its blocks back.

    Attributes:
        time: seconds.
        blocks: block ids in the order of their tokens: prompt first, then decoded ones.
        keys: the block's hash for each of `blocks`. Blocks without one go to `push_front` instead.
        num_prompt: how many of `blocks` hold prompt.
        arrival: what `EvictionOrder.arrive` returned for this request.
        output_tokens: decoded tokens, whether they filled blocks or not.
        stop: why it stopped.
        owner: the session, if the caller knows one (any nonzero number); only `ended` needs it.
        ended: the session is over: blocks that nobody else used are worth nothing.
    """

    time: float
    blocks: Sequence[int]
    keys: Sequence[Hashable]
    num_prompt: int
    arrival: Arrival
    output_tokens: int = 0
    stop: Stop = Stop.UNKNOWN
    owner: int = 0
    ended: bool = False


Score = tuple[float, float]
"""Comparable between queues of one order: the queue with the smallest score holds the next victim."""


class EvictionQueue(Protocol):
    """Unused blocks in the sequence in which they die."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """All blocks, the next victims first (exactly for `lru`, roughly for an order that learns)."""

    def push(self, departure: Departure, start: int = 0, stop: int | None = None) -> None:
        """`departure.blocks[start:stop]` are unused now. The deepest dies first."""

    def push_front(self, blocks: Sequence[int]) -> None:
        """Blocks that cache nothing: they die before all others, the first of them first."""

    def remove(self, block: int) -> None:
        """A request uses the block again. KeyError if the block is not here."""

    def remove_n(self, blocks: Sequence[int]) -> None:
        """`remove` for each, in one pass."""

    def withdraw(self, block: int) -> None:
        """The block leaves, but nobody used it and nothing is learned. KeyError if the block is not here."""

    def void(self) -> None:
        """The prefix cache was reset: blocks in this queue hold nothing any more. They keep their order."""

    def peek(self) -> Score | None:
        """The score of the next victim; None when empty."""

    def pop_n(self, count: int) -> list[int]:
        """The next victims, `count` or as many as there are. Their contents are forgotten."""

    def pop_before(self, count: int, rival: Score) -> list[int]:
        """As `pop_n`, of a queue that is not empty: at least one, and no further one whose score is not below
        `rival`, that of another queue's next victim.
        """


class EvictionOrder(Protocol):
    """Learned state shared by any number of queues."""

    name: str
    evictions: dict[str, int]
    """Evicted blocks so far by what chose them."""
    uses_keys: bool
    """Whether it looks at anything of a `Departure` but its time and blocks, and at missed keys: if not, a
    caller may leave the rest out.
    """

    def queue(self) -> EvictionQueue:
        """A new, empty queue."""

    def arrive(self, now: float, cached: Sequence[int], missed: Sequence[Hashable]) -> Arrival:
        """A request comes. Call it before its blocks are removed from their queues.

        Args:
            now: seconds.
            cached: blocks of its longest cached prefix, in the order of their tokens.
            missed: keys of the prompt blocks behind that prefix.
        """

    def invalidate(self, blocks: Sequence[int]) -> None:
        """The contents of these blocks, which are in no queue, became invalid without an eviction."""


def make_order(name: str, num_blocks: int, capacity: int | None = None) -> EvictionOrder:
    """The order called `name`.

    Args:
        name: `lru` or `reuse`.
        num_blocks: block ids are below this.
        capacity: blocks that the cache holds; by default `num_blocks`.

    Raises:
        ValueError: no order has that name.
    """
    if name == "lru":
        from vllm_ext.cache.lru import LruOrder

        return LruOrder(num_blocks)
    if name == "reuse":
        from vllm_ext.cache.reuse import ReuseOrder

        return ReuseOrder(num_blocks, capacity)
    raise ValueError(f"unknown eviction order {name!r}: choose one of {', '.join(ORDERS)}")


ORDERS = ("lru", "reuse")
