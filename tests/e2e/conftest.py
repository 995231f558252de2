from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import checkpoint
from server import SERVED_MODEL, Server, serve_arguments
from vllm_ext.tenancy.gateway import SIGNATURE_HEADER, TENANT_HEADER, TIMESTAMP_HEADER, sign

BLOCK = 32
SALT_SECRET = "e2e-salt-secret-never-to-be-seen"
GATEWAY_SECRET = "e2e-gateway-secret-never-to-be-seen"
KEYS = {
    "acme": "key-of-acme-0123456789",
    "globex": "key-of-globex-0123456789",
    "initech": "key-of-initech-0123456789",
}
ADMIN_KEY = "key-of-the-admin-0123456789"
SYSTEM = (
    "You are the support assistant of a shop. Answer politely, in at most three sentences, and never guess. "
    * 3
)


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def policy() -> dict[str, Any]:
    """A policy as a dict (JSON is YAML); tests change it and reload."""
    return {
        "version": 1,
        "tenancy": {
            "salt_secret": "env:VLLM_EXT_SALT_SECRET",
            "unknown": "isolate",
            "tenants": {name: {"api_keys": [digest(key)]} for name, key in KEYS.items()},
            "gateway": {"secret": "env:VLLM_EXT_GATEWAY_SECRET", "replay_window": "30s", "max_body": "64KiB"},
            "shared_prefixes": [
                {
                    "name": "shop",
                    "domains": ["acme", "globex"],
                    "messages": [{"role": "system", "content": SYSTEM}],
                }
            ],
        },
        "admin": {"api_keys": [digest(ADMIN_KEY)]},
        "metrics": {"max_tenant_labels": 5},
    }


@dataclass
class Live:
    """The running server, and everything it ever answered (for the search for secrets at the end)."""

    server: Server
    policy_path: Path
    client: httpx.Client
    answers: list[str] = field(default_factory=list)

    def request(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **options.pop("headers", {})}
        response = self.client.request(method, path, headers=headers, **options)
        self.answers.append(str(response.headers) + response.text)
        return response

    def post(self, path: str, body: dict[str, Any], key: str | None = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, key, json={"model": SERVED_MODEL, **body}, **options)

    def complete(self, prompt: Any, key: str | None = None, **body: Any) -> tuple[int, int]:
        """(prompt tokens, reused tokens) of a completion."""
        options = {"headers": body.pop("headers")} if "headers" in body else {}
        response = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **body}, key, **options)
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def signed(
        self, tenant: str, path: str, body: bytes, timestamp: float | None = None, **changed: str
    ) -> dict[str, str]:
        stamp = f"{time.time() if timestamp is None else timestamp:.6f}"
        signature = sign(
            GATEWAY_SECRET.encode(), method="POST", target=path, tenant=tenant, timestamp=stamp, body=body
        )
        headers = {TENANT_HEADER: tenant, TIMESTAMP_HEADER: stamp, SIGNATURE_HEADER: signature}
        return {**headers, "content-type": "application/json", **changed}

    def write_policy(self, body: dict[str, Any] | str) -> httpx.Response:
        """Change the file and ask for a reload, as an operator would."""
        self.policy_path.write_text(body if isinstance(body, str) else json.dumps(body, indent=1))
        return self.request("POST", "/vllm_ext/v1/policy/reload", ADMIN_KEY)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` whose labels include `labels`."""
        total = 0.0
        for line in self.request("GET", "/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if (series == name or series.startswith(name + "{")) and all(
                f'{k}="{v}"' in series for k, v in labels.items()
            ):
                total += float(value)
        return total


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One `vllm serve` with the real model for a module's tests."""
    try:
        checkpoint.require_model()
    except FileNotFoundError as error:
        pytest.fail(f"{error} (make test prepares it)")
    folder = tmp_path_factory.mktemp("e2e")
    path = folder / "policy.yaml"
    path.write_text(json.dumps(policy(), indent=1))
    # The model's own template, but for one role that it refuses: a mistake that only the engine can see.
    template = folder / "template.jinja"
    refusal = (
        "{% for m in messages %}{% if m['role'] == 'developer' %}"
        "{{ raise_exception('roles like this are refused') }}{% endif %}{% endfor %}"
    )
    template.write_text(refusal + (checkpoint.require_model() / "chat_template.jinja").read_text())
    environment = {
        "VLLM_EXT_SALT_SECRET": SALT_SECRET,
        "VLLM_EXT_GATEWAY_SECRET": GATEWAY_SECRET,
        "PYTHONPATH": str(Path(__file__).parent),
        "VLLM_SERVER_DEV_MODE": "1",  # /server_info tells much: no secret may be in it
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_PLUGINS": None,
        "VLLM_EXT_POLICY": None,
    }
    arguments = [
        *serve_arguments(policy=path),
        "--middleware",
        "saboteur.Saboteur",
        "--enable-log-requests",
        "--enable-scale-out",
        "--chat-template",
        str(template),
    ]
    with Server(arguments, log=folder / "server.log", env=environment) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=120) as client:
            yield Live(server, path, client)


@pytest.fixture
def fresh(live: Live) -> Live:
    """The server with the original policy in force, whatever the test before did."""
    answer = live.write_policy(policy())
    assert answer.status_code == 200, answer.text
    return live
