"""The block trace runs inside vLLM's scheduler: whatever goes wrong in it, a step must not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ext_plugin.block_trace import BlockTrace
from vllm_ext_plugin.faults import Faults

pytestmark = pytest.mark.unit


def test_a_step_survives_a_fault_in_the_trace() -> None:
    trace = BlockTrace.__new__(BlockTrace)
    trace._recorder = SimpleNamespace(broken=False)  # type: ignore[assignment]
    trace._faults = Faults()
    unlike_vllms = SimpleNamespace(scheduled_new_reqs=[object()])
    trace.scheduled({}, unlike_vllms)
    assert trace._faults.counts == {"block_trace": 1}
