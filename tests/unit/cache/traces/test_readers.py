"""Readers: what they make of good files, and where they say a bad one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.cache import Stop
from vllm_ext.cache.traces import (
    Request,
    Trace,
    TraceError,
    make_trace,
    read_agents,
    read_mooncake,
    read_native,
)

pytestmark = pytest.mark.unit

HEADER = {"vllm_ext_trace": 1, "block_size": 16}


def lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def session(path: Path, requests: list[dict[str, Any]], tool_tokens: int = 128) -> Path:
    path.write_text(
        json.dumps({"block_size": 64, "tool_tokens": tool_tokens, "system_tokens": 0, "requests": requests})
    )
    return path


def test_mooncake(tmp_path: Path) -> None:
    record = {"input_length": 1000, "output_length": 7, "hash_ids": [5, 6]}
    path = lines(
        tmp_path / "chat.jsonl",
        {**record, "timestamp": 2500},
        "",
        {**record, "timestamp": 500, "hash_ids": [5]},
    )
    trace = read_mooncake(path)
    assert trace.name == "chat"
    assert [(request.time, request.prompt) for request in trace.requests] == [(0.5, [0]), (2.5, [0, 1])]
    assert (trace.num_keys, trace.num_prompt_keys, trace.prompt_blocks) == (2, 2, 3)
    assert trace.requests[0].output_tokens == 7
    assert not any(request.tenant for request in trace.requests)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found a list"),
        ("[" * 100_000, "not JSON"),
        ({"hash_ids": [1]}, "timestamp: expected a number, found nothing"),
        ({"timestamp": True, "hash_ids": [1]}, "timestamp: expected a number, found true or false"),
        ('{"timestamp": NaN, "hash_ids": [1]}', "timestamp: expected a number"),
        ({"timestamp": 0, "hash_ids": "12"}, "hash_ids: expected a list, found a string"),
        ({"timestamp": 0, "hash_ids": [1, None]}, r"hash_ids\[1\]: nothing is not allowed"),
        ({"timestamp": 0, "hash_ids": [1], "output_length": "x"}, "output_length: expected a number"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    path = lines(tmp_path / "t.jsonl", {"timestamp": 0, "hash_ids": [1]}, line)
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {message}"):
        read_mooncake(path)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot read"):
        read_mooncake(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(TraceError, match=r"b\.jsonl: not UTF-8"):
        read_native(tmp_path / "b.jsonl")
    with pytest.raises(TraceError, match="nothing to replay"):
        read_mooncake(lines(tmp_path / "e.jsonl", {"timestamp": 0, "hash_ids": []}))
    (tmp_path / "void").mkdir()
    with pytest.raises(TraceError, match=r"no \*\.json in this folder"):
        read_agents(tmp_path / "void")


def test_agents_share_only_the_common_head(tmp_path: Path) -> None:
    turn = {"t": 1.0, "in": 200, "out": 9, "hash_ids": [1, 2, 3], "stop": "tool_use"}
    session(tmp_path / "a.json", [turn, {**turn, "t": 5.0, "hash_ids": [1, 2, 3, 4], "stop": "end_turn"}])
    session(tmp_path / "b.json", [turn])
    session(tmp_path / "c.json", [turn], tool_tokens=127)  # other tools: another head
    trace = read_agents(tmp_path, seed=1, window=100.0)
    heads = {tuple(request.prompt[:2]) for request in trace.requests}
    assert len(heads) == 2
    assert trace.num_keys == (2 + 2 + 1) + (1 + 2)  # head, a's, b's; c's head, c's
    again = read_agents(tmp_path, seed=1, window=100.0)
    other = read_agents(tmp_path, seed=2, window=100.0)
    assert [r.time for r in trace.requests] == [r.time for r in again.requests]
    assert [r.time for r in trace.requests] != [r.time for r in other.requests]
    stops = {(request.stop, request.ended) for request in trace.requests}
    assert stops == {(Stop.TOOL_CALL, False), (Stop.END_TURN, True), (Stop.TOOL_CALL, True)}


def test_agents_subset_keeps_its_places(tmp_path: Path) -> None:
    for name in "abcd":
        session(tmp_path / f"{name}.json", [{"t": 0.0, "hash_ids": [1, 2, 3]}])
    whole, odd = read_agents(tmp_path), read_agents(tmp_path, sessions=slice(1, None, 2))
    assert len(odd.requests) == 2
    assert {r.time for r in odd.requests} < {r.time for r in whole.requests}


@pytest.mark.parametrize(("inner", "expected"), [(3.0, 13.0), (12.0, 12.0)])
def test_sub_agents(tmp_path: Path, inner: float, expected: float) -> None:
    called = {
        "t": 10.0,
        "type": "subagent",
        "tool_tokens": 64,
        "requests": [{"t": inner, "hash_ids": [7, 8], "stop": "end_turn"}],
    }
    session(
        tmp_path / "a.json",
        [{"t": 0.0, "hash_ids": [1, 2, 3]}, called, {"t": 20.0, "hash_ids": [1, 2, 3, 9]}],
    )
    trace = read_agents(tmp_path, window=0.0)
    assert [request.time for request in trace.requests] == [0.0, expected, 20.0]
    assert [request.ended for request in trace.requests] == [False, True, True]
    assert trace.requests[0].session != trace.requests[1].session


def test_agents_errors(tmp_path: Path) -> None:
    session(tmp_path / "a.json", [{"t": 0.0, "hash_ids": [1]}, {"hash_ids": [1]}])
    with pytest.raises(TraceError, match=r"a\.json: requests\[1\]: t: expected a number"):
        read_agents(tmp_path)


def test_native(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "night.jsonl",
        HEADER,
        {
            "arrival": 1.0,
            "finish": 2.0,
            "prompt": ["aa", 7],
            "output": ["cc"],
            "output_tokens": 20,
            "tenant": "acme",
            "session": "s",
            "stop": "tool_call",
        },
        {
            "arrival": 3,
            "prompt": ["aa", 7, "cc", "dd"],
            "session": "s",
            "stop": "end_turn",
            "session_end": True,
        },
    )
    first, second = read_native(path).requests
    assert first == Request(1.0, [0, 1], [2], 2.0, 20, "acme", 1, Stop.TOOL_CALL, False)
    assert second == Request(3.0, [0, 1, 2, 3], [], 3.0, 0, None, 1, Stop.END_TURN, True)
    assert any(request.tenant for request in read_native(path).requests)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": ["a"]}, "arrival: expected a number"),
        ({"arrival": 2, "finish": 1, "prompt": ["a"]}, "finish: 1.0 is before arrival"),
        ({"arrival": 0, "promt": ["a"]}, "unknown field 'promt'; known are arrival"),
        ({"arrival": 0, "prompt": [1.5]}, r"prompt\[0\]: the number 1.5"),
        ({"arrival": 0, "prompt": ["a"], "stop": "tool_use"}, "stop: 'tool_use' is none of tool_call"),
        ({"arrival": 0, "prompt": ["a"], "tenant": 3}, "tenant: expected a string"),
        ({"arrival": 0, "prompt": ["a"], "session_end": "yes"}, "session_end: expected true or false"),
        ({"arrival": 0, "prompt": ["a"], "session_end": True}, "session_end: which session"),
    ],
)
def test_native_errors(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: {message}"):
        read_native(lines(tmp_path / "t.jsonl", HEADER, record))


@pytest.mark.parametrize("first", [{"arrival": 0, "prompt": ["a"]}, {"vllm_ext_trace": 2}, ""])
def test_native_header(tmp_path: Path, first: object) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl:1: expected the header .*--format mooncake"):
        read_native(lines(tmp_path / "t.jsonl", first))


@given(st.lists(st.tuples(st.floats(0, 100), st.lists(st.integers(0, 9), max_size=5)), min_size=1))
def test_numbering_is_dense_and_keeps_equality(items: list[tuple[float, list[int]]]) -> None:
    if not any(prompt for _, prompt in items):
        return
    trace: Trace = make_trace("t", [Request(time, prompt) for time, prompt in items])
    ordered = sorted(items, key=lambda item: item[0])
    back: dict[int, int] = {}
    for request, (_, prompt) in zip(trace.requests, ordered, strict=True):
        for number, key in zip(request.prompt, prompt, strict=True):
            assert back.setdefault(number, key) == key  # type: ignore[call-overload]
    assert sorted(back) == list(range(trace.num_keys))
    assert len(set(back.values())) == len(back)


def test_the_format_in_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "replay.md").read_text()
    example = text.partition('```\n{"vllm_ext_trace"')[2].partition("```")[0]
    path = tmp_path / "docs.jsonl"
    path.write_text('{"vllm_ext_trace"' + example)
    first, second = read_native(path).requests
    assert [*first.prompt, *first.output] == second.prompt[:3]
    assert second.ended
