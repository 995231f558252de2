"""Replace an attribute of a vLLM class or module exactly once per process.

vLLM may load a general plugin several times in one process, from several threads; each seam is wrapped once
all the same. Every replacement is recorded with what it replaced, so it can be listed and taken back.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Owner = type | types.ModuleType

_MISSING = object()
_MARK = "__vllm_ext_patch__"


@dataclass(frozen=True)
class Patch:
    """One replacement that is in force."""

    owner: Owner
    name: str
    key: object  # names the patch: a second one with the same key on the same attribute is a no-op
    original: Any  # what make_wrapper was given (the bare function of a staticmethod or classmethod)
    replacement: Any  # what make_wrapper returned
    raw_original: (
        Any  # what the owner's own namespace held before, or _MISSING where it was inherited or absent
    )
    raw_replacement: Any  # what it holds now
    imported_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{_owner_name(self.owner)}.{self.name}"


class _Registry:
    """Everything replaced in this process, oldest first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.patches: list[Patch] = []

    def of(self, owner: Owner, name: str) -> list[Patch]:
        return [patch for patch in self.patches if patch.owner is owner and patch.name == name]


_registry = _Registry()


def patch(
    owner: Owner,
    name: str,
    make_wrapper: Callable[[Any], Any],
    *,
    key: object = None,
    imported_by: Iterable[str] = (),
) -> bool:
    """Replace `owner.name` by `make_wrapper(original)`; returns whether this call did it.

    A repeated patch is recognised by `make_wrapper`'s definition (a closure made anew counts as the same) or
    by `key`; different patches of one attribute stack, the later one outside. `make_wrapper` gets the plain
    function of a staticmethod or classmethod, and the kind is kept. A function returned takes over the
    original's name, docstring and `__wrapped__`.

    `imported_by` names modules that do `from owner import name`: those already loaded are re-pointed too,
    those loaded later pick the replacement up by themselves.

    Raises AttributeError when `owner` has no such attribute, TypeError when `make_wrapper` returns None;
    nothing is changed then.
    """
    key = _key_of(make_wrapper) if key is None else key
    with _registry.lock:
        if any(done.key == key for done in _registry.of(owner, name)):
            return False
        raw = _raw(owner, name)
        if raw is _MISSING:
            raise AttributeError(
                f"{_owner_name(owner)} has no attribute {name!r} to wrap: this vLLM differs from the "
                "supported ones (`python -m vllm_ext_plugin.seams` lists what is missing)"
            )
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
        original = raw.__func__ if kind else raw
        replacement = make_wrapper(original)
        if replacement is None:
            raise TypeError(
                f"the wrapper for {_owner_name(owner)}.{name} returned None instead of a replacement"
            )
        if isinstance(replacement, types.FunctionType) and callable(original) and replacement is not original:
            functools.update_wrapper(replacement, original)
            setattr(replacement, _MARK, key)
        applied = Patch(
            owner=owner,
            name=name,
            key=key,
            original=original,
            replacement=replacement,
            raw_original=vars(owner).get(name, _MISSING),
            raw_replacement=kind(replacement) if kind else replacement,
            imported_by=tuple(imported_by),
        )
        setattr(owner, name, applied.raw_replacement)
        _repoint(applied, original, replacement)
        _registry.patches.append(applied)
        return True


def add(owner: Owner, name: str, value: Any) -> bool:
    """Give `owner` a new attribute; returns whether this call did it (False when it was added before).

    Raises AttributeError when `owner` already has an attribute of that name which is not ours.
    """
    with _registry.lock:
        if _registry.of(owner, name):
            return False
        if _raw(owner, name) is not _MISSING:
            raise AttributeError(
                f"{_owner_name(owner)} already has an attribute {name!r}: refusing to replace it"
            )
        setattr(owner, name, value)
        _registry.patches.append(
            Patch(owner, name, ("add", name), _MISSING, value, raw_original=_MISSING, raw_replacement=value)
        )
        return True


def original_of(owner: Owner, name: str) -> Any:
    """What `owner.name` was before any patch; the present attribute where there is none.

    For a staticmethod or classmethod this is the plain function. Raises AttributeError when there is no such
    attribute, or when it did not exist before `add`.
    """
    with _registry.lock:
        patches = _registry.of(owner, name)
        original = patches[0].original if patches else _raw(owner, name)
    if original is _MISSING:
        raise AttributeError(f"{_owner_name(owner)} has no original attribute {name!r}")
    return original.__func__ if isinstance(original, (staticmethod, classmethod)) else original


def is_patched(owner: Owner, name: str) -> bool:
    """Whether a patch (or an `add`) of `owner.name` is in force in this process."""
    with _registry.lock:
        return bool(_registry.of(owner, name))


def patches() -> tuple[Patch, ...]:
    """All patches in force, oldest first."""
    with _registry.lock:
        return tuple(_registry.patches)


def undo_all() -> int:
    """Take every patch back, newest first; returns how many. For tests: nothing may be running."""
    with _registry.lock:
        count = len(_registry.patches)
        while _registry.patches:
            done = _registry.patches.pop()
            if done.raw_original is _MISSING:
                delattr(done.owner, done.name)
            else:
                setattr(done.owner, done.name, done.raw_original)
            _repoint(done, done.replacement, done.original)
        return count


def _raw(owner: Owner, name: str) -> Any:
    """The attribute without binding: descriptors stay descriptors; inherited ones are found too."""
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, _MISSING)
    return inspect.getattr_static(owner, name, _MISSING)


def _repoint(applied: Patch, old: Any, new: Any) -> None:
    for module_name in applied.imported_by:
        module = sys.modules.get(module_name)
        if module is not None and vars(module).get(applied.name) is old:
            setattr(module, applied.name, new)


def _key_of(make_wrapper: Callable[[Any], Any]) -> object:
    # Code objects compare by value: a nested function built on each call of register() has the same key each
    # time, and so has the function of a module that was reloaded.
    code = getattr(make_wrapper, "__code__", None)
    if code is None:
        return make_wrapper
    return (make_wrapper.__module__, make_wrapper.__qualname__, code)


def _owner_name(owner: Owner) -> str:
    return (
        owner.__name__ if isinstance(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    )
