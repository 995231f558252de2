"""``python -m vllm_ext.cli``."""

from __future__ import annotations

from vllm_ext.cli.app import main

main(prog_name="vllm-ext")
