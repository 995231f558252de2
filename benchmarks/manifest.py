"""What a benchmark result must say about itself, so that somebody else can tell whether theirs is
comparable.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm-ext", "vllm", "torch", "pydantic", "prometheus-client")


def manifest(**what: Any) -> dict[str, Any]:
    """Machine, versions and commit, plus `what` was measured and how (parameters, repeats, warm-up)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu(),
        "packages": {name: _version(name) for name in _PACKAGES},
        **what,
    }


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> dict[str, Any]:
    import os

    names = [
        line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    return {"model": names[0] if names else platform.processor(), "cores": os.cpu_count()}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
