"""Tenant isolation, cache policy, speculation control and latency attribution for vLLM.

``vllm_ext`` is what we know about the problem; it never imports ``vllm``. The plugin that teaches it to a
running engine is the separate package ``vllm_ext_plugin``.

The names below are the public surface. They are imported on first use, so ``import vllm_ext`` costs next to
nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ext.policy import Policy, PolicyError, PolicySnapshot, PolicyStore, load_policy

__version__ = "0.1.0"

__all__ = ["Policy", "PolicyError", "PolicySnapshot", "PolicyStore", "__version__", "load_policy"]

_HOME = {
    "Policy": "vllm_ext.policy",
    "PolicyError": "vllm_ext.policy",
    "PolicySnapshot": "vllm_ext.policy",
    "PolicyStore": "vllm_ext.policy",
    "load_policy": "vllm_ext.policy",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
