"""Loaded into the server by vLLM's own `--middleware`: makes our identity code fail for requests that ask for
it.

The product has no switch for this; the test brings the fault with it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from vllm_ext.tenancy.authenticator import Authenticator

_crash: ContextVar[bool] = ContextVar("crash", default=False)
_identify = Authenticator.identify


def _maybe_identify(self: Authenticator, *args: Any, **kwargs: Any) -> Any:
    if _crash.get():
        raise ZeroDivisionError("a bug in our identity code")
    return _identify(self, *args, **kwargs)


Authenticator.identify = _maybe_identify  # type: ignore[method-assign]


class Saboteur:
    """Outermost middleware: the header `x-test-crash` makes the identity code below raise."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wanted = any(name == b"x-test-crash" for name, _ in scope.get("headers", ()))
        token = _crash.set(wanted)
        try:
            await self.app(scope, receive, send)
        finally:
            _crash.reset(token)
