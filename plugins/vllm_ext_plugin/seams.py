"""Every vLLM symbol that this project touches, in one table; checked at start and by a contract test.

    python -m vllm_ext_plugin.seams     # the table, with the state of each row on the installed vLLM

Importing this module imports no vLLM. A check reads vLLM's source files and compares signatures with those
recorded per supported version in `fingerprints/` (written by `tools/fingerprint.py`): a file that is byte for
byte the recorded one is not even parsed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from vllm_ext_plugin.seam_table import ALL_VERSIONS, SEAMS, Seam
from vllm_ext_plugin.signatures import SourcePackage, compatible

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 140
"""Columns of a terminal from which on the table shows everything."""

__all__ = [
    "SEAMS",
    "Seam",
    "SeamProblem",
    "check",
    "fingerprint",
    "installed_version",
    "recorded",
    "resolve",
    "supported_version",
]


@dataclass(frozen=True)
class SeamProblem:
    """A seam that is not as recorded. `breaking`: what we do there cannot work; else just worth a look."""

    seam: Seam
    version: str
    expected: str
    found: str | None
    breaking: bool

    @property
    def fatal(self) -> bool:
        """Whether starting in spite of it would be unsafe."""
        return self.breaking and self.seam.fatal

    def __str__(self) -> str:
        where = f"vLLM {self.version}: {self.seam.module}: {self.seam.qualname}"
        what = (
            f"is gone (was `{self.expected}`)"
            if self.found is None
            else f"was `{self.expected}`, is now `{self.found}`"
        )
        result = self.seam.when_missing if self.breaking else "still usable"
        return f"{where} {what}: {result}"


def supported_version(version: str) -> bool:
    """Whether a vLLM version string (`0.32.0`, `0.32.1.dev3+gabc`) is of a supported minor version."""
    return _minor(version) in ALL_VERSIONS


def installed_version() -> str | None:
    """The installed vLLM's version, read without importing it; None when vLLM is not installed as source."""
    package = SourcePackage.installed()
    return None if package is None else version_of(package)


def version_of(package: SourcePackage) -> str:
    """The version that a vLLM source tree declares. Raises LookupError when it declares none."""
    path = package.path("vllm._version")
    found = (
        re.search(r"^__version__.*=\s*['\"]([^'\"]+)['\"]", path.read_text(), re.MULTILINE) if path else None
    )
    if found is None:
        raise LookupError(f"{package.root} has no _version.py with a version: is it a built vLLM?")
    return found[1]


def resolve(seam: Seam) -> Any:
    """Import the object that the seam names.

    For an attribute that only instances have, its class. Raises LookupError when it is not there.
    """
    try:
        found: Any = importlib.import_module(seam.module)
    except ImportError as error:
        raise LookupError(f"{seam.module} cannot be imported: {error}") from error
    for part in seam.qualname.split("."):
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, type) and fingerprint(seam) is not None:
            return found
        else:
            raise LookupError(f"{seam.module} has no {seam.qualname}")
    return found


def fingerprint(seam: Seam, package: SourcePackage | None = None) -> str | None:
    """The seam's signature in `package` (default: the installed vLLM); None when it is not there."""
    package = package or _installed()
    return package.signature(seam.module, seam.qualname, seam.calls)


def check(seams: Iterable[Seam] = SEAMS, package: SourcePackage | None = None) -> list[SeamProblem]:
    """What is not as recorded, in table order; empty when all is well.

    A version that is not recorded is compared with the nearest one that is. A signature recorded for any
    supported version is fine in all of them, since the code copes with each. Raises LookupError when vLLM is
    not installed.
    """
    package = package or _installed()
    version = version_of(package)
    expected = recorded(_nearest(version))
    known = [recorded(minor) for minor in ALL_VERSIONS]
    unchanged = {
        module
        for module in {seam.module for seam in seams}
        if any(package.digest(module) == one["modules"].get(module) is not None for one in known)
    }
    problems = []
    for seam in seams:
        before = expected["seams"].get(seam.id)
        if seam.module in unchanged or before is None:
            continue
        found = fingerprint(seam, package)
        texts = [one["seams"].get(seam.id) for one in known]
        if found is None or found not in texts:
            usable = any(compatible(text, found) for text in texts if text is not None)
            problems.append(SeamProblem(seam, version, before, found, breaking=not usable))
    return problems


