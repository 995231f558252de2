"""What the engine counts of its cache: plain numbers in bounded memory, read when `/metrics` is asked for.

Everything that happens per block is a store into a list or an array; labels, bounds and sums are worked out
when somebody reads. No clock and no Prometheus here.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, groupby
from operator import itemgetter

from vllm_ext.cache.free_blocks import FreeBlocks
from vllm_ext.engine_totals import Report
from vllm_ext.labels import OTHER

AGE_BOUNDS = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Seconds: upper bounds of the buckets of both histograms; a last bucket takes the rest."""

TIERS = ("device", "restored", "computed")
"""Where a prompt token's KV came from: the prefix cache, a KV connector, nowhere."""

MAX_SCANNED = 65_536
"""Blocks looked at per reading of the residents: of a larger pool every second, third, … block stands for its
neighbours, so that a reading never holds up a step for more than some milliseconds.
"""

OTHER_LEVEL = "other"
"""Label of priorities that the policy does not name (a client's wish)."""


class Spans:
    """A histogram of seconds, one per tenant."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self._sums: dict[int, float] = {}

    def add(self, tenant: int, seconds: float, count: int) -> None:
        counts = self._counts.get(tenant)
        if counts is None:
            counts = self._counts[tenant] = [0] * (len(AGE_BOUNDS) + 1)
            self._sums[tenant] = 0.0
        counts[bisect_left(AGE_BOUNDS, seconds)] += count
        self._sums[tenant] += seconds * count

    def report(self, kind: str, tenants: Sequence[str]) -> Report:
        return {
            kind: [
                ([tenants[tenant], str(bucket)], float(count))
                for tenant, counts in self._counts.items()
                for bucket, count in enumerate(counts)
                if count
            ],
            f"{kind}_sum": [([tenants[tenant]], seconds) for tenant, seconds in self._sums.items()],
        }


class CacheTelemetry:
    """One pool's counters.

    Args:
        num_blocks: block ids are below this.
        label: bounds tenants' names to a number of label values, see `LabelCap`.
        block_bytes: bytes of KV that one block holds, over all layers.
    """

    def __init__(self, num_blocks: int, label: Callable[[str], str], block_bytes: int = 0) -> None:
        self.block_bytes = block_bytes
        self.now = 0.0
        """Seconds. Whoever makes blocks leave sets it first: one clock reading per batch."""
        self._label = label
        self._tenants: list[str] = [OTHER]
        self._numbers: dict[str, int] = {OTHER: 0}
        self.owner = array("I", bytes(4 * num_blocks))
        """The number of the tenant whose request filled a block, by block id: to be set when it is cached."""
        self._left = [0.0] * num_blocks  # when a block was last given back, by block id
        self._evictions: Counter[tuple[str, int]] = Counter()
        self._ages = Spans()
        self._distances = Spans()
        self._tokens: Counter[tuple[int, str]] = Counter()
        self.returned = 0
        """Blocks that were evicted and asked for again while the order still remembered them."""

    def tenant(self, name: str) -> int:
        """The number of a tenant's label."""
        name = self._label(name)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._tenants)
            self._tenants.append(name)
        return number

    # Events

    def moved(self, source: int, target: int) -> None:
        """The cache keeps the contents of `source` in `target` from now on."""
        self.owner[target] = self.owner[source]
        self._left[target] = self._left[source]

    def departed(self, blocks: Iterable[int], now: float) -> None:
        """Nobody uses these cached blocks any more."""
        left = self._left
        for block in blocks:
            left[block] = now

    def evicted(self, victims: Sequence[int], cause: str, expired: Sequence[int]) -> None:
        """Cached blocks were taken for others, at `now`.

        Args:
            cause: `capacity` or `quota`.
            expired: by block id, 1 for a block whose protection has run out: its cause is `ttl` then.
        """
        count = len(victims)
        if count == 1:
            victims = (victims[0], victims[0])  # `itemgetter` of one index gives no tuple
        pick = itemgetter(*victims)
        owners, times = pick(self.owner), pick(self._left)
        gone = pick(expired) if cause == "capacity" else ()
        if 1 in gone:
            causes = ["ttl" if one else cause for one in gone[:count]]
            for key, run in groupby(zip(owners, causes, times, strict=False)):
                self._evicted(*key, sum(1 for _ in run))
            return
        start = 0
        while start < count:  # neighbours mostly left together, and are one tenant's
            owner, left = owners[start], times[start]
            stop = count
            while (
                owners[start:stop].count(owner) < stop - start or times[start:stop].count(left) < stop - start
            ):
                stop = (start + stop + 1) // 2
            self._evicted(owner, cause, left, stop - start)
            start = stop

    def _evicted(self, tenant: int, cause: str, left: float, count: int) -> None:
        self._evictions[cause, tenant] += count
        self._ages.add(tenant, self.now - left, count)

    def invalidated(self, block: int) -> None:
        """A cached block's contents became invalid by themselves."""
        self._evictions["invalidated", self.owner[block]] += 1

    def reset(self, free: FreeBlocks) -> None:
        """The whole cache is dropped; `free` still says what it held."""
        for tenant, count in Counter(compress(self.owner, free.is_cached)).items():
            self._evictions["reset", tenant] += count

    def hit(self, blocks: Sequence[int], tenant: int, now: float) -> None:
        """A request of `tenant` found these blocks, which nobody used; a prefix, in the order of its tokens.

        A prefix is used whenever what is behind it is, so from its first block to its last the times run
        back: halving finds the few places where they change.
        """
        if blocks:
            self._hit(blocks, 0, len(blocks), tenant, now)

    def _hit(self, blocks: Sequence[int], start: int, stop: int, tenant: int, now: float) -> None:
        left = self._left
        first = left[blocks[start]]
        if first == left[blocks[stop - 1]]:
            self._distances.add(tenant, now - first, stop - start)
            return
        middle = (start + stop) // 2
        self._hit(blocks, start, middle, tenant, now)
        self._hit(blocks, middle, stop, tenant, now)

    def prompt(self, tenant: int, device: int, restored: int, computed: int) -> None:
        """A request's prompt was admitted; tokens by where their KV comes from, once per request."""
        tokens = self._tokens
        tokens[tenant, "device"] += device
        tokens[tenant, "restored"] += restored
        tokens[tenant, "computed"] += computed

    # Reading

    def totals(self) -> Report:
        """Running totals: what only grows."""
        tenants = self._tenants
        return {
            "cache_evictions": [
                ([tenants[tenant], cause], float(count)) for (cause, tenant), count in self._evictions.items()
            ],
            "cache_tokens": [
                ([tenants[tenant], tier], float(count)) for (tenant, tier), count in self._tokens.items()
            ],
            "cache_returned": [([], float(self.returned))],
            **self._ages.report("cache_eviction_age", tenants),
            **self._distances.report("cache_reuse_distance", tenants),
        }

    def residents(self, free: FreeBlocks, named: Iterable[int], now: float) -> Report:
        """Cached blocks and their bytes by tenant and present priority.

        Args:
            named: the priorities that the policy names; any other is `OTHER_LEVEL`.
            now: seconds.
        """
        blocks: Counter[tuple[str, str]] = Counter()
        labels = {level: str(level) for level in named}
        step = -(-len(self._left) // MAX_SCANNED)
        found = Counter(
            compress(zip(self.owner[::step], free.protection[::step], strict=True), free.is_cached[::step])
        )
        for (tenant, protection), count in found.items():
            boosted = protection.boost > protection.base and protection.expires > now
            level = protection.boost if boosted else protection.base
            blocks[self._tenants[tenant], labels.get(level, OTHER_LEVEL)] += count * step
        entries = [([*who], float(count)) for who, count in blocks.items()]
        return {
            "cache_resident_blocks": entries,
            "cache_resident_bytes": [(who, count * self.block_bytes) for who, count in entries],
        }
