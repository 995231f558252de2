"""Readers of block traces. Each gives a `Trace` or raises `TraceError` with file and line."""

from __future__ import annotations

from vllm_ext.cache.traces.agents import read_agents
from vllm_ext.cache.traces.mooncake import read_mooncake
from vllm_ext.cache.traces.native import read_native
from vllm_ext.cache.traces.trace import Request, Trace, TraceError, make_trace

__all__ = ["Request", "Trace", "TraceError", "make_trace", "read_agents", "read_mooncake", "read_native"]
