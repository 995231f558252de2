"""What the endpoint plugin adds to the server: with tenancy, with retention alone, with nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, generate_latest
from starlette.responses import Response

from vllm_ext.policy import PolicyStore
from vllm_ext_plugin import front_end, operations
from vllm_ext_plugin.endpoint import create_endpoint_plugin

pytestmark = pytest.mark.unit

ADMIN = "an-admins-key-0123456789"
RETENTION = {"classes": {"keep": {"priority": 90}}, "rules": [{"class": "keep", "tokens": "0..64"}]}


class Engine:
    """An engine process that answers as ours does."""

    def __init__(self, **core: Any) -> None:
        self.asked: list[str] = []
        self.evicted = 3.0
        self.engine_core = SimpleNamespace(call_utility_all_async=self.answer, **core)

    async def answer(self, method: str, name: str, argument: str) -> list[str]:
        self.asked.append(name)
        if name == "apply_policy":
            return [json.dumps({"outcome": "reloaded", "digest": "d", "message": ""})]
        totals = {"cache_evictions": [[["a-tenant", "quota"], self.evicted]], "errors": [[["engine_x"], 1]]}
        gauges = {"cache_pool_blocks": [[[], 40.0]], "block_trace_on": [[[], 0.0]]}
        return [json.dumps({"totals": totals, "gauges": gauges})]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    operations.uninstall()
    front_end.uninstall()


def serve(tmp_path: Path, body: dict[str, Any], engine: Engine) -> tuple[httpx.AsyncClient, PolicyStore]:
    path = tmp_path / "policy.yaml"
    path.write_text(json.dumps({"version": 1, "admin": {"api_keys": [digest(ADMIN)]}, **body}))
    store = PolicyStore(path)
    if store.current.policy.is_for_the_engine:
        operations.install(store)
    app = FastAPI()

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type="text/plain")

    plugin = create_endpoint_plugin()
    plugin.attach_router(app)
    plugin.engine_client = engine
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server"), store


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def value(text: str, series: str) -> float | None:
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(series)), None)


async def test_retention_alone_has_metrics_and_routes(tmp_path: Path) -> None:
    engine = Engine()
    client, store = serve(tmp_path, {"retention": RETENTION}, engine)
    series = 'vllm_ext_cache_evictions_total{cause="quota",tenant="a-tenant"}'
    first = (await client.get("/metrics")).text
    before = value(first, series)
    assert before is not None and value(first, "vllm_ext_cache_pool_blocks") == 40
    engine.evicted += 4
    assert value((await client.get("/metrics")).text, series) == before + 4
    assert engine.asked == ["metrics", "metrics"]
    assert value(first, 'vllm_ext_internal_errors_total{part="engine_x"}') is not None

    assert (await client.get("/vllm_ext/v1/policy")).status_code == 403
    key = {"Authorization": f"Bearer {ADMIN}"}
    shown = (await client.get("/vllm_ext/v1/policy", headers=key)).json()
    assert shown["tenancy"] is None and shown["retention"] == {"order": "lru"}
    assert shown["block_trace"] is None

    changed = {**json.loads((tmp_path / "policy.yaml").read_text()), "telemetry": {"block_trace": "t.jsonl"}}
    (tmp_path / "policy.yaml").write_text(json.dumps(changed))
    reloads = 'vllm_ext_policy_reloads_total{outcome="reloaded"}'
    earlier = value((await client.get("/metrics")).text, reloads) or 0
    answer = await client.post("/vllm_ext/v1/policy/reload", headers=key)
    assert answer.status_code == 200 and answer.json()["block_trace"] == "t.jsonl"
    assert store.current.policy.telemetry is not None
    assert value((await client.get("/metrics")).text, reloads) == earlier + 1


async def test_admins_change_with_the_policy(tmp_path: Path) -> None:
    client, store = serve(tmp_path, {"retention": RETENTION}, Engine())
    body = {**json.loads((tmp_path / "policy.yaml").read_text()), "admin": {"api_keys": [digest("another")]}}
    assert store.apply(json.dumps(body)).outcome == "reloaded"
    for key, status in ((ADMIN, 403), ("another", 200)):
        headers = {"x-api-key": key}
        assert (await client.get("/vllm_ext/v1/policy", headers=headers)).status_code == status


async def test_of_several_servers_the_first_counts(tmp_path: Path) -> None:
    engine = Engine(client_index=1)
    client, _ = serve(tmp_path, {"retention": RETENTION}, engine)
    assert (await client.get("/metrics")).status_code == 200 and engine.asked == []


async def test_an_engine_that_is_gone_takes_no_metrics_away(tmp_path: Path) -> None:
    engine = Engine()

    async def broken(*args: Any) -> list[str]:
        raise RuntimeError("the engine is dead")

    engine.engine_core.call_utility_all_async = broken
    client, _ = serve(tmp_path, {"retention": RETENTION}, engine)
    assert (await client.get("/metrics")).status_code == 200


async def test_a_policy_that_asks_for_nothing_adds_nothing(tmp_path: Path) -> None:
    engine = Engine()
    client, _ = serve(tmp_path, {}, engine)
    assert (await client.get("/vllm_ext/v1/policy")).status_code == 404
    assert (await client.get("/metrics")).status_code == 200 and engine.asked == []