@cache
def recorded(minor: str) -> Mapping[str, Any]:
    """What `tools/fingerprint.py` recorded for a minor version: `version`, `modules` (sha256), `seams`
    (signatures)."""
    text = files("vllm_ext_plugin").joinpath("fingerprints", f"{minor}.json").read_text(encoding="utf-8")
    result: Mapping[str, Any] = json.loads(text)
    return result


def _installed() -> SourcePackage:
    package = SourcePackage.installed()
    if package is None:
        raise LookupError("vLLM is not installed here (or only as compiled files): nothing to compare with")
    return package


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _nearest(version: str) -> str:
    """The recorded minor version closest to `version`."""

    def number(minor: str) -> int:
        parts = [int(digits) for digits in re.findall(r"\d+", minor)[:2]]
        return parts[0] * 1000 + parts[1] if len(parts) == 2 else 0

    wanted = number(_minor(version))
    return min(ALL_VERSIONS, key=lambda minor: (abs(number(minor) - wanted), -number(minor)))


State = Literal["ok", "changed", "broken", "missing", "not in this version"]
"""`changed`: still usable as we use it; `broken`: there, but not usable; `missing`: not there."""

_COLOURS: dict[State, str] = {
    "ok": "green",
    "changed": "yellow",
    "broken": "red",
    "missing": "red",
    "not in this version": "dim",
}


def _state(seam: Seam, version: str, problems: Mapping[str, SeamProblem]) -> State:
    problem = problems.get(seam.id)
    if problem is not None:
        if problem.found is None:
            return "missing"
        return "broken" if problem.breaking else "changed"
    return "ok" if _nearest(version) in seam.versions else "not in this version"


def summary(states: Iterable[State]) -> str:
    """`110 ok, 1 changed, 0 missing`, and what else there is."""
    counts = Counter(states)
    always: tuple[State, ...] = ("ok", "changed", "missing")
    others: tuple[State, ...] = ("broken", "not in this version")
    named = [*always, *(state for state in others if counts[state])]
    return ", ".join(f"{counts[state]} {state}" for state in named)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the state of every seam and what is not as recorded.

    Returns the exit status: 0; 1 when vllm_ext would refuse to start; 2 when there is no vLLM to look at.
    """
    argparse.ArgumentParser(
        prog="python -m vllm_ext_plugin.seams",
        description="Every symbol of vLLM that vllm_ext touches, and whether the installed vLLM has it as "
        "expected. A table on a terminal; elsewhere one line per symbol, tab separated: state, symbol, how, "
        "what happens when it is missing. Then a line that counts the states.",
        epilog="Exit status: 0; 1 when vllm_ext refuses to start on this vLLM; 2 when none is installed.",
    ).parse_args(arguments)
    from rich.console import Console

    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        version = version_of(_installed())
        found = check()
    except LookupError as error:
        errors.print(str(error), style="red", markup=False)
        return 2
    problems = {problem.seam.id: problem for problem in found}
    states = {seam.id: _state(seam, version, problems) for seam in SEAMS}
    console = Console()
    if console.is_terminal:
        _print_table(console, version, states)
    else:
        for seam in SEAMS:
            print(states[seam.id], seam.id, seam.how, seam.when_missing, sep="\t")
    if not supported_version(version):
        supported = f"{ALL_VERSIONS[0]} to {ALL_VERSIONS[-1]}"
        errors.print(f"vLLM {version} is outside the supported range {supported}", style="yellow")
    for problem in found:
        errors.print(str(problem), style="red" if problem.breaking else "yellow", markup=False)
    print(summary(states.values()))
    return int(any(problem.fatal for problem in found))


def _print_table(console: Console, version: str, states: Mapping[str, State]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"Seams on vLLM {version}", show_lines=True, expand=False)
    table.add_column("symbol", no_wrap=True, min_width=max(map(len, _symbol_lines())))
    # The columns that say least go first where there is no room.
    wide = console.width >= WIDE
    for heading in ("how", "why", "when missing", "upstream", "state") if wide else ("state", "why"):
        table.add_column(heading, overflow="fold")
    for seam in SEAMS:
        state = Text(states[seam.id], style=_COLOURS[states[seam.id]])
        told = (seam.how, seam.why, seam.when_missing, seam.upstream, state) if wide else (state, seam.why)
        table.add_row(f"{seam.module}\n{seam.qualname}", *told)
    console.print(table)


def _symbol_lines() -> list[str]:
    return [line for seam in SEAMS for line in (seam.module, seam.qualname)]


if __name__ == "__main__":
    raise SystemExit(main())
