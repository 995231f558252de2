"""Pure ASGI middleware: works out who asks and leaves it in a context variable for the stamp.

It is added in the endpoint plugin's `attach_router`, so it sits inside vLLM's own authentication and sees
every route, `/invocations` and WebSockets included. What it does not know is closed, not open: only the paths
listed here pass without an identity.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from vllm_ext.tenancy.authenticator import Credentials, RequestLine
from vllm_ext.tenancy.identity import Identity, Rejection
from vllm_ext_plugin.front_end import FrontEnd
from vllm_ext_plugin.stamping import HTTP_IDENTITY

OPEN_PATHS = frozenset(
    {"/health", "/ping", "/metrics", "/version", "/load", "/docs", "/redoc", "/openapi.json"}
)
"""Operators' probes: none of them reads or writes a prompt. Anything else needs an identity under `unknown:
reject`.
"""
ADMIN_PREFIX = "/vllm_ext/"
"""Our own routes; they ask for an admin key themselves."""

logger = logging.getLogger("vllm_ext")

Scope = dict[str, Any]


class ClientGone(Exception):
    """The client hung up while its body was being read."""


class BodyTooLong(Exception):
    pass


BODY_SECONDS = 60.0
"""How long a signed body may take to arrive."""


class IdentityMiddleware:
    """Args:
    app: the ASGI application inside.
    front_end: this process' tenancy.
    """

    def __init__(self, app: Any, front_end: FrontEnd) -> None:
        self.app = app
        self.front_end = front_end

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            await self.app(scope, receive, send)
            return
        path = _path(scope)
        if path in OPEN_PATHS or path.startswith(ADMIN_PREFIX):
            await self.app(scope, receive, send)
            return
        try:
            outcome, receive = await self._identify(scope, receive)
        except ClientGone:
            return
        except TimeoutError:
            message = f"the signed body took longer than {BODY_SECONDS:.0f} s to arrive"
            await _refuse(scope, send, 408, "request_timeout", message)
            return
        except BodyTooLong:
            limit = self.front_end.authenticator.max_body
            await _refuse(
                scope,
                send,
                413,
                "request_too_large",
                f"the signed body is longer than {limit} bytes (gateway.max_body)",
            )
            return
        except Exception:
            self.front_end.failed("identity")
            outcome = self._after_crash()
        if isinstance(outcome, Rejection):
            self.front_end.metrics.request_rejected(outcome.reason)
            if outcome.reason == "internal_error":
                await _refuse(scope, send, 500, outcome.reason, outcome.message)
            else:
                await _refuse(scope, send, 401, outcome.reason, outcome.message)
            return
        token = HTTP_IDENTITY.set(outcome)
        try:
            await self.app(scope, receive, send)
        finally:
            HTTP_IDENTITY.reset(token)

    async def _identify(self, scope: Scope, receive: Any) -> tuple[Identity | Rejection, Any]:
        authenticator = self.front_end.authenticator
        credentials = Credentials(scope["headers"])
        body = None
        if scope["type"] == "http" and authenticator.needs_body(credentials):
            body = await asyncio.wait_for(_read_body(receive, authenticator.max_body), BODY_SECONDS)
            receive = _replay(body, receive)
        return authenticator.identify(credentials, _request_line(scope), body), receive

    def _after_crash(self) -> Identity | Rejection:
        """Isolated, also under `public`; where the policy turns the unknown away, a crash must not let them
        in.
        """
        rule = self.front_end.authenticator.unknown(
            "internal_error", "the server could not work out who is asking"
        )
        return rule if isinstance(rule, Rejection) else Identity.isolated("internal_error")


class MetricsMiddleware:
    """Args:
    app: the ASGI application inside.
    before: an async callable awaited before `/metrics` is served (fetches the engine's numbers).
    """

    def __init__(self, app: Any, before: Any) -> None:
        self.app = app
        self.before = before

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and _path(scope).rstrip("/") == "/metrics":
            await self.before()
        await self.app(scope, receive, send)


def _path(scope: Scope) -> str:
    path: str = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return path


def _request_line(scope: Scope) -> RequestLine:
    method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
    raw_path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    query = scope.get("query_string", b"")
    return RequestLine(method, (raw_path + (b"?" + query if query else b"")).decode("latin-1"))


async def _read_body(receive: Any, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLong
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the body that was read already, then whatever follows (the disconnect)."""
    given = False

    async def replay() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(scope: Scope, send: Any, status: int, code: str, message: str) -> None:
    """An error in OpenAI's shape; for a WebSocket handshake, a close with "policy violation"."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
        return
    kind = {
        401: "authentication_error",
        403: "permission_error",
        408: "invalid_request_error",
        413: "invalid_request_error",
    }.get(status, "server_error")
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def with_timeout(awaitable: Any, seconds: float) -> Any:
    """`awaitable`'s result, or None when it takes too long or fails (logged at debug level): metrics never
    wait for the engine.
    """
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except Exception:
        logger.debug("vllm_ext: the engine did not answer", exc_info=True)
        return None
