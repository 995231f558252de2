"""What the tenancy tests do inside a child process that runs real vLLM with our plugin named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK = 32
SECRET = "a salt secret that only tests know"
PLUGIN_ENV = {"VLLM_PLUGINS": "vllm_ext", "TEST_SALT_SECRET": SECRET}

PROMPT = [5 + (i * 7) % 300 for i in range(7 * BLOCK + 9)]
FULL_BLOCKS = 7 * BLOCK
"""Every whole block of PROMPT: what a repeat in the same domain must reuse (its last token is always
computed).
"""


def policy_env(folder: Path, *, retention: dict[str, Any] | None = None, **tenancy: Any) -> dict[str, str]:
    """Write a policy (JSON is YAML) and return the environment that names it.

    Three tenants in two domains unless `tenancy` says otherwise.
    """
    body: dict[str, Any] = {
        "version": 1,
        "tenancy": {
            "salt_secret": "env:TEST_SALT_SECRET",
            "unknown": "isolate",
            "tenants": {"acme": {}, "globex": {}, "acme-eu": {"domain": "acme"}},
            **tenancy,
        },
    }
    if retention is not None:
        body["retention"] = retention
    path = folder / "policy.yaml"
    path.write_text(json.dumps(body, indent=1))
    return {**PLUGIN_ENV, "VLLM_EXT_POLICY": str(path)}


class Engine:
    """An in-process LLM that says how many prompt tokens each request reused."""

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        defaults = {
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 256,
            "seed": 0,
        }
        self.llm = LLM(model, **{**defaults, **options})
        self.seen: list[Any] = []
        core = self.llm.llm_engine.engine_core
        if hasattr(core, "engine_core"):
            self.scheduler = core.engine_core.scheduler
            add_request = self.scheduler.add_request

            def recording(request: Any) -> None:
                add_request(request)
                self.seen.append(request)

            self.scheduler.add_request = recording

    def output(
        self, tenant: str | None, tokens: list[int] | None = None, salt: str | None = None, **extra: Any
    ) -> Any:
        from vllm import SamplingParams

        if tenant is not None:
            extra["vllm_ext.tenant"] = tenant
        prompt: dict[str, Any] = {"prompt_token_ids": tokens or PROMPT}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(max_tokens=1, temperature=0, extra_args=extra or None)
        return self.llm.generate([prompt], params, use_tqdm=False)[0]

    def reused(
        self, tenant: str | None, tokens: list[int] | None = None, salt: str | None = None, **extra: Any
    ) -> int:
        """Prompt tokens that this request took from the cache."""
        return self.output(tenant, tokens, salt, **extra).num_cached_tokens

    def chat_reused(self, tenant: str | None, messages: list[dict[str, str]]) -> tuple[int, int]:
        """(prompt tokens, reused tokens) of a chat request."""
        from vllm import SamplingParams

        extra = {"vllm_ext.tenant": tenant} if tenant else None
        params = SamplingParams(max_tokens=1, temperature=0, extra_args=extra)
        output = self.llm.chat(messages, params, use_tqdm=False)[0]
        return len(output.prompt_token_ids), output.num_cached_tokens

    def last_hashes(self) -> list[str]:
        return [block_hash.hex() for block_hash in self.seen[-1].block_hashes]
