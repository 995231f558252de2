"""The ``vllm-ext`` command."""

from __future__ import annotations

from vllm_ext.cli.app import main

__all__ = ["main"]
