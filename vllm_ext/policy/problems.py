"""What can be wrong with a policy, where, and how to mend it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import NamedTuple

Path = tuple[str | int, ...]
"""Where a value stands in the document: mapping keys and list indices, from the top."""

_SECRET_NAME = re.compile(r"(^|[_-])keys?$|apikey|secret|passw|(^|[_-])token$", re.IGNORECASE)
_FIELD = re.compile(r"[a-z][a-z_-]{0,23}")
_NAMES: tuple[Path, ...] = (
    ("tenancy", "tenants"),
    ("retention", "classes"),
    ("retention", "tenants"),
    ("retention", "client_wishes", "tenants"),
)
"""Mappings whose keys are names that somebody chose."""


class Position(NamedTuple):
    """A place in a policy file; both numbers count from 1, the column in characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One source line with everything that could be a secret masked, and where (from 0) the caret goes."""

    text: str
    caret: int


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """One thing that is wrong. ``line`` and ``column`` are None when it concerns the file as a whole."""

    line: int | None
    column: int | None
    field: str
    message: str
    hint: str | None = None
    excerpt: Excerpt | None = None

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{field}{self.message}{hint}"

    def located(self, source: str) -> str:
        """``file:line:column: field: message (hint)``."""
        place = source if self.line is None else f"{source}:{self.line}:{self.column}"
        return f"{place}: {self}"


class PolicyError(ValueError):
    """A policy that cannot be used. Carries every problem, in file order; never a secret's value."""

    def __init__(
        self, source: str, problems: Iterable[PolicyProblem], files: Iterable[FilePath] = ()
    ) -> None:
        self.source = source
        self.files = tuple(files)
        """Files that the policy refers to: a change to one of them may mend it."""
        self.problems = tuple(sorted(problems, key=lambda p: (p.line or 0, p.column or 0)))
        super().__init__(source, self.problems, self.files)

    def __str__(self) -> str:
        return "\n".join(problem.located(self.source) for problem in self.problems)


def format_path(path: Path) -> str:
    """``("tenants", "acme", "api_keys", 0)`` as ``tenants.acme.api_keys[0]``, its unsafe names as ``…``."""
    depth = _secret_depth(path)
    if depth is not None:  # below a secret nothing is named
        path = path[: depth + 1] + tuple(
            part for part in path[depth + 1 : depth + 2] if isinstance(part, int)
        )
    text = ""
    for index, part in enumerate(path):
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if is_safe_name(path[: index + 1]) else ".…"
    return text.removeprefix(".")


def is_safe_name(path: Path) -> bool:
    """Whether the last key of ``path`` may be repeated: a name of a tenant or class, or something that looks
    like a field.

    A secret in clear can end up as a key: ``{secret: abc,def}`` is two.
    """
    name = str(path[-1])
    return not is_secret_path(path[:-1]) and (path[:-1] in _NAMES or _FIELD.fullmatch(name) is not None)


def is_secret_path(path: Path) -> bool:
    """Whether a value at that path may be a secret in clear, so that it must not be repeated anywhere."""
    return _secret_depth(path) is not None


def _secret_depth(path: Path) -> int | None:
    """The first part that announces a secret, also misspelt (``api_key``); a tenant may have any name."""
    for depth, part in enumerate(path):
        if isinstance(part, str) and path[:depth] not in _NAMES and _SECRET_NAME.search(part):
            return depth
    return None
