"""The only code of this project that knows vLLM: entry points, one adapter per seam, and the table of seams
(`seams.py`).

vLLM calls `register` once in every process (`vllm.general_plugins`). Nothing is imported here until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def register() -> None:
    """Entry point of `vllm.general_plugins`: adds `--plugins` and `--policy` to vLLM's help; everything else
    waits to be named.
    """
    from vllm_ext_plugin.activation import register as register_plugin

    register_plugin()


@contextlib.contextmanager
def use_tenant(tenant: str) -> Iterator[None]:
    """Say on whose behalf the requests inside this block are made, for Python code that embeds `AsyncLLM`.

    Offline `LLM` callers may instead put `{"vllm_ext.tenant": NAME}` into `SamplingParams.extra_args`.

    Raises:
        ValueError: the policy in force does not know the tenant (raised when a request is added).
    """
    from vllm_ext_plugin.stamping import PYTHON_TENANT

    token = PYTHON_TENANT.set(tenant)
    try:
        yield
    finally:
        PYTHON_TENANT.reset(token)
