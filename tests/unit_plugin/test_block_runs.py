"""Runs of blocks with one grant against the list with a grant per block."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.cache.grant import Grant
from vllm_ext.cache.retention import Retention, RetentionRange
from vllm_ext_plugin.retention.requests import RequestView, block_runs

pytestmark = pytest.mark.unit

GRANTS = [Grant.for_good(35), Grant.for_good(10), Grant(90, 60.0, 35), Grant(90, 5.0, 35), Grant.for_good(60)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from(GRANTS)), max_size=6),
    decoded=st.sampled_from(GRANTS),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_runs_say_what_each_block_gets(
    sizes: list[tuple[int, Grant]], decoded: Grant, block_size: int
) -> None:
    ranges, start = [], 0
    for size, grant in sizes:
        ranges.append(RetentionRange(start, start + size, grant, "some", None))
        start += size
    retention = Retention(start, tuple(ranges), RetentionRange(start, start, decoded, "some", None))
    count = start // block_size + 3
    runs = block_runs(retention, block_size)
    found: list[Grant] = []
    for stop, grant in runs:
        found += [grant] * (min(stop, count) - len(found))
    assert found == retention.per_block(block_size, count)
    assert all(first[1] != second[1] for first, second in pairwise(runs))

    view = RequestView(0, runs, start // block_size, "acme")
    covered = view.protections(0, count, 100.0)
    assert [first for first, _, _ in covered] == [0, *(stop for _, stop, _ in covered[:-1])]
    assert covered[-1][1] == count
    for first, stop, protection in covered:
        for index in range(first, stop):
            grant = found[index]
            assert max(protection.base, protection.boost) == grant.priority
            assert (protection.boost > 0) == (grant.ttl is not None)
