"""Entry point of `vllm.endpoint_plugins`: the identity middleware, and the operator's routes under
`/vllm_ext/v1`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from vllm_ext.policy import PolicyError, ReloadResult
from vllm_ext.tenancy.authenticator import Credentials
from vllm_ext_plugin import front_end as front_ends
from vllm_ext_plugin import operations
from vllm_ext_plugin.engine_rpc import ask_engines
from vllm_ext_plugin.middleware import IdentityMiddleware, MetricsMiddleware, with_timeout
from vllm_ext_plugin.operations import Operations

ENGINE_TIMEOUT = 2.0
RELOAD_TIMEOUT = 30.0

logger = logging.getLogger("vllm_ext")


def create_endpoint_plugin() -> EndpointPlugin:
    return EndpointPlugin()


class EndpointPlugin:
    """vLLM's `EndpointPlugin` protocol. Attaches nothing where the policy asks for nothing."""

    name = "vllm_ext"
    required_tasks = None

    def __init__(self) -> None:
        self.engine_client: Any = None
        self._reloading = asyncio.Lock()
        self.operations: Operations | None = None

    def attach_router(self, app: Any) -> None:
        self.operations = operations.latest()
        if self.operations is None:
            return
        front_end = front_ends.latest()
        if front_end is not None:
            front_end.metrics.register(self.operations.totals)
            app.add_middleware(IdentityMiddleware, front_end=front_end)
        app.add_middleware(MetricsMiddleware, before=self.fetch_engine_metrics)
        app.include_router(self._router())

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self.engine_client = engine_client
        if self.operations is None:
            return
        if engine_client is None:  # vLLM's render server has no engine that could refuse
            self.operations.watch()
        else:
            loop = asyncio.get_running_loop()
            self.operations.watch(lambda: self._follow(loop))

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """The policy file has changed (told by the watcher's thread): the engine first, as for a reload by
        hand.

        Raises:
            RuntimeError: the engine did not answer; the watcher tries again.
        """
        done = asyncio.run_coroutine_threadsafe(self.reload(asked=False), loop)
        status, answer = done.result(timeout=2 * RELOAD_TIMEOUT)
        if status == 503:
            raise RuntimeError(answer["message"])

    async def fetch_engine_metrics(self) -> None:
        """Bring the engine's numbers into this process' `/metrics`. Of several API servers only the first
        does, or they would add up.
        """
        core = getattr(self.engine_client, "engine_core", None)
        if core is None or self.operations is None or getattr(core, "client_index", 0) != 0:
            return
        answers = await with_timeout(ask_engines(self.engine_client, "metrics"), ENGINE_TIMEOUT)
        for index, answer in enumerate(answers or ()):
            if "error" in answer:
                logger.debug("vllm_ext: engine %d has no counters: %s", index, answer["error"])
            else:
                self.operations.update(index, answer)

    def _router(self) -> Any:
        from fastapi import APIRouter, Request
        from fastapi.responses import JSONResponse

        served = self.operations
        assert served is not None
        router = APIRouter(prefix="/vllm_ext/v1", tags=["vllm_ext"])

        async def get_policy(request: Request) -> JSONResponse:
            """The policy in force, here and in the engine, and why the last reload failed if it did."""
            refused = _refuse_unless_admin(served, request)
            if refused is not None:
                return refused
            engines = await with_timeout(ask_engines(self.engine_client, "policy"), ENGINE_TIMEOUT)
            return JSONResponse({**describe(served), "engines": engines or []})

        async def reload_policy(request: Request) -> JSONResponse:
            """Read the policy file again and put it in force in the front end and the engine, or say why
            not.
            """
            refused = _refuse_unless_admin(served, request)
            if refused is not None:
                return refused
            status, answer = await self.reload()
            return JSONResponse(answer, status_code=status)

        # Under `from __future__ import annotations` FastAPI resolves annotations in module globals, where
        # Request is not.
        for endpoint in (get_policy, reload_policy):
            endpoint.__annotations__ = {"request": Request}
        router.add_api_route("/policy", get_policy, methods=["GET"], response_model=None)
        router.add_api_route("/policy/reload", reload_policy, methods=["POST"], response_model=None)
        return router

    async def reload(self, asked: bool = True) -> tuple[int, dict[str, Any]]:
        """First the engine takes the file's text, then the front end the same text, so both hold the same
        bytes or the old ones. A long policy takes its time to read: not on the event loop.

        Args:
            asked: an operator called for it, so the outcome is counted whatever it is.

        Returns:
            (HTTP status, what to answer).
        """
        async with self._reloading:
            return await self._reload(asked)

    async def _reload(self, asked: bool) -> tuple[int, dict[str, Any]]:
        served = self.operations
        assert served is not None
        store = served.store
        try:
            text = store.read()
        except PolicyError as error:
            checked = ReloadResult("invalid", store.current.digest, str(error))
        else:
            checked = await asyncio.to_thread(store.check, text)
        if not _applied(checked.outcome):
            store.report(checked, asked)
            return 400, {**describe(served), "outcome": checked.outcome, "message": checked.message}
        engines = await with_timeout(ask_engines(self.engine_client, "apply_policy", text), RELOAD_TIMEOUT)
        if not engines:
            return 503, {**describe(served), "outcome": "refused", "message": "the engine did not answer"}
        failures = [answer for answer in engines if not _applied(answer.get("outcome"))]
        if failures:
            reason = "; ".join(str(answer.get("error") or answer.get("message")) for answer in failures)
            refused = ReloadResult("refused", store.current.digest, f"the engine keeps its policy: {reason}")
            store.report(refused, asked)
            return 409, {**describe(served), "outcome": refused.outcome, "message": refused.message}
        result = await asyncio.to_thread(store.apply, text, asked)
        status = 200 if _applied(result.outcome) else 400
        return status, {
            **describe(served),
            "outcome": result.outcome,
            "message": result.message,
            "engines": engines,
        }


def describe(served: Operations) -> dict[str, Any]:
    """What an operator may see of the policy in force: names, never secrets or key digests."""
    store = served.store
    snapshot = store.current
    tenancy, retention = snapshot.policy.tenancy, snapshot.policy.retention
    telemetry = snapshot.policy.telemetry
    return {
        "source": snapshot.source,
        "digest": snapshot.digest,
        "generation": store.generation,
        "loaded_at": snapshot.loaded_at,
        "last_error": store.last_error,
        "tenancy": None
        if tenancy is None
        else {
            "unknown": tenancy.unknown,
            "tenants": {name: snapshot.domain_of(name) for name in tenancy.tenants},
            "gateway": tenancy.gateway is not None,
            "shared_prefixes": [shared.name for shared in tenancy.shared_prefixes],
        },
        "retention": None if retention is None else {"order": retention.order},
        "block_trace": str(telemetry.block_trace) if telemetry and telemetry.block_trace else None,
    }


def _applied(outcome: str | None) -> bool:
    return outcome in ("reloaded", "unchanged")


def _refuse_unless_admin(served: Operations, request: Any) -> Any:
    """403 without a key or where the policy names no admin; compared in constant time."""
    from fastapi.responses import JSONResponse

    if served.admins.hold(Credentials(request.scope["headers"])):
        return None
    message = (
        "an admin API key is needed: Authorization: Bearer KEY"
        if served.admins.exist
        else "the policy names no admin: list a key digest under admin.api_keys"
    )
    error = {"message": message, "type": "permission_error", "param": None, "code": "not_admin"}
    return JSONResponse({"error": error}, status_code=403)
