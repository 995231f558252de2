"""The scheduler adapter: whatever front end a request came through, its blocks are salted here or it does not
run.

`make_scheduler` is what `scheduler_cls` points at. It is a factory, because only in the engine process is it
known whether the base is vLLM's synchronous scheduler, its asynchronous one, or one that the user chose.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm_ext.engine_totals import Report
from vllm_ext.policy import PolicyStore
from vllm_ext_plugin import engine_rpc
from vllm_ext_plugin.block_trace import BlockTrace
from vllm_ext_plugin.engine_config import policy_path
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.retention import offload_config
from vllm_ext_plugin.retention.feature import RetentionFeature
from vllm_ext_plugin.tenancy_feature import TenancyFeature


def make_scheduler(*, base: str | None = None, **kwargs: Any) -> Any:
    """Build the scheduler of an engine, called by vLLM with its scheduler's keyword arguments.

    Args:
        base: dotted path of the scheduler class (or factory is refused) that the user chose; None for vLLM's
            own choice.
    """
    engine_rpc.install()
    offload_config.register(kwargs["vllm_config"])
    return _extended_class(_base_class(base, kwargs["vllm_config"]))(**kwargs)


def _base_class(base: str | None, config: Any) -> type:
    if base is not None:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        chosen = resolve_obj_by_qualname(base)
        if not isinstance(chosen, type):
            raise TypeError(f"--scheduler-cls {base} is not a class, so vllm_ext cannot extend it")
        return chosen
    if config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


@cache
def _extended_class(base: type) -> type:
    return type(f"VllmExt{base.__name__}", (ExtensionScheduler, base), {"__module__": __name__})


class ExtensionScheduler:
    """Mixin over a vLLM scheduler. `add_request` never raises for our sake: vLLM calls it with no guard
    around.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hash_block_size = kwargs.get("hash_block_size") or kwargs["block_size"]
        self.vllm_ext = EngineExtension(self, kwargs["vllm_config"], hash_block_size)

    def add_request(self, request: Any) -> None:
        tenancy = self.vllm_ext.tenancy
        if tenancy is None:
            super().add_request(request)  # type: ignore[misc]
            return
        rejected = tenancy.enforce(request).rejected is not None
        session = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        if session is not None and not tenancy.continues(session, request):
            return  # somebody else's input for a running session
        super().add_request(request)  # type: ignore[misc]
        if rejected and session is None:
            self._reject(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.vllm_ext.block_trace.scheduled(self.requests, output)  # type: ignore[attr-defined]
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.vllm_ext.block_trace.finished(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self) -> None:
        self.vllm_ext.store.stop()
        self.vllm_ext.block_trace.close()
        super().shutdown()  # type: ignore[misc]

    def _reject(self, request: Any) -> None:
        """End the request with an error at the next step: parked as if its grammar had failed to compile,
        vLLM's own way.
        """
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        request.structured_output_request = None
        failed: Any = self.grammar_compile_error_reqs  # type: ignore[attr-defined]
        if isinstance(failed, dict):  # vLLM 0.33
            from vllm.outputs import RequestError

            failed[request.request_id] = RequestError(
                code="unknown_caller", message="the policy rejects callers that it does not know"
            )
        else:
            failed.add(request.request_id)


class EngineExtension:
    """What the engine process holds of ours: its own copy of the policy, and the features that it names."""

    def __init__(self, scheduler: Any, config: Any, hash_block_size: int) -> None:
        self.faults = Faults()
        self.store = PolicyStore(policy_path())
        policy = self.store.current.policy
        self.tenancy: TenancyFeature | None = None
        self.retention: RetentionFeature | None = None
        if policy.tenancy is not None:
            self.tenancy = TenancyFeature(config, self.store, hash_block_size, self.faults)
        if policy.retention is not None:
            self.retention = RetentionFeature(scheduler, config, self.store, self.faults)
        self.block_trace = BlockTrace(config, self.store, hash_block_size, self.faults)
        self.store.start_watching()

    def totals(self) -> Report:
        """Running totals for the front end's Prometheus counters."""
        totals: Report = {
            "errors": [([f"engine_{part}"], float(count)) for part, count in self.faults.counts.items()]
        }
        for feature in (self.tenancy, self.retention, self.block_trace):
            if feature is not None:
                totals.update(feature.totals())
        return totals

    def gauges(self) -> Report:
        """Present values for the front end's Prometheus gauges."""
        gauges = self.block_trace.gauges()
        if self.retention is not None:
            gauges.update(self.retention.gauges())
        return gauges
