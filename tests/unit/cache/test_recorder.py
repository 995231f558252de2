"""The trace that a server writes of itself: what is in it, and what happens when it cannot be written."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache import recorder as recorder_module
from vllm_ext.cache.order import Stop
from vllm_ext.cache.recorder import Finished, Recorder
from vllm_ext.cache.traces import read_native

pytestmark = pytest.mark.unit

KEY = b"k" * 32


def request(number: int = 0, blocks: int = 3, **changed: object) -> Finished:
    made = Finished(
        arrival=1000.0 + number,
        finish=1000.5 + number,
        prompt=[b"block %d" % at for at in range(blocks)],
        output=[b"output %d" % number],
        output_tokens=17,
        tenant="acme",
        session=b"session",
        stop=Stop.TOOL_CALL,
        ended=True,
    )
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_reader_reads_it_and_no_hash_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path, 1 << 20, KEY, 16)
    recorder.record(request(0))
    recorder.record(request(1, session=None, ended=False, stop=Stop.UNKNOWN, finish=0.0))
    recorder.close()
    assert (recorder.written, recorder.dropped, recorder.failed) == (2, 0, 0)
    text = path.read_text()
    assert "block" not in text.replace("block_size", "") and 'session":"session' not in text
    first, second = read_native(path).requests
    assert (first.time, first.finish, first.output_tokens, first.tenant) == (1000.0, 1000.5, 17, "acme")
    assert (first.stop, first.ended, second.stop, second.ended) == (Stop.TOOL_CALL, True, Stop.UNKNOWN, False)
    assert first.prompt == second.prompt and first.output != second.output
    assert second.session is None and second.finish == second.time
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_key_gives_other_hashes_and_the_same_key_the_same(tmp_path: Path) -> None:
    found = []
    for name, key in (("a", KEY), ("b", KEY), ("c", b"other")):
        recorder = Recorder(tmp_path / name, 1 << 20, key, 16)
        recorder.record(request())
        recorder.close()
        found.append(lines(tmp_path / name)[1]["prompt"])
    assert found[0] == found[1] != found[2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(300, 3000))
def test_files_stay_small_and_hold_the_newest_requests(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], max_size: int
) -> None:
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    recorder = Recorder(path, max_size, KEY, 16)
    for number, blocks in enumerate(sizes):
        recorder.record(request(number, blocks))
    recorder.close()
    files = [file for file in (path.with_name("t.jsonl.1"), path) if file.exists()]
    kept = [line["arrival"] for file in files for line in lines(file)[1:]]
    assert kept == [1000.0 + number for number in range(len(sizes))][-len(kept) :]
    longest = 40 * 20 + 400
    for file in files:
        assert "vllm_ext_trace" in lines(file)[0]
        assert file.stat().st_size <= max(max_size, longest)


def test_what_was_there_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for number in range(3):
        recorder = Recorder(path, 1 << 20, KEY, 16)
        recorder.record(request(number))
        recorder.close()
    assert [line["arrival"] for line in lines(path)[1:]] == [1002.0]
    assert [line["arrival"] for line in lines(tmp_path / "trace.jsonl.1")[1:]] == [1001.0]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = Recorder(path, 1 << 20, KEY, 16)
    with pytest.raises(OSError, match="another process writes this trace"):
        Recorder(path, 1 << 20, KEY, 16)
    first.record(request())
    first.close()
    assert len(lines(path)) == 2
    Recorder(path, 1 << 20, KEY, 16).close()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Recorder(tmp_path / "missing" / "trace.jsonl", 1 << 20, KEY, 16)


def test_a_slow_writer_costs_requests_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_PENDING", 40)
    go = threading.Event()
    original = Recorder._write

    def slow(self: Recorder, one: Finished) -> None:
        go.wait(10)
        original(self, one)

    monkeypatch.setattr(Recorder, "_write", slow)
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, KEY, 16)
    for number in range(100):  # the writer waits for `go`: were this to wait for it, nothing would move on
        recorder.record(request(number))
    assert not go.is_set()
    assert recorder.dropped == 90
    go.set()
    recorder.close()
    assert recorder.written == 10 and len(lines(tmp_path / "trace.jsonl")) == 11


def test_one_request_larger_than_the_queue_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_PENDING", 10)
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, KEY, 16)
    recorder.record(request(blocks=100))
    recorder.close()
    assert recorder.written == 1


def test_a_fault_ends_the_trace_is_told_once_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Recorder, one: Finished) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "_line", full)
    recorder = Recorder(tmp_path / "trace.jsonl", 1 << 20, KEY, 16)
    recorder.record(request())
    recorder._thread.join(10)
    assert recorder.broken
    for number in range(5):
        recorder.record(request(number))
    recorder.close()
    assert (recorder.written, recorder.failed) == (0, 6)
    assert [record.message for record in caplog.records].count(
        f"vllm_ext: the block trace {tmp_path / 'trace.jsonl'} cannot be written on and is off now"
    ) == 1
