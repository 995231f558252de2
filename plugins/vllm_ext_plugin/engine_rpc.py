"""A way for the front end to ask the engine process: one utility method on `EngineCore`, JSON in and out."""

from __future__ import annotations

import json
from typing import Any

from vllm_ext_plugin.patching import add

METHOD = "vllm_ext_call"


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    add(EngineCore, METHOD, _call)


def _call(self: Any, name: str, argument: str) -> str:
    """Runs in the engine process, between two steps. Its answer is JSON; an exception becomes `{"error":
    …}`.
    """
    extension = getattr(self.scheduler, "vllm_ext", None)
    try:
        if extension is None:
            return json.dumps({"error": "this engine does not run vllm_ext's scheduler"})
        return json.dumps(_COMMANDS[name](extension, argument))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _totals(extension: Any, _: str) -> Any:
    return extension.totals()


def _policy(extension: Any, _: str) -> Any:
    store = extension.store
    return {"digest": store.current.digest, "generation": store.generation, "last_error": store.last_error}


def _apply_policy(extension: Any, text: str) -> Any:
    result = extension.store.apply(text)
    return {"outcome": result.outcome, "digest": result.digest, "message": result.message}


_COMMANDS = {"totals": _totals, "policy": _policy, "apply_policy": _apply_policy}


async def ask_engines(engine_client: Any, name: str, argument: str = "") -> list[Any]:
    """Ask every engine core behind `engine_client` (several with data parallelism); one decoded answer each.

    Raises:
        Exception: whatever vLLM raises when the engine is gone or has no such method.
    """
    core = engine_client.engine_core
    ask_all = getattr(core, "call_utility_all_async", None)
    if ask_all is not None:
        answers = await ask_all(METHOD, name, argument)
    else:
        answers = [await core.call_utility_async(METHOD, name, argument)]
    return [json.loads(answer) for answer in answers]
