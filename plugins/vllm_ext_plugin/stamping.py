"""`OutputProcessor`, wrapped: every request of every front end passes here once, with its final internal id.

`AsyncLLM` (HTTP, gRPC, embedded) and `LLMEngine` (offline `LLM`) both register a request here right before
they send it to the engine, in the task that serves the caller, so the identity that the HTTP middleware left
in a context variable is visible. (It is not inside `process_inputs`, which may run in an executor.)
"""

from __future__ import annotations

import copy
import functools
import logging
import secrets
from contextvars import ContextVar
from typing import Any

from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.identity import IdentifiedBy, Identity, Rejection
from vllm_ext.tenancy.stamp import ISOLATE, STAMP_KEY, TENANT_KEY
from vllm_ext_plugin import front_end as front_ends
from vllm_ext_plugin.patching import patch

HTTP_IDENTITY: ContextVar[Identity | None] = ContextVar("vllm_ext_http_identity", default=None)
PYTHON_TENANT: ContextVar[str | None] = ContextVar("vllm_ext_python_tenant", default=None)

logger = logging.getLogger("vllm_ext")

_FRONT_END = "_vllm_ext_front_end"
_IDENTITY = "_vllm_ext_identity"


class RequestRefused(ValueError):
    """A request that must not run: its caller named no tenant (or an unknown one) and the policy says so."""


@functools.cache
def _refusal() -> type[RequestRefused]:
    """`RequestRefused` that vLLM's front ends also know as the client's mistake (a 4xx with its message)."""
    from vllm.exceptions import VLLMValidationError

    return type("RequestRefused", (VLLMValidationError, RequestRefused), {"__module__": __name__})


def install() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    patch(OutputProcessor, "__init__", _binding_init)
    patch(OutputProcessor, "add_request", _stamping_add_request)
    for name, wrapper in (
        ("_finish_request", _counting_finish_request),
        ("abort_requests", _counting_abort_requests),
    ):
        try:
            patch(OutputProcessor, name, wrapper)
        except AttributeError as error:
            logger.error("tokens per tenant will not be counted: %s", error)


def _binding_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The engine that is being built now is the one whose configuration was made last.
        self.__dict__[_FRONT_END] = front_ends.latest()

    return __init__


def _stamping_add_request(original: Any) -> Any:
    def add_request(
        self: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
        **kwargs: Any,
    ) -> Any:
        front_end = self.__dict__.get(_FRONT_END)
        if front_end is None:
            return original(self, request, prompt, parent_req, request_index, queue, **kwargs)
        front_end.watch()
        identity = stamp(front_end, request, in_process=queue is None)
        result = original(self, request, prompt, parent_req, request_index, queue, **kwargs)
        state = self.request_states.get(request.request_id)
        if state is not None:
            setattr(state, _IDENTITY, identity)
        return result

    return add_request


def stamp(front_end: front_ends.FrontEnd, request: Any, in_process: bool) -> Identity:
    """Put identity, stamp and salt into an `EngineCoreRequest`.

    Args:
        in_process: the caller is Python code in this process (offline `LLM`), which may name its tenant in
            `extra_args`.

    Raises:
        RequestRefused: the policy rejects the caller. Any other failure isolates the request instead.
    """
    claimed = None
    try:
        claimed = _take_our_keys(request)
        identity = _who(front_end.authenticator, claimed if in_process else None)
        client_salt = request.cache_salt
        _extra(request)[STAMP_KEY] = front_end.stamper.stamp(identity, client_salt, request.request_id)
        request.cache_salt = front_end.salter.domain_salt(identity.domain, client_salt)
    except RequestRefused:
        front_end.metrics.request_rejected("no_tenant_named")
        raise
    except Exception:
        front_end.failed("stamping")
        identity = Identity.isolated("internal_error")
        request.cache_salt = secrets.token_hex(32)
        _extra(request)[STAMP_KEY] = ISOLATE
    try:
        front_end.metrics.request_admitted(identity)
    except Exception:
        front_end.failed("metrics")
    return identity


def _who(authenticator: Authenticator, claimed_tenant: Any) -> Identity:
    identity = HTTP_IDENTITY.get()
    if identity is not None:
        return identity
    tenant = PYTHON_TENANT.get() or claimed_tenant
    if tenant is None:
        found = authenticator.unknown("no_tenant_named", "no tenant was named")
    elif isinstance(tenant, str) and authenticator.is_listed(tenant):
        found = authenticator.listed_tenant(tenant, IdentifiedBy.PYTHON)
    else:
        names = ", ".join(authenticator.listed_names()) or "none"
        raise _refusal()(f"tenant {tenant!r} is not in the policy; listed: {names}")
    if isinstance(found, Rejection):
        raise _refusal()(
            f"{found.message} and the policy rejects unknown callers: name one in "
            f"SamplingParams(extra_args={{{TENANT_KEY!r}: NAME}}) or with vllm_ext_plugin.use_tenant(NAME)"
        )
    return found


def _take_our_keys(request: Any) -> Any:
    """Give the request its own params (vLLM shares them between the samples of `n > 1`) without our keys;
    return a named tenant.
    """
    extra = _extra(request)
    extra.pop(STAMP_KEY, None)
    return extra.pop(TENANT_KEY, None)


def _extra(request: Any) -> dict[str, Any]:
    """The request's own copy of its free-form parameters, writable."""
    sampling = request.sampling_params is not None
    params = copy.copy(request.sampling_params if sampling else request.pooling_params)
    name = "extra_args" if sampling else "extra_kwargs"
    extra = dict(getattr(params, name, None) or {})
    setattr(params, name, extra)
    if sampling:
        request.sampling_params = params
    else:
        request.pooling_params = params
    return extra


def _counting_finish_request(original: Any) -> Any:
    def _finish_request(self: Any, req_state: Any, *args: Any, **kwargs: Any) -> Any:
        _count_tokens(self, req_state)
        return original(self, req_state, *args, **kwargs)

    return _finish_request


def _counting_abort_requests(original: Any) -> Any:
    def abort_requests(self: Any, request_ids: Any, internal: bool, *args: Any, **kwargs: Any) -> Any:
        ids = list(request_ids)
        aborted = []
        for request_id in ids:
            internal_ids = [request_id] if internal else self.external_req_ids.get(request_id, ())
            aborted += [self.request_states.get(internal_id) for internal_id in internal_ids]
        result = original(self, ids, internal, *args, **kwargs)
        for state in aborted:
            if state is not None:
                _count_tokens(self, state)
        return result

    return abort_requests


def _count_tokens(processor: Any, state: Any) -> None:
    """Prompt tokens and reused ones, once per request, when it leaves; a request that left before its prefill
    has none.
    """
    front_end = processor.__dict__.get(_FRONT_END)
    identity = state.__dict__.pop(_IDENTITY, None)
    if front_end is None or identity is None or state.is_prefilling:
        return
    try:
        front_end.metrics.prefill_finished(identity, state.prompt_len, state.num_cached_tokens)
    except Exception:
        front_end.failed("metrics")
