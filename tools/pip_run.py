"""pip with one line of progress, its output in a log file, failures in one line. Standard library only."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Lines of pip's output that begin the work on one more package of the command.
_NEXT_PACKAGE = re.compile(r"^(?:Collecting|Requirement already satisfied:|Processing|Obtaining) +(\S+)")
_UNREACHABLE = re.compile(r"connection broken by '(.*)': /")
# The innermost cause, in urllib3's words: "[Errno 111] Connection refused", "Name or service not known", ...
_CAUSE = re.compile(
    r"\[Errno -?\d+\] [^'\")]+|timed out|CERTIFICATE_VERIFY_FAILED|Tunnel connection failed: [^'\")]+"
)


class PipFailed(Exception):
    """pip ended with an error. `reason`: its essence; `no_match`: no index had it; str(): for users."""

    def __init__(self, reason: str, no_match: bool, log: Path) -> None:
        super().__init__(f"pip: {reason} (log: {log})")
        self.reason, self.no_match = reason, no_match


def pip_install(python: Path, arguments: list[str], log: Path, total: int | None = None) -> None:
    """Runs `pip install` for the environment of `python`, its output in `log`. Raises PipFailed."""
    command = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--progress-bar",
        "off",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = _Progress(total)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.write(line)
                progress.line(line)
        except BaseException:
            # Ctrl-C reaches pip as well (same process group); give it the time to end by itself.
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        finally:
            progress.clear()
    if process.wait() != 0:
        raise _failure(log)


def _failure(log: Path) -> PipFailed:
    """The essence of a failed run: pip's own last error line, and why the index was not reached."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [line[len("ERROR: ") :].strip() for line in text.splitlines() if line.startswith("ERROR: ")]
    no_match = any(
        error.startswith(("No matching distribution", "Could not find a version")) for error in errors
    )
    reason = errors[-1] if errors else (text.strip().splitlines() or ["no output"])[-1]
    broken = _UNREACHABLE.findall(text)
    if broken:
        cause = _CAUSE.search(broken[-1])
        reason = f"{reason}; the package index cannot be reached ({cause.group(0) if cause else broken[-1]})"
    return PipFailed(reason, no_match, log)


class _Progress:
    """One line on a terminal, rewritten in place: "12/150 fastapi"; nothing where there is no terminal."""

    def __init__(self, total: int | None) -> None:
        self.total, self.count, self.shown = total, 0, False

    def line(self, line: str) -> None:
        if not sys.stdout.isatty():
            return
        package = _NEXT_PACKAGE.match(line)
        if package:
            self.count += 1
            # A line's name may be a wheel's path: its file name is what tells.
            name = package.group(1).rsplit("/", 1)[-1]
            self._show(f"{self.count}/{self.total} {name}" if self.total else name)
        elif line.startswith("Installing collected packages"):
            self._show("unpacking")
        elif "Retrying" in line:
            self._show("the package index does not answer, trying again")

    def clear(self) -> None:
        if self.shown:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()

    def _show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(f"\r\033[K    {text}"[: width + 3])
        sys.stdout.flush()
        self.shown = True


def remove_broken_distributions(site: Path) -> list[str]:
    """Forgets the packages that an interrupted pip left incomplete, and returns their names.

    pip takes a package for installed once its metadata folder exists, which it copies along with the rest.
    """
    removed = []
    for info in sorted(site.glob("*.dist-info")):
        if not _complete(site, info):
            shutil.rmtree(info)
            removed.append(info.name[: -len(".dist-info")])
    # What pip sets aside while it replaces a package is named "~...".
    for aside in site.glob("~*"):
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    return removed


def _complete(site: Path, info: Path) -> bool:
    """True when pip finished with this package: every file that its RECORD lists is there in its size."""
    record = info / "RECORD"
    # pip writes INSTALLER after the package's files and scripts, and its own RECORD last.
    if not (record.is_file() and (info / "INSTALLER").is_file()):
        return False
    try:
        with record.open(encoding="utf-8", newline="") as handle:
            rows = [row for row in csv.reader(handle) if len(row) == 3]
        return bool(rows) and all((site / name).stat().st_size == int(size) for name, _, size in rows if size)
    except (OSError, ValueError):
        return False
