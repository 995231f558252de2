"""The policy in force, and how it changes while the server runs.

Readers take ``store.current`` and keep it for as long as one decision lasts: it is replaced as a whole, never
altered. A policy that is invalid, or that changes what needs a restart, leaves the old one in force and says
why.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Literal

from vllm_ext.policy.changes import describe_changes
from vllm_ext.policy.loading import (
    default_snapshot,
    default_text,
    load_policy,
    parse_policy,
    read_policy_text,
)
from vllm_ext.policy.problems import Path, PolicyError, format_path
from vllm_ext.policy.snapshot import PolicySnapshot
from vllm_ext.policy.watching import PolicyWatcher

logger = logging.getLogger(__name__)

Outcome = Literal["reloaded", "unchanged", "refused", "invalid"]
OnSwap = Callable[[PolicySnapshot, PolicySnapshot], None]
Validator = Callable[[PolicySnapshot], None]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What came of a reload. ``digest`` is that of the policy in force afterwards."""

    outcome: Outcome
    digest: str
    message: str


class PolicyStore:
    """Holds the current snapshot of one policy file; None: the built-in default.

    Raises PolicyError at construction. ``on_swap`` is called with (old, new) after each swap, ``on_result``
    with each ReloadResult that is news: all that somebody asked for, and of what the watcher finds not the
    file that is as it was, nor the mistake that was reported already. Both are lists and may be appended to.
    Callbacks run in the thread that reloads; one that fails is logged and stops nothing. ``validators`` are
    called with the new snapshot before a swap: one that raises ValueError refuses it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, on_swap: OnSwap | None = None) -> None:
        self.path = FilePath(path) if path is not None else None
        self.on_swap: list[OnSwap] = [on_swap] if on_swap else []
        self.on_result: list[Callable[[ReloadResult], None]] = []
        self.validators: list[Validator] = []
        self.current: PolicySnapshot = default_snapshot() if self.path is None else load_policy(self.path)
        self.generation = 0
        self.last_error: str | None = None
        self._failed_files: tuple[FilePath, ...] = ()  # of a policy that was invalid: they may mend it
        self._lock = threading.RLock()
        self._watcher: PolicyWatcher | None = None

    def reload(self) -> ReloadResult:
        """Read the file again and swap if it is sound. Never raises."""
        path = self.path
        if path is None:
            message = "the built-in default policy is in force; there is no file to reload"
            return self.report(ReloadResult("unchanged", self.current.digest, message))
        return self._change(lambda: load_policy(path))

    def read(self) -> str:
        """The policy file's text as it is now, to be given to ``check`` and ``apply``. Raises PolicyError."""
        return default_text() if self.path is None else read_policy_text(self.path)

    def check(self, text: str) -> ReloadResult:
        """What ``apply`` would say of this text. Changes nothing and tells no callback. Never raises."""
        with self._lock:
            _, result = self._examine(lambda: self._parse(text))
        return result

    def apply(self, text: str, asked: bool = True) -> ReloadResult:
        """As ``reload``, from a text: another process pushes the very bytes it has read. Never raises.

        ``asked=False``: nobody called for it, so only news is told.
        """
        return self._change(lambda: self._parse(text), asked)

    def start_watching(self, follow: Callable[[], object] | None = None) -> None:
        """Reload whenever the file, or one that it refers to, changes. In a daemon thread, until ``stop``.

        ``follow`` is called instead where a change must go through others first; raising means "try again".
        """
        with self._lock:
            if self.path is not None and self._watcher is None:
                self._watcher = PolicyWatcher(self.path, self._referenced, follow or self._follow)
                self._watcher.start()

    def stop(self) -> None:
        """Stop watching. The current snapshot stays in force."""
        with self._lock:
            watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    def _referenced(self) -> tuple[FilePath, ...]:
        return (*self.current.files, *self._failed_files)

    def _parse(self, text: str) -> PolicySnapshot:
        base_dir = self.path.parent if self.path else FilePath()
        return parse_policy(text, source=str(self.path or "policy"), base_dir=base_dir)

    def _follow(self) -> None:
        """The watcher's reload: silent where there is nothing new."""
        path = self.path
        assert path is not None, "without a file there is nothing to watch"
        self._change(lambda: load_policy(path), asked=False)

    def _change(self, load: Callable[[], PolicySnapshot], asked: bool = True) -> ReloadResult:
        with self._lock:
            new, result = self._examine(load)
            if new is not None:
                old, self.current = self.current, new
                self.generation += 1
                for callback in tuple(self.on_swap):
                    _call(callback, old, new)
            return self._report(result, asked)

    def _examine(self, load: Callable[[], PolicySnapshot]) -> tuple[PolicySnapshot | None, ReloadResult]:
        """Load and judge a policy: the snapshot if it may come into force, and the result either way."""
        old = self.current

        def verdict(outcome: Outcome, message: str) -> tuple[None, ReloadResult]:
            return None, ReloadResult(outcome, old.digest, message)

        try:
            new = load()
        except PolicyError as error:
            self._failed_files = error.files
            return verdict("invalid", str(error))
        except Exception as error:  # a fault of ours must not take the server's policy away
            return verdict("invalid", f"cannot load the policy: {type(error).__name__}")
        self._failed_files = ()
        if new.fingerprint == old.fingerprint:
            return verdict("unchanged", "nothing has changed")
        if changed := restart_only_changes(old, new):
            return verdict("refused", "\n".join(changed))
        try:
            for validator in tuple(self.validators):
                validator(new)
        except Exception as error:
            logger.debug("a policy validator refused", exc_info=True)
            return verdict("refused", f"{new.source}: {error}")
        digests = f"{new.digest[:12]} in force, before it {old.digest[:12]}"
        message = f"policy reloaded: {digests}: {describe_changes(old, new)}"
        return new, ReloadResult("reloaded", new.digest, message)

    def report(self, result: ReloadResult, asked: bool = True) -> ReloadResult:
        """Remember, log and pass on a result; for a ``check`` that ended a reload. Returns it."""
        with self._lock:
            return self._report(result, asked)

    def _report(self, result: ReloadResult, asked: bool) -> ReloadResult:
        """``asked``: somebody called for this reload, so that it is told whatever came of it."""
        before, failed = self.last_error, result.outcome in ("invalid", "refused")
        if result.outcome == "unchanged" and before is not None and self.path is not None:
            result = replace(result, message=f"policy file is sound again, {result.digest[:12]} in force")
        self.last_error = result.message if failed else None
        news = result.message != before if failed else result.outcome == "reloaded" or before is not None
        if not news:
            logger.debug("%s: %s", result.outcome, result.message)
        elif failed:
            logger.warning(
                "policy not reloaded (%s), the old one stays in force:\n%s", result.outcome, result.message
            )
        else:
            logger.info("%s", result.message)
        if news or asked:
            for callback in tuple(self.on_result):
                _call(callback, result)
        return result


