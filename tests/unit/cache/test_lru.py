"""`lru` against the plainest model: a Python list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache import Arrival, Departure, make_order
from vllm_ext.cache.lru import LruOrder

pytestmark = pytest.mark.unit

BLOCKS = 24


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_same_sequence_as_a_list(data: st.DataObject) -> None:
    order = LruOrder(BLOCKS)
    queue, model = order.queue(), []
    outside = list(range(BLOCKS))
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["push", "front", "remove", "pop"]))
        if action in ("push", "front") and outside:
            count = data.draw(st.integers(1, len(outside)))
            blocks, outside = outside[:count], outside[count:]
            if action == "push":
                queue.push(Departure(0.0, blocks, blocks, count, Arrival(0.0)))
                model += reversed(blocks)
            else:
                queue.push_front(blocks)
                model[:0] = blocks
        elif action == "remove" and model:
            block = data.draw(st.sampled_from(model))
            model.remove(block)
            queue.remove(block)
            outside.append(block)
        elif action == "pop":
            count = data.draw(st.integers(0, BLOCKS))
            assert queue.pop_n(count) == model[:count]
            outside += model[:count]
            del model[:count]
        assert list(queue) == model
        assert len(queue) == len(model)
    assert (queue.peek() is None) == (not model)


def test_part_of_a_departure() -> None:
    queue = LruOrder(8).queue()
    queue.push(Departure(0.0, [3, 5, 1, 2], "abcd", 4, Arrival(0.0)), 1, 3)
    assert queue.pop_n(9) == [1, 5]


def test_fronts_of_queues_compare_by_age() -> None:
    order = LruOrder(8)
    first, second = order.queue(), order.queue()
    first.push(Departure(0.0, [0, 1], "ab", 2, Arrival(0.0)))
    second.push(Departure(1.0, [2], "c", 1, Arrival(0.0)))
    assert first.peek() < second.peek()  # type: ignore[operator]
    first.pop_n(2)
    first.push(Departure(2.0, [0], "a", 1, Arrival(0.0)))
    assert first.peek() > second.peek()  # type: ignore[operator]
    first.push_front([5])
    assert first.peek() < second.peek()  # type: ignore[operator]


def test_after_a_cursor() -> None:
    queue = LruOrder(8).queue()
    queue.append_n([4, 2, 6])
    assert list(queue.after(None)) == [4, 2, 6]
    assert list(queue.after(2)) == [6]


def test_errors_name_the_block_and_the_orders() -> None:
    queue = LruOrder(8).queue()
    with pytest.raises(KeyError, match="block 3"):
        queue.remove(3)
    with pytest.raises(ValueError, match=r"'fifo'.*lru, reuse"):
        make_order("fifo", 8)
