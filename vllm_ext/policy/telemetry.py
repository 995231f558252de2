"""The ``telemetry`` section's shape: what the server writes down about itself."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Annotated

from pydantic import Field

from vllm_ext.policy.fields import Section, Size, Text, without_null


class TelemetryPolicy(Section):
    """What the server writes down about itself."""

    block_trace: Annotated[Text | None, Field(json_schema_extra=without_null)] = None
    """File for a trace of all finished requests, for `vllm-ext replay`: keyed hashes of their KV blocks, no
    tokens. A relative path starts at this file's folder. Engine number N > 0 writes FILE.engineN."""

    max_size: Size = 1024 * 1024 * 1024
    """When the file has this size, as in 1GiB, it becomes FILE.1 (in place of an older one) and a new one is
    begun."""

    def trace_path(self, base_dir: FilePath) -> FilePath | None:
        """The trace's file, absolute; None: no trace."""
        return None if self.block_trace is None else (base_dir / self.block_trace).absolute()