def restart_only_changes(old: PolicySnapshot, new: PolicySnapshot) -> list[str]:
    """What differs and needs a restart, each as ``file:line:column: field: message``."""
    return [*_tenancy_changes(old, new), *_retention_changes(old, new), *_telemetry_changes(old, new)]


def _tenancy_changes(old: PolicySnapshot, new: PolicySnapshot) -> list[str]:
    before, after = old.policy.tenancy, new.policy.tenancy
    if before is None or after is None:
        return _presence(old, new, "tenancy", "isolation is switched on or off at start")
    changes = []
    path: Path = ("tenancy", "salt_secret")
    if before.salt_secret != after.salt_secret:
        changes.append(
            _refusal(old, new, path, "the reference changed: every cached prefix would be lost to its owner")
        )
    elif old.salt_secret != new.salt_secret:
        changes.append(_refusal(old, new, path, f"the value behind {after.salt_secret} changed"))
    if before.model_id != after.model_id:
        changes.append(_refusal(old, new, ("tenancy", "model_id"), "the model identity changed"))
    return changes


def _retention_changes(old: PolicySnapshot, new: PolicySnapshot) -> list[str]:
    before, after = old.policy.retention, new.policy.retention
    if before is None or after is None:
        return _presence(old, new, "retention", "the block pool is made at start")
    if before.order == after.order:
        return []
    message = f"the order changed from {before.order} to {after.order}: the block pool is made at start"
    return [_refusal(old, new, ("retention", "order"), message)]


def _telemetry_changes(old: PolicySnapshot, new: PolicySnapshot) -> list[str]:
    # With any section, our scheduler is in the engine and can begin and end a trace.
    if old.policy.is_for_the_engine == new.policy.is_for_the_engine:
        return []
    return _presence(old, new, "telemetry", "our scheduler is put into the engine at start")


def _presence(old: PolicySnapshot, new: PolicySnapshot, section: str, why: str) -> list[str]:
    """What to say when one of the two has a section and the other has not."""
    before, after = getattr(old.policy, section), getattr(new.policy, section)
    if (before is None) == (after is None):
        return []
    return [
        _refusal(old, new, (section,), f"the section was {'added' if before is None else 'removed'}: {why}")
    ]


def _refusal(old: PolicySnapshot, new: PolicySnapshot, path: Path, message: str) -> str:
    # A line that was removed is named as it was, in the policy that is still in force.
    position = new.position(path) or old.position(path)
    place = f"{new.source}:{position.line}:{position.column}" if position else new.source
    return f"{place}: {format_path(path)}: {message} (restart the server to apply it, or change it back)"


def _call(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:
        logger.exception("a policy callback failed")
