"""A way for the front end to ask the engine process: one utility method on `EngineCore`, JSON in and out."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_ext_plugin.patching import add

METHOD = "vllm_ext_call"


def install() -> None:
    from vllm.v1.engine.core import EngineCore

    add(EngineCore, METHOD, _call)


def _call(self: Any, name: str, argument: str) -> Any:
    """Runs in the engine process, between two steps. Answers JSON, or a future of it (`{"error": …}` where
    our code failed).
    """
    extension = getattr(self.scheduler, "vllm_ext", None)

    def answer() -> str:
        try:
            if extension is None:
                return json.dumps({"error": "this engine does not run vllm_ext's scheduler"})
            return json.dumps(_COMMANDS[name](extension, argument))
        except Exception as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    # Reading a long policy takes its time and the engine must not stand still for it: vLLM awaits futures.
    return _workers.submit(answer) if name in _SLOW else answer()


def _metrics(extension: Any, _: str) -> Any:
    return {"totals": extension.totals(), "gauges": extension.gauges()}


def _policy(extension: Any, _: str) -> Any:
    store = extension.store
    return {"digest": store.current.digest, "generation": store.generation, "last_error": store.last_error}


def _apply_policy(extension: Any, text: str) -> Any:
    result = extension.store.apply(text)
    return {"outcome": result.outcome, "digest": result.digest, "message": result.message}


_COMMANDS = {"metrics": _metrics, "policy": _policy, "apply_policy": _apply_policy}

_SLOW = frozenset({"apply_policy"})
_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-ext")


async def ask_engines(engine_client: Any, name: str, argument: str = "") -> list[Any]:
    """Ask every engine core behind `engine_client` (several with data parallelism); one decoded answer each.

    Raises:
        Exception: whatever vLLM raises when the engine is gone or has no such method.
    """
    core = engine_client.engine_core
    ask_all = getattr(core, "call_utility_all_async", None)
    if ask_all is not None:
        answers = await ask_all(METHOD, name, argument)
    else:  # vLLM 0.31: `call_utility_async` asks all engines but returns the first one's answer
        engines = getattr(core, "core_engines", None) or [core.core_engine]
        answers = await asyncio.gather(
            *(core._call_utility_async(METHOD, name, argument, engine=engine) for engine in engines)
        )
    return [json.loads(answer) for answer in answers]
