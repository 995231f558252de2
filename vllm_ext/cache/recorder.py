"""Writes the block trace of a running engine: what `vllm-ext replay` reads, without tokens or raw hashes.

The engine's thread hands over plain values and goes on; a thread of our own hashes, formats and writes. What
it cannot keep up with is dropped and counted. If it fails, the trace ends and nothing else does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO

from vllm_ext.cache.order import Stop
from vllm_ext.cache.traces.native import HEADER, STOPS, VERSION

MAX_PENDING = 1 << 18
"""Blocks that may wait for the writer, some 25 MB; requests beyond are dropped."""
KEY_BYTES = 8
"""Of a block's keyed hash: among 10 million blocks two are alike with a probability of 3 in a million."""
CLOSE_SECONDS = 5.0

_STOP_WORDS = {stop: word for word, stop in STOPS.items()}

logger = logging.getLogger("vllm_ext")


@dataclass(slots=True)
class Finished:
    """One request that has left the engine.

    Attributes:
        arrival, finish: seconds, when its blocks were looked up and given back.
        prompt: hashes of the blocks that were looked up.
        output: hashes of the blocks behind them that the request filled.
        output_tokens: decoded tokens.
        tenant: label.
        session: identifies the conversation, or None.
        stop: why it stopped.
        ended: the session is over.
    """

    arrival: float
    finish: float
    prompt: Sequence[bytes]
    output: Sequence[bytes]
    output_tokens: int
    tenant: str
    session: bytes | None
    stop: Stop
    ended: bool

    @property
    def num_blocks(self) -> int:
        return len(self.prompt) + len(self.output)


class Recorder:
    """Appends requests to a file, from the moment it is made until `close`.

    Whatever the file holds at the beginning becomes FILE.1, and so does a file that has grown to `max_size`:
    at most twice that is on disk. Both are readable by their owner alone.

    Args:
        path: the file.
        max_size: bytes.
        key: of the hashes, up to 64 bytes. Traces with one key can be put together.
        block_size: tokens of a block, for the header.

    Raises:
        OSError: the file cannot be written, or another process writes it.
    """

    def __init__(self, path: Path, max_size: int, key: bytes, block_size: int) -> None:
        self.path = path
        self.max_size = max_size
        self.written = 0
        """Requests by what became of them."""
        self.dropped = 0
        self.failed = 0
        self.broken = False
        """The writer has ended by a fault."""
        self._key = key
        self._header = json.dumps({HEADER: VERSION, "block_size": block_size}) + "\n"
        # Each counted by one thread alone: their difference waits.
        self._given = 0
        self._taken = 0
        self._queue: SimpleQueue[Finished | None] = SimpleQueue()
        # Held for as long as we write: two writers would spoil each other's lines.
        self._lock = _lock(path)
        try:
            self._file = self._begin()
        except OSError:
            self._lock.close()
            raise
        self._thread = Thread(target=self._run, name="vllm-ext-block-trace", daemon=True)
        self._thread.start()

    def record(self, request: Finished) -> None:
        """Never blocks and never raises."""
        if self.broken:
            self.failed += 1
        elif self._given - self._taken + request.num_blocks > MAX_PENDING and self._given != self._taken:
            self.dropped += 1
        else:
            self._given += request.num_blocks
            self._queue.put(request)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what waits, for `timeout` seconds at most."""
        self._queue.put(None)
        self._thread.join(timeout)

    # The writer's thread

    def _run(self) -> None:
        try:
            while self._write_some():
                pass
        except Exception:
            # What is in hand and what waits; from here on the engine's thread counts.
            self.failed += 1 + self._queue.qsize()
            self.broken = True
            logger.exception("vllm_ext: the block trace %s cannot be written on and is off now", self.path)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            self._lock.close()

    def _write_some(self) -> bool:
        """Everything that waits, in one go; False when it is time to end."""
        request = self._queue.get()
        while request is not None:
            self._write(request)
            self._taken += request.num_blocks
            try:
                request = self._queue.get_nowait()
            except Empty:
                self._file.flush()
                return True
        self._file.flush()
        return False

    def _write(self, request: Finished) -> None:
        line = self._line(request).encode()
        if self._size + len(line) > self.max_size and self._size > len(self._header):
            self._file.close()
            self._file = self._begin()
        self._file.write(line)
        self._size += len(line)
        self.written += 1

    def _line(self, request: Finished) -> str:
        record = {
            "arrival": round(request.arrival, 6),
            "finish": round(max(request.finish, request.arrival), 6),
            "prompt": [self._hash(block) for block in request.prompt],
            "output": [self._hash(block) for block in request.output],
            "output_tokens": request.output_tokens,
            "tenant": request.tenant,
            "stop": _STOP_WORDS[request.stop],
        }
        if request.session is not None:
            record["session"] = self._hash(request.session)
            record["session_end"] = request.ended
        return json.dumps(record, separators=(",", ":")) + "\n"

    def _hash(self, value: bytes) -> str:
        return hashlib.blake2b(value, digest_size=KEY_BYTES, key=self._key).hexdigest()

    def _begin(self) -> BinaryIO:
        if self.path.exists() and self.path.stat().st_size:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = os.fdopen(descriptor, "wb")
        file.write(self._header.encode())
        file.flush()
        self._size = len(self._header)
        return file


def _lock(path: Path) -> BinaryIO:
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    file = os.fdopen(descriptor, "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(error.errno, "another process writes this trace", str(path)) from error
    return file
