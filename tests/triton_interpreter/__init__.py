"""vLLM's V2 model runner on a CPU, for tests only: a Triton backend that exists but compiles nothing.

vLLM turns Triton off unless one backend is active. With this one registered and `TRITON_INTERPRET=1` every
`@triton.jit` kernel is run by Triton's interpreter in NumPy, so the V2 runner's own kernels (and ours)
execute for real, slowly. Known gaps of the interpreter: `libdevice` calls give None, some mask dtypes are
refused.
"""

from __future__ import annotations

from tests.triton_interpreter.backend import install

__all__ = ["install"]
