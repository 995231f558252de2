"""Entry point of `vllm.endpoint_plugins`: the identity middleware, and the operator's routes under
`/vllm_ext/v1`.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_ext.policy import PolicyError, ReloadResult
from vllm_ext.tenancy.authenticator import Credentials
from vllm_ext.tenancy.metrics import EngineTotals
from vllm_ext_plugin import front_end as front_ends
from vllm_ext_plugin.engine_rpc import ask_engines
from vllm_ext_plugin.front_end import FrontEnd
from vllm_ext_plugin.middleware import IdentityMiddleware, with_timeout

ENGINE_TIMEOUT = 2.0
RELOAD_TIMEOUT = 30.0

logger = logging.getLogger("vllm_ext")


def create_endpoint_plugin() -> EndpointPlugin:
    return EndpointPlugin()


class EndpointPlugin:
    """vLLM's `EndpointPlugin` protocol. Attaches nothing where the policy has no tenancy."""

    name = "vllm_ext"
    required_tasks = None

    def __init__(self) -> None:
        self.engine_client: Any = None
        self.front_end: FrontEnd | None = None
        self._totals: EngineTotals | None = None

    def attach_router(self, app: Any) -> None:
        self.front_end = front_ends.latest()
        if self.front_end is None:
            return
        self._totals = EngineTotals(self.front_end.metrics)
        app.add_middleware(
            IdentityMiddleware, front_end=self.front_end, before_metrics=self.fetch_engine_totals
        )
        app.include_router(self._router())

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self.engine_client = engine_client
        if self.front_end is not None:
            self.front_end.watch()

    async def fetch_engine_totals(self) -> None:
        """Bring the engine's counters into this process' `/metrics`. Of several API servers only the first
        does, or they would add up.
        """
        core = getattr(self.engine_client, "engine_core", None)
        if core is None or self._totals is None or getattr(core, "client_index", 0) != 0:
            return
        answers = await with_timeout(ask_engines(self.engine_client, "totals"), ENGINE_TIMEOUT)
        for index, answer in enumerate(answers or ()):
            if "error" in answer:
                logger.debug("vllm_ext: engine %d has no counters: %s", index, answer["error"])
            else:
                self._totals.update(index, answer)

    def _router(self) -> Any:
        from fastapi import APIRouter, Request
        from fastapi.responses import JSONResponse

        front_end = self.front_end
        assert front_end is not None
        router = APIRouter(prefix="/vllm_ext/v1", tags=["vllm_ext"])

        async def get_policy(request: Request) -> JSONResponse:
            """The policy in force, here and in the engine, and why the last reload failed if it did."""
            refused = _refuse_unless_admin(front_end, request)
            if refused is not None:
                return refused
            engines = await with_timeout(ask_engines(self.engine_client, "policy"), ENGINE_TIMEOUT)
            return JSONResponse({**describe(front_end), "engines": engines or []})

        async def reload_policy(request: Request) -> JSONResponse:
            """Read the policy file again and put it in force in the front end and the engine, or say why
            not.
            """
            refused = _refuse_unless_admin(front_end, request)
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

    async def reload(self) -> tuple[int, dict[str, Any]]:
        """First the engine takes the file's text, then the front end the same text, so both hold the same
        bytes or the old ones.
        """
        front_end = self.front_end
        assert front_end is not None
        store = front_end.store
        try:
            text = store.read()
        except PolicyError as error:
            checked = ReloadResult("invalid", store.current.digest, str(error))
        else:
            checked = store.check(text)
        if not _applied(checked.outcome):
            store.report(checked)
            return 400, {**describe(front_end), "outcome": checked.outcome, "message": checked.message}
        engines = await with_timeout(ask_engines(self.engine_client, "apply_policy", text), RELOAD_TIMEOUT)
        failures = [
            answer
            for answer in engines or [{"error": "the engine did not answer"}]
            if not _applied(answer.get("outcome"))
        ]
        if failures:
            reason = "; ".join(str(answer.get("error") or answer.get("message")) for answer in failures)
            refused = ReloadResult("refused", store.current.digest, f"the engine keeps its policy: {reason}")
            store.report(refused)
            return 409, {**describe(front_end), "outcome": refused.outcome, "message": refused.message}
        result = store.apply(text)
        status = 200 if _applied(result.outcome) else 400
        return status, {
            **describe(front_end),
            "outcome": result.outcome,
            "message": result.message,
            "engines": engines,
        }


def describe(front_end: FrontEnd) -> dict[str, Any]:
    """What an operator may see of the policy in force: names, never secrets or key digests."""
    store = front_end.store
    snapshot = store.current
    tenancy = snapshot.policy.tenancy
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
    }


def _applied(outcome: str | None) -> bool:
    return outcome in ("reloaded", "unchanged")


def _refuse_unless_admin(front_end: FrontEnd, request: Any) -> Any:
    """403 without a key or where the policy names no admin; compared in constant time."""
    from fastapi.responses import JSONResponse

    authenticator = front_end.authenticator
    if authenticator.is_admin(Credentials(request.scope["headers"])):
        return None
    message = (
        "an admin API key is needed: Authorization: Bearer KEY"
        if authenticator.has_admins
        else "the policy names no admin: list a key digest under admin.api_keys"
    )
    error = {"message": message, "type": "permission_error", "param": None, "code": "not_admin"}
    return JSONResponse({"error": error}, status_code=403)
