"""A scheduler as a user might write one, to be named by `--scheduler-cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """vLLM's own, that counts its steps."""

    steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().schedule(*args, **kwargs)
