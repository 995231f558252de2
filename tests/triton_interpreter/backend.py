"""The stub backend: a driver that is active on the CPU, and a compiler that refuses to compile."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

NAME = "cpu"


def install() -> None:
    """Register the backend in this process.

    Raises RuntimeError when it is too late: Triton reads `TRITON_INTERPRET` while it is imported, and vLLM
    decides on Triton while it is imported.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before the process starts")
    for module in ("triton", "vllm"):
        if module in sys.modules:
            raise RuntimeError(f"the interpreter backend must be installed before {module} is imported")

    import torch
    import triton.backends as registry
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget(NAME, 0, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> ModuleType:
            return torch.cpu

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("interpreted kernels are not benchmarked")

    class InterpreterBackend(BaseBackend):
        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return target.backend == NAME

        def hash(self) -> str:
            return "interpreter"

        def parse_options(self, options: dict[str, Any]) -> object:
            raise NotImplementedError("the interpreter backend compiles nothing: is TRITON_INTERPRET=1 set?")

        def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
            raise NotImplementedError("the interpreter backend compiles nothing: is TRITON_INTERPRET=1 set?")

        def load_dialects(self, context: Any) -> None:
            pass

        def get_module_map(self) -> dict[str, ModuleType]:
            return {}

    # On a machine with a GPU the real driver is active too, and Triton wants exactly one.
    registry.backends.clear()
    registry.backends[NAME] = registry.Backend(compiler=InterpreterBackend, driver=InterpreterDriver)
