"""The CPU offload tier evicts by the policy: vLLM's `CachePolicy` over `KeyedBlocks`.

vLLM loads this module when it builds the tier (`eviction_policy: vllm_ext`). Our policy is vLLM's own LRU
with another choice of victims: LRU's books are kept all the time, give the ranks where the policy says `lru`,
and are what remains when our code fails.

vLLM builds the tier while it builds the scheduler, so before our features exist: a new policy waits in
`_unclaimed` and is plain LRU until `OffloadTiers` takes it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import order_request_keys
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from vllm_ext.cache.free_blocks import DEFAULT, EVERYBODY_ELSE, Protection, cover
from vllm_ext.cache.keyed_blocks import Batch, Finish, KeyedBlocks
from vllm_ext.cache.order import EvictionOrder, make_order
from vllm_ext.cache.ranked import Rank, RankedOrder
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.patching import patch
from vllm_ext_plugin.retention import offload_config
from vllm_ext_plugin.retention.requests import Requests, RequestView

logger = logging.getLogger("vllm_ext")


class _Unclaimed(threading.local):
    """Policies that this thread has built and no scheduler has taken yet."""

    def __init__(self) -> None:
        self.policies: list[weakref.ref[OffloadPolicy]] = []


_unclaimed = _Unclaimed()


class CarriedRequest:
    """In a `ReqContext`'s scratch space: the request that it is for."""

    __slots__ = ("request",)

    def __init__(self, request: Any) -> None:
        self.request = request


