"""Run a function of a test module in a fresh interpreter, on vLLM's V1 or V2 model runner.

Which runner vLLM uses is settled while it is imported, so one process cannot have both. A test writes the
engine part as a module-level function that returns something JSON can hold:

    def generate(model: str) -> list[int]: ...

    def test_same_output(tiny_llama):
        assert run_in_v1(generate, tiny_llama) == run_in_v2(generate, tiny_llama)
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # none; a test that wants ours says so in `env`
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
V1_ENV = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2_ENV = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
NOT_INHERITED = ("VLLM_EXT_", "TRITON_", "VLLM_USE_")

V1_RUNNER = "vllm.v1.worker.cpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"

CHILD = """
import importlib.util, json, sys
call = json.load(open(sys.argv[1]))
sys.path[:0] = call["path"]
if call["interpret"]:
    from tests.triton_interpreter import install
    install()
spec = importlib.util.spec_from_file_location(call["module"], call["file"])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
result = getattr(module, call["function"])(*call["args"], **call["kwargs"])
with open(sys.argv[2], "w") as out:
    json.dump(result, out)
"""

EngineFunction = Callable[..., Any] | tuple[str | Path, str]


class ChildFailed(AssertionError):
    """The function raised, ran too long or died in the other process; the message ends with its output."""


def run_in_v1(
    function: EngineFunction,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` in a fresh process with the V1 runner; returns its result through
    JSON.

    `function` is a module-level function, or (file, function name). `env` adds to the process's environment.
    Raises ChildFailed, with what the process wrote, when it does not return within `timeout` seconds.
    """
    return _run(function, args, kwargs, {**V1_ENV, **(env or {})}, interpret=False, timeout=timeout)


def run_in_v2(
    function: EngineFunction,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    **kwargs: Any,
) -> Any:
    """As `run_in_v1`, on the V2 runner, its kernels run by Triton's interpreter (0.1-0.5 s a step)."""
    return _run(function, args, kwargs, {**V2_ENV, **(env or {})}, interpret=True, timeout=timeout)


RUNNERS: Mapping[str, Callable[..., Any]] = {"v1": run_in_v1, "v2": run_in_v2}
"""For `@pytest.mark.parametrize("runner", RUNNERS)`: `RUNNERS[runner](function, ...)`."""


def model_runner(llm: Any) -> Any:
    """The model runner object of an in-process `vllm.LLM`."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def _run(
    function: EngineFunction,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    interpret: bool,
    timeout: float,
) -> Any:
    file, name = _locate(function)
    call = {
        "path": [str(REPOSITORY), *(entry for entry in sys.path if entry)],
        "module": f"{Path(file).stem}_in_child",
        "file": str(file),
        "function": name,
        "args": args,
        "kwargs": kwargs,
        "interpret": interpret,
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
    with tempfile.TemporaryDirectory() as folder:
        request, answer, log = (Path(folder) / part for part in ("call.json", "result.json", "output.txt"))
        request.write_text(json.dumps(call))
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(request), str(answer)],
                env={**inherited, **ENGINE_ENV, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # also what it started
                child.wait()
        if code == 0 and answer.exists():
            return json.loads(answer.read_text())
        ended = f"did not return within {timeout:g} s" if code is None else f"exited with status {code}"
        tail = log.read_text(errors="replace")[-6000:]
        raise ChildFailed(f"{name} ({Path(file).name}) {ended}; the end of its output:\n{tail}")


def _locate(function: EngineFunction) -> tuple[str | Path, str]:
    if isinstance(function, tuple):
        return function
    if "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is not a module-level function: the other process cannot find it"
        )
    return inspect.getfile(function), function.__name__
