"""YAML with places: what is read, what is refused, and where it points."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.policy.units import parse_duration, parse_size
from vllm_ext.policy.yaml_source import find, plain_value, read_yaml

pytestmark = pytest.mark.unit


def test_values_and_places() -> None:
    document = read_yaml("a:\n  b: [1, 'x']\n  c: &n text\nd: *n\n")
    assert document.problems == []
    assert document.value == {"a": {"b": (1, "x"), "c": "text"}, "d": "text"}
    assert document.position(("a", "b")) == (2, 3)
    assert document.position(("a", "b", 1)) == (2, 10)
    assert document.value_position(("a", "c")) == (3, 9)
    assert document.position(("a", "nothing")) is None
    assert document.nearest_position(("a", "c", "x", "y")) == (3, 9)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", False), ("No", False), ("on", True), ("true", True), ("~", None), ("", None), ("12", 12),
        ("007", 7), ("-1.5", -1.5), ("1e3", 1000.0), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"), ("0x1f", "0x1f"), ("9" * 40, float("9" * 40)),
    ],
)  # fmt: skip
def test_plain_scalars(text: str, value: object) -> None:
    assert plain_value(text) == value
    assert type(plain_value(text)) is type(value)


def test_merge_keys_fill_what_is_missing() -> None:
    document = read_yaml("base: &b {x: 1, y: 2}\nmore: &m {z: 3, x: 9}\nuse:\n  <<: [*b, *m]\n  y: 5\n")
    assert document.value["use"] == {"y": 5, "x": 1, "z": 3}
    assert document.position(("use", "x")) == (1, 11)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\n\tb: 2", 2, 1, "tabs"),
        ("a:\n\tb: 2", 2, 1, "tabs"),
        ("a: b: c", 1, 5, "`:` where none can be"),
        ("a: [1, 2", 1, 9, "expected `,` or `]`"),
        ("a: 'x", 1, 6, "ends inside quotes"),
        ("a: *nope", 1, 4, "no anchor"),
        ("a: &x [*x]", 1, 8, "contains it"),
        ("a: !!python/object:os.system x", 1, 4, "tags"),
        ("a: 1\n---\nb: 1", 2, 1, "one YAML document"),
        ("a: 1\na: 2", 2, 1, "twice, first on line 1"),
        ("1: x", 1, 1, "a number to YAML"),
        ("no: x", 1, 1, "a true/false word"),
        ("[a]: x", 1, 1, "a key must be text"),
        ("<<: 3", 1, 5, "takes a mapping"),
        ("", 1, 1, "empty"),
        ("# nothing\n", 1, 1, "empty"),
        ("a: \x07", 1, 4, "U\\+0007"),
        ("[" * 4000, 1, 34, "nested deeper"),
    ],
)
def test_refusals(text: str, line: int, column: int, words: str) -> None:
    (problem,) = read_yaml(text).problems
    assert (problem.line, problem.column) == (line, column)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem.message)


@pytest.mark.timeout(60)
def test_aliases_cannot_blow_up() -> None:
    levels = [
        f"{name}: &{name} [{', '.join(['*' + before] * 10)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    document = read_yaml("a: &a [1]\n" + "\n".join(levels))
    assert "too many values" in document.problems[0].message


@pytest.mark.timeout(60)
def test_merges_cannot_blow_up() -> None:
    levels = [
        f"{name}: &{name} {{<<: [{', '.join(['*' + before] * 10)}]}}"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    document = read_yaml("a: &a {x: 1}\n" + "\n".join(levels))
    assert document.problems


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.tuples(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_find_tolerates_any_shape(value: object) -> None:
    for path, found in find(value, ("a", None, "b")):
        assert value["a"][path[1]]["b"] == found  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h", 3600), (2, 2), (0.5, 0.5), ("1.5 s", 1.5)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("12B", 12), ("1KiB", 1024), ("64MiB", 2**26), ("1GiB", 2**30), ("0.5 KiB", 512)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1:30", "1 d", "-1s", "s", "1e3s", True, None, "30 seconds"])
def test_bad_durations(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "64MB", "-1", 1.5, True, None, "1 TiB"])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)