def carry_requests() -> None:
    """Let every context that vLLM makes for a request name the request. Idempotent.

    Raises:
        AttributeError: this vLLM makes them elsewhere.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    patch(scheduler, "_create_req_context", _with_request)


def _with_request(original: Any) -> Any:
    def _create_req_context(req: Any, *args: Any, **kwargs: Any) -> Any:
        context = original(req, *args, **kwargs)
        context.set_state(CarriedRequest(req))
        return context

    return _create_req_context


class Offer:
    """Keys that a request wants to store and that are not in the tier."""

    __slots__ = ("batch", "context", "view")

    def __init__(self, context: Any, view: RequestView | None) -> None:
        self.context = context
        self.view = view
        self.batch = Batch()


class OffloadPolicy(LRUCachePolicy):  # type: ignore[misc]
    """One tier's eviction policy.

    Args:
        cache_capacity: chunks that the tier holds.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: KeyedBlocks | None = None
        """None: not taken yet, or switched off."""
        self.past_evictions: Counter[tuple[str, int]] = Counter()
        """Those before the last reset of the tier: (cause, share group) -> chunks."""
        self._offers: dict[Any, Offer] = {}
        _unclaimed.policies.append(weakref.ref(self))

    def take(
        self,
        requests: Requests,
        order_name: str,
        chunk_tokens: int,
        faults: Faults,
        clock: Callable[[], float],
    ) -> None:
        """From now on decide by the policy in force. The tier is empty still.

        Args:
            requests: the scheduler's.
            order_name: `lru` or `reuse`.
            chunk_tokens: tokens of one key.
            faults: counts our own exceptions.
            clock: seconds, never backwards.
        """
        self._requests = requests
        self._order_name = order_name
        self._chunk_tokens = chunk_tokens
        self._faults = faults
        self._clock = clock
        self.blocks = self._new_blocks()

    def set_shares(self) -> None:
        """Take over a reloaded policy's shares, or those of a tenant that was not seen before."""
        if self.blocks is not None:
            self.blocks.free.set_shares(self._requests.shares(self.cache_capacity))

    # What vLLM tells (`CachePolicy`)

    def insert(self, key: Any, chunk: Any, *context: Any) -> None:
        super().insert(key, chunk, *context)  # the context is there since vLLM 0.33
        self._guarded("offload_insert", self._inserted, key, *context)

    def remove(self, key: Any) -> None:
        super().remove(key)
        self._guarded("offload_remove", self._removed, key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        keys = list(keys)
        super().touch(keys, req_context)
        self._guarded("offload_touch", self._used, keys)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        keys = list(keys)
        super().on_store_miss(keys, req_context)
        self._guarded("offload_offer", self._offered, keys, req_context)

    def on_request_access(self, keys: Iterable[Any], req_context: Any) -> None:
        """vLLM 0.33 calls it; earlier ones do not have it."""
        keys = list(keys)
        super().on_request_access(keys, req_context)
        self._guarded("offload_touch", self._used, keys)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        self._guarded("offload_finish", self._finished, key_groups, reused_keys, req_context)

    def mark_evictable(self, key: Any) -> None:
        super().mark_evictable(key)
        self._guarded("offload_idle", self._idle, key)

    def mark_non_evictable(self, key: Any) -> None:
        super().mark_non_evictable(key)
        self._guarded("offload_hold", self._held, key)

    def clear(self) -> None:
        super().clear()
        self._guarded("offload_reset", self._cleared)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        if self.blocks is None or n == 0:
            return super().evict(n, protected)
        try:
            victims = self._victims(n, protected)
        except Exception:
            self._switch_off("offload_evict")
            return super().evict(n, protected)
        if victims is None:
            return None
        chunks = [self.chunks[key] for key in victims]
        for key in victims:
            super().remove(key)
        return list(zip(victims, chunks, strict=True))

    # What the core hears

    def _inserted(self, key: Any, context: Any = None) -> None:
        assert self.blocks is not None
        offer = self._offers.pop(key, None) or Offer(context, self._view(context))
        group, protection, view = EVERYBODY_ELSE, DEFAULT, offer.view
        if view is not None:
            group = view.group
            protection = self._protection(view, self._position(offer.context, key), self._clock())
        self.blocks.insert(key, offer.batch, group, protection)

    def _offered(self, keys: Sequence[Any], context: Any) -> None:
        offer = Offer(context, self._view(context))
        for key in keys:
            self._offers[key] = offer

    def _removed(self, key: Any) -> None:
        assert self.blocks is not None
        self.blocks.discard(key)

    def _used(self, keys: Sequence[Any]) -> None:
        assert self.blocks is not None
        self.blocks.used(keys)

    def _idle(self, key: Any) -> None:
        assert self.blocks is not None
        self.blocks.idle(key)

    def _held(self, key: Any) -> None:
        assert self.blocks is not None
        self.blocks.hold(key, self._clock())

    def _finished(self, key_groups: Sequence[Sequence[Any]], reused: set[Any], context: Any) -> None:
        assert self.blocks is not None
        if self._offers:  # what it could not store: nobody will
            self._offers = {key: offer for key, offer in self._offers.items() if offer.context is not context}
        keys = order_request_keys(key_groups, context)
        now = self._clock()
        view = self._view(context)
        if view is None:
            self.blocks.finish(keys, reused, now)
            return
        positions = [self._position(context, key) for key in keys]
        protections = (
            None if view.plain else [self._protection(view, position, now) for position in positions]
        )
        request = context.get_state(CarriedRequest).request
        facts = self._requests.departure(request, now)
        arrival = facts["arrival"]
        facts["arrival"] = replace(
            arrival, known=arrival.known * self._requests.block_size // self._chunk_tokens
        )
        facts["num_prompt"] = sum(position <= request.num_prompt_tokens for position in positions)
        self.blocks.finish(keys, reused, now, protections, Finish(**facts))

    def _victims(self, count: int, protected: set[Any]) -> list[Any] | None:
        """Checked, so that a mistake of ours frees nothing that vLLM still uses.

        Raises:
            RuntimeError: the core chose what may not go.
        """
        assert self.blocks is not None
        asking = next((self._offers[key].view for key in protected if key in self._offers), None)
        group = EVERYBODY_ELSE if asking is None else asking.group
        victims = self.blocks.evict(count, protected, self._clock(), group)
        if victims is None:
            return None
        wrong = [
            key
            for key in victims
            if key in protected or (chunk := self.chunks.get(key)) is None or chunk.ref_cnt != 0
        ]
        if wrong or len(set(victims)) != count:
            raise RuntimeError(f"{len(victims)} victims for {count}, {len(wrong)} of them in use")
        return victims

    def _cleared(self) -> None:
        assert self.blocks is not None
        self.past_evictions.update(self.blocks.free.evictions)
        for group, resident in self.blocks.free.resident.items():
            self.past_evictions["reset", group] += resident
        self._offers = {}
        self.blocks = self._new_blocks()

    # Translation

    def _view(self, context: Any) -> RequestView | None:
        carried = context.get_state(CarriedRequest) if context is not None else None
        if carried is None:
            return None
        view = self._requests.view(carried.request)
        if view.group and self.blocks is not None and view.group not in self.blocks.free.shares:
            self.set_shares()
        return view

    def _position(self, context: Any, key: Any) -> int:
        """Where in its request the key's tokens end. Unknown: at the head."""
        position = context.get_offload_key_position(key) if context is not None else None
        return self._chunk_tokens if position is None else int(position)

    def _protection(self, view: RequestView, end: int, now: float) -> Protection:
        """Of a chunk whose tokens end at `end`: what covers all blocks in it."""
        if view.plain:
            return DEFAULT
        size = self._requests.block_size
        blocks = range(max(end - self._chunk_tokens, 0) // size, max(-(-end // size), 1))
        return reduce(
            lambda one, other: cover(one, other, now), (view.protection(block, now) for block in blocks)
        )

    def _rank_of(self, key: Any) -> Rank:
        rank = self._ranks[key]  # a number up to vLLM 0.32, a pair since
        score = (float(rank[0]), float(rank[1])) if isinstance(rank, tuple) else (float(rank), 0.0)
        return score, key

    def _new_blocks(self) -> KeyedBlocks:
        capacity = self.cache_capacity
        order: EvictionOrder = (
            RankedOrder(capacity, self._rank_of)
            if self._order_name == "lru"
            else make_order(self._order_name, capacity)
        )
        return KeyedBlocks(capacity, order, self._requests.shares(capacity))

    # Health

    def _guarded(self, part: str, call: Callable[..., None], *args: Any) -> None:
        if self.blocks is None:
            return
        try:
            call(*args)
        except Exception:
            self._switch_off(part)

    def _switch_off(self, part: str) -> None:
        """Back to vLLM's LRU, whose books are complete. Call inside `except`."""
        self._faults.caught(part)
        self.blocks = None
        self._offers = {}
        logger.error("vllm_ext: the CPU offload tier evicts by vLLM's own LRU until a restart")


class OffloadTiers:
    """The CPU offload tiers of one scheduler. Make it in the thread that built the scheduler.

    Args:
        config: vLLM's `VllmConfig`.
        requests: the scheduler's.
        order_name: `lru` or `reuse`.
        faults: counts our own exceptions.
        clock: seconds, never backwards.
    """

    def __init__(
        self, config: Any, requests: Requests, order_name: str, faults: Faults, clock: Callable[[], float]
    ) -> None:
        self._requests = requests
        self.policies = [policy for one in _unclaimed.policies if (policy := one()) is not None]
        _unclaimed.policies.clear()
        if not self.policies:
            return
        try:
            carry_requests()
        except AttributeError:
            faults.caught("offload_requests")
        sizes = [
            offload_config.tokens_per_chunk(extra, requests.block_size)
            for extra in offload_config.ours(config)
        ]
        for index, policy in enumerate(self.policies):
            size = sizes[min(index, len(sizes) - 1)] if sizes else requests.block_size
            policy.take(requests, order_name, size, faults, clock)
            logger.info(
                "vllm_ext: retention in the CPU offload tier: order %s, %d chunks of %d tokens",
                order_name,
                policy.cache_capacity,
                size,
            )

    def set_shares(self) -> None:
        """Take over a reloaded policy's shares."""
        for policy in self.policies:
            policy.set_shares()

    def evictions(self) -> Counter[tuple[str, str]]:
        """(cause, share group's name) -> chunks so far; causes as on the device."""
        found: Counter[tuple[str, str]] = Counter()
        for policy in self.policies:
            present = policy.blocks.free.evictions if policy.blocks is not None else {}
            for (cause, group), chunks in (policy.past_evictions + Counter(present)).items():
                found[cause, self._name(group)] += chunks
        return found

    def resident(self) -> Counter[str]:
        """Share group's name -> chunks in the tier."""
        found: Counter[str] = Counter()
        for policy in self.policies:
            if policy.blocks is not None:
                for group, chunks in policy.blocks.free.resident.items():
                    found[self._name(group)] += chunks
        return found

    @property
    def on(self) -> bool:
        """Whether every tier still evicts by the policy."""
        return all(policy.blocks is not None for policy in self.policies)

    def _name(self, group: int) -> str:
        return self._requests.names.get(group, "other")
