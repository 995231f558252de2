"""The scheduler adapter: whatever front end a request came through, its blocks are salted here or it does not
run.

`make_scheduler` is what `scheduler_cls` points at. It is a factory, because only in the engine process is it
known whether the base is vLLM's synchronous scheduler, its asynchronous one, or one that the user chose.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from typing import Any

from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.engine_side import EngineTenancy, Ruling
from vllm_ext.tenancy.identity import Identity
from vllm_ext.tenancy.salt import Salter
from vllm_ext.tenancy.shared_prefix import SharedPrefixes
from vllm_ext.tenancy.stamp import STAMP_KEY, Stamper
from vllm_ext_plugin import block_hashes, engine_rpc
from vllm_ext_plugin.engine_config import policy_path, salt_secret
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.model_identity import model_identity
from vllm_ext_plugin.shared_prefixes import registered_prefixes

IDENTITY = "_vllm_ext_identity"

logger = logging.getLogger("vllm_ext")


def make_scheduler(*, base: str | None = None, **kwargs: Any) -> Any:
    """Build the scheduler of an engine, called by vLLM with its scheduler's keyword arguments.

    Args:
        base: dotted path of the scheduler class (or factory is refused) that the user chose; None for vLLM's
            own choice.
    """
    block_hashes.install()
    engine_rpc.install()
    return _tenancy_class(_base_class(base, kwargs["vllm_config"]))(**kwargs)


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
def _tenancy_class(base: type) -> type:
    return type(f"VllmExt{base.__name__}", (TenancyScheduler, base), {"__module__": __name__})


class TenancyScheduler:
    """Mixin over a vLLM scheduler. `add_request` never raises for our sake: vLLM calls it with no guard
    around.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = kwargs["vllm_config"]
        self.vllm_ext = EngineExtension(
            config, hash_block_size=kwargs.get("hash_block_size") or kwargs["block_size"]
        )

    def add_request(self, request: Any) -> None:
        ruling = self.vllm_ext.enforce(request)
        super().add_request(request)  # type: ignore[misc]
        if ruling.rejected is not None:
            self._reject(request)

    def shutdown(self) -> None:
        self.vllm_ext.store.stop()
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
    """The engine process' own copy of the policy, and the enforcement of salts."""

    def __init__(self, config: Any, hash_block_size: int) -> None:
        self._config = config
        self._block_size = hash_block_size
        self.faults = Faults()
        self._prepared: tuple[PolicySnapshot, EngineTenancy] | None = None
        self.store = PolicyStore(policy_path())
        self._secret = salt_secret(self.store.current)
        self.tenancy = self._build(self.store.current)
        self.store.validators.append(self._prepare)
        self.store.on_swap.append(self._swapped)
        self.store.start_watching()

    def enforce(self, request: Any) -> Ruling:
        """Salt the request's blocks. Never raises: if our code fails, the request gets a domain of its
        own.
        """
        try:
            return self._enforce(request)
        except Exception:
            self.faults.caught("salting")
        ruling = self.tenancy.rule_closed()
        request.__dict__.pop(block_hashes.SPLIT, None)
        request.cache_salt = ruling.salt
        request.block_hashes.clear()
        try:
            request.update_block_hashes()
        except Exception:
            # Not even hashing works: the request runs without a hash, so nothing of it can be found by
            # anyone.
            self.faults.caught("hashing")
            request.block_hashes.clear()
            request._block_hasher = None
        return ruling

    def _enforce(self, request: Any) -> Ruling:
        params = request.sampling_params or request.pooling_params
        extra = getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None) or {}
        ruling = self.tenancy.rule(
            extra.get(STAMP_KEY),
            request.request_id,
            request.cache_salt,
            None if request.prompt_embeds is not None else request.prompt_token_ids,
            min((feature.mm_position.offset for feature in request.mm_features), default=None),
        )
        changed = request.cache_salt != ruling.first_salt or bool(request.mm_features)
        request.cache_salt = ruling.first_salt
        request.__dict__[IDENTITY] = ruling.identity
        if ruling.shared is not None:
            request.__dict__[block_hashes.SPLIT] = block_hashes.Split(ruling.shared.num_tokens, ruling.salt)
            changed = True
        if request.mm_features:
            # vLLM shares encoder outputs by this identifier across all requests: make it the domain's own.
            request.mm_features = [
                dataclasses.replace(feature, identifier=f"{ruling.salt[:32]}:{feature.identifier}")
                for feature in request.mm_features
            ]
        if changed:
            request.block_hashes.clear()
            request.update_block_hashes()
        return ruling

    def totals(self) -> dict[str, list[tuple[list[str], float]]]:
        """Running totals for the front end's Prometheus counters."""
        return {
            "decisions": [([*labels], float(count)) for labels, count in self.tenancy.decisions.items()],
            "stamp_failures": [
                ([reason], float(count)) for reason, count in self.tenancy.stamp_failures.items()
            ],
            "errors": [([f"engine_{part}"], float(count)) for part, count in self.faults.counts.items()],
        }

    def _build(self, snapshot: PolicySnapshot) -> EngineTenancy:
        tenancy = snapshot.policy.tenancy
        assert tenancy is not None
        salter = Salter(self._secret, model_identity(self._config, tenancy.model_id))
        prefixes = registered_prefixes(snapshot, self._config.model_config, self._block_size)
        return EngineTenancy(
            Stamper(self._secret),
            salter,
            Authenticator(snapshot),
            SharedPrefixes(prefixes, salter, self._block_size),
        )

    def _prepare(self, snapshot: PolicySnapshot) -> None:
        """Before a swap: whatever can fail for the new policy fails here, while the old one stays in
        force.
        """
        self._prepared = (snapshot, self._build(snapshot))

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        prepared, self._prepared = self._prepared, None
        built = prepared[1] if prepared and prepared[0] is new else self._build(new)
        built.decisions, built.stamp_failures = self.tenancy.decisions, self.tenancy.stamp_failures
        self.tenancy = built


def identity_of(request: Any) -> Identity | None:
    """The identity that the engine believes of a vLLM `Request` (None before it was added)."""
    return request.__dict__.get(IDENTITY)
