"""Starts, watches and stops a `vllm serve` process, for `make serve`, `make demo` and the end-to-end tests.

with Server(serve_arguments(policy=Path("policies/demo.yaml")), log=Path("serve.log")) as server:
    server.wait_ready()
    httpx.post(f"{server.url}/v1/chat/completions", ...)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import checkpoint

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
SERVED_MODEL = "smollm2"
DEMO_POLICY = ROOT / "policies" / "demo.yaml"
# The keys behind the digests in policies/demo.yaml: published, so good for a demonstration only.
DEMO_KEYS = {"acme": "demo-key-acme-0001", "globex": "demo-key-globex-0001"}

# Of a server on a small CPU machine. What the caller's environment already sets, wins.
DEFAULT_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerFailed(Exception):
    """The server could not start or ended by itself; str() says which, with the log's tail if any."""


def serve_arguments(
    policy: Path | None = None, plugins: str | None = "vllm_ext", model: Path | None = None
) -> list[str]:
    """`vllm serve`'s arguments for the development model; `plugins=None` gives plain vLLM.

    Raises FileNotFoundError when no `model` is given and the development model is not there.
    """
    arguments = [str(model or checkpoint.require_model()), "--served-model-name", SERVED_MODEL]
    # Compiling takes a minute on a CPU; reused tokens are reported only when asked for; and the CPU's default
    # of 128 tokens a block hides much of what short prompts reuse.
    arguments += [
        "--max-model-len",
        "2048",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--block-size",
        "32",
    ]
    if plugins is not None:
        arguments += ["--plugins", plugins]
    if policy is not None:
        arguments += ["--policy", str(policy)]
    return arguments


def free_port() -> int:
    """A TCP port on the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """True when a server could listen on the loopback's `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


class Server:
    """One `vllm serve` in a process group of its own, so that stopping it reaches the engine's processes too.

    `log` None lets it write to this process's own output. `env` extends the environment; None removes a name.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        port: int | None = None,
        log: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self.url = f"http://{HOST}:{self.port}"
        vllm = Path(sys.executable).parent / "vllm"
        self.command = [str(vllm), "serve", *arguments, "--host", HOST, "--port", str(self.port)]
        self.environment = {**DEFAULT_ENVIRONMENT, **os.environ}
        for name, value in (env or {}).items():
            if value is None:
                self.environment.pop(name, None)
            else:
                self.environment[name] = value
        self.process: subprocess.Popen[bytes] | None = None
        self.was_ready = False

    def start(self) -> Server:
        """Starts it and returns at once. Raises ServerFailed when the `vllm` command is not there."""
        output: IO[bytes] | None = self.log.open("wb") if self.log else None
        try:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ServerFailed(f"{self.command[0]} is not there: run `make setup`") from None
        finally:
            if output:
                output.close()  # the child has its own
        return self

    def wait_ready(self, timeout: float = 300.0, on_wait: Callable[[float], None] | None = None) -> None:
        """Returns once GET /health answers 200; `on_wait(seconds so far)` is called about twice a second.

        Raises ServerFailed when the server ends first or is not ready after `timeout` seconds.
        """
        began = time.monotonic()
        while not self.healthy():
            waited = time.monotonic() - began
            self.check_alive()
            if waited > timeout:
                raise self.failure(f"the server was not ready after {timeout:.0f} s")
            if on_wait:
                on_wait(waited)
            time.sleep(0.4)
        self.was_ready = True

    def healthy(self) -> bool:
        """True when GET /health answers 200 now."""
        # No proxy, whatever the environment says: this is the loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def check_alive(self) -> None:
        """Raises ServerFailed when the process has ended."""
        code = self.process.poll() if self.process else None
        if code is not None:
            raise self.failure(f"the server ended with exit code {code}")

    def tail(self, lines: int = 30) -> list[str]:
        """The log's last lines; empty without a log."""
        if self.log is None or not self.log.exists():
            return []
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]

    def failure(self, what: str) -> ServerFailed:
        """A ServerFailed that says `what`, then shows the end of the log."""
        tail = [f"    {line}" for line in self.tail()]
        return ServerFailed("\n".join([what, *tail, f"(the whole log: {self.log})"] if tail else [what]))

    def interrupt(self) -> None:
        """Asks it to shut down, as Ctrl-C would; returns at once."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Waits until it ends and returns its exit code."""
        assert self.process is not None, "start() comes first"
        return self.process.wait()

    def stop(self) -> None:
        """Ends it and all that it started: asked first, then killed. Harmless when it has ended already."""
        if self.process is None:
            return
        try:
            self.interrupt()
            # While it still starts up, vLLM does not heed a signal, and there is nothing yet to finish.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=15.0 if self.was_ready else 2.0)
            # Its children end once it has; those that track shared memory need a moment to clean up.
            deadline = time.monotonic() + 3.0
            while (
                self.process.poll() is not None
                and time.monotonic() < deadline
                and _group_lives(self.process.pid)
            ):
                time.sleep(0.05)
        finally:  # also when a second Ctrl-C cuts the waiting short
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Server:
        return self if self.process else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside, so that one way out cleans up after all of them."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
