from __future__ import annotations

from tests.engine.models import tiny_llama

__all__ = ["tiny_llama"]
