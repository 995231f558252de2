"""Notice that a policy file, or a file it refers to, has changed.

Watches folders, not files: editors and Kubernetes replace files (a ConfigMap swaps a symbolic link two steps
away), and a watch on the old file would never hear of the new one. What the operating system does not tell
(network file systems, a link further up) is found by comparing the files' stamps every few seconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
DEBOUNCE_SECONDS = 0.1
_MAX_LINKS = 40


class PolicyWatcher:
    """Calls ``reload`` in a daemon thread after each change to ``path`` or to one of ``referenced()``."""

    def __init__(
        self,
        path: FilePath,
        referenced: Callable[[], Iterable[FilePath]],
        reload: Callable[[], object],
        poll_seconds: float | None = None,
    ) -> None:
        self._path = path
        self._referenced = referenced
        self._reload = reload
        self._poll_seconds = POLL_SECONDS if poll_seconds is None else poll_seconds
        self._seen: object = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-ext-policy-watch", daemon=True)

    def start(self) -> None:
        """Start the thread. A change between loading and this call is noticed, too."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, unless called from it."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        told = ""
        while not self._stop.is_set():
            folders: list[FilePath] = []
            try:
                # Whatever goes wrong in here is over, or met again, at the next look: never end the thread.
                folders = self._folders()
                self._watch(folders)
            except Exception as error:  # inotify's limits, a folder that vanished: keep comparing stamps
                if (reason := f"cannot watch {', '.join(map(str, folders)) or self._path}: {error}") != told:
                    logger.warning("%s; looking every %g s instead", reason, self._poll_seconds)
                    told = reason
                self._stop.wait(self._poll_seconds)

    def _watch(self, folders: list[FilePath]) -> None:
        """Watch until the set of folders changes."""
        from watchfiles import watch  # only a server that watches pays for it

        self._reload_if_changed()
        for _ in watch(
            *folders,
            watch_filter=None,
            debounce=int(DEBOUNCE_SECONDS * 1000),
            step=50,
            stop_event=self._stop,
            rust_timeout=int(self._poll_seconds * 1000),
            yield_on_timeout=True,
            recursive=False,
            raise_interrupt=False,
        ):
            if self._stop.is_set():
                return
            self._reload_if_changed()
            if self._folders() != folders:
                return

    def _reload_if_changed(self) -> None:
        stamps = self._stamps()
        if stamps != self._seen:
            self._reload()
            # Changed meanwhile, or other files are referred to now: look again next time.
            self._seen = stamps if self._stamps() == stamps else None

    def _stamps(self) -> list[tuple[str, object]]:
        stamps: list[tuple[str, object]] = []
        for file in self._files():
            try:
                stat = os.stat(file)
                stamps.append(
                    (str(file), (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
                )
            except (OSError, ValueError):
                stamps.append((str(file), None))
        return stamps

    def _files(self) -> list[FilePath]:
        return [self._path, *self._referenced()]

    def _folders(self) -> list[FilePath]:
        """The existing folders of all files and of every link on the way to them."""
        folders: set[FilePath] = set()
        for file in self._files():
            try:
                self._add_folders(file, folders)
            except (OSError, RuntimeError, ValueError):
                continue  # no such name, not ours to look at, or gone meanwhile: its stamp will tell
        return sorted(folders)

    def _add_folders(self, file: FilePath, folders: set[FilePath]) -> None:
        for _ in range(_MAX_LINKS):
            if file.parent.is_dir():
                folders.add(file.parent.absolute())
                folders.add(file.parent.resolve())
            if not file.is_symlink():
                break
            file = file.parent / file.readlink()
