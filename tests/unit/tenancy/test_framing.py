from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.tenancy.framing import frame, unframe

pytestmark = pytest.mark.unit

fields = st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=20)), max_size=6)


def as_bytes(field: str | bytes) -> bytes:
    return field.encode("utf-8", "surrogatepass") if isinstance(field, str) else field


@given(fields)
def test_a_frame_decodes_to_its_fields(parts: list[str | bytes]) -> None:
    assert unframe(frame(*parts)) == [as_bytes(part) for part in parts]


@given(fields, fields)
def test_two_field_lists_frame_alike_only_if_they_are_equal(
    left: list[str | bytes], right: list[str | bytes]
) -> None:
    same = [as_bytes(part) for part in left] == [as_bytes(part) for part in right]
    assert (frame(*left) == frame(*right)) == same


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("org_1", "2345"), ("org_12345", "")),
        (("org_1", "2345"), ("org_12", "345")),
        (("a", "", "b"), ("a", "b", "")),
        (("a\x00b",), ("a", "b")),
        (("",), ()),
        (("a",), ("a", "")),
        (("\x00\x00\x00\x01a",), ("a",)),
    ],
)
def test_adversarial_pairs_differ(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    assert frame(*left) != frame(*right)


def test_the_encoding_is_fixed() -> None:
    assert frame("ab", b"") == b"\x00\x00\x00\x02\x00\x00\x00\x02ab\x00\x00\x00\x00"


@given(st.binary(max_size=60))
def test_arbitrary_bytes_decode_or_raise_value_error(data: bytes) -> None:
    try:
        parts = unframe(data)
    except ValueError:
        return
    assert frame(*parts) == data


def test_lone_surrogates_from_json_do_not_break_framing() -> None:
    assert unframe(frame("\ud800")) == [b"\xed\xa0\x80"]
