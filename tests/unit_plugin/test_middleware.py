"""The identity middleware as an ASGI citizen; no server and no vLLM needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from vllm_ext.policy import parse_policy
from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.gateway import SIGNATURE_HEADER, TENANT_HEADER, TIMESTAMP_HEADER, sign
from vllm_ext.tenancy.identity import DomainKind, IdentifiedBy
from vllm_ext.tenancy.metrics import LabelCap, TenancyMetrics
from vllm_ext_plugin.middleware import OPEN_PATHS, IdentityMiddleware
from vllm_ext_plugin.stamping import HTTP_IDENTITY

pytestmark = pytest.mark.unit

KEY = "key-of-acme-0123456789"
GATEWAY_SECRET = "the gateway's own secret"


class World:
    """A middleware around an application that records what it sees."""

    def __init__(self, unknown: str = "isolate") -> None:
        policy = {
            "version": 1,
            "tenancy": {
                "unknown": unknown,
                "tenants": {"acme": {"api_keys": ["sha256:" + hashlib.sha256(KEY.encode()).hexdigest()]}},
                "gateway": {"secret": "env:GW", "max_body": 100},
            },
        }
        snapshot = parse_policy(json.dumps(policy), environ={"GW": GATEWAY_SECRET})
        self.registry = CollectorRegistry()
        self.failed: list[str] = []
        self.front_end: Any = SimpleNamespace(
            authenticator=Authenticator(snapshot),
            metrics=TenancyMetrics(LabelCap(10), LabelCap(10), self.registry),
            failed=self.failed.append,
        )
        self.sent: list[dict[str, Any]] = []
        self.seen: list[tuple[Any, bytes]] = []
        self.middleware = IdentityMiddleware(self.application, self.front_end)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["type"] == "http":
            more = True
            while more:
                message = await receive()
                body, more = body + message["body"], message.get("more_body", False)
        self.seen.append((HTTP_IDENTITY.get(), body))

    async def call(
        self, headers: dict[str, str] | None = None, body: tuple[bytes, ...] = (b"",), **scope: Any
    ) -> None:
        chunks = list(body)

        async def receive() -> Any:
            if not chunks:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

        async def send(message: Any) -> None:
            self.sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        base = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        await self.middleware({**base, "query_string": b"", "headers": raw, **scope}, receive, send)
        assert HTTP_IDENTITY.get() is None, "an identity must not outlive its request"

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if "status" in message), None)


def signed(body: bytes, target: str = "/v1/completions", method: str = "POST") -> dict[str, str]:
    timestamp = f"{time.time():.6f}"
    signature = sign(
        GATEWAY_SECRET.encode(), method=method, target=target, tenant="acme", timestamp=timestamp, body=body
    )
    return {TENANT_HEADER: "acme", TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signature}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY}"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"authorization": f"Bearer {KEY}", SIGNATURE_HEADER: "v1=" + "0" * 64},
    ],
)
async def test_an_api_key_identifies(headers: dict[str, str]) -> None:
    world = World()
    await world.call(headers, (b"ab", b"cd"))
    ((identity, body),) = world.seen
    assert (identity.tenant, identity.domain.kind) == ("acme", DomainKind.DECLARED)
    assert identity.identified_by is IdentifiedBy.API_KEY and body == b"abcd"


async def test_a_signed_header_identifies_and_the_body_arrives_whole() -> None:
    world = World()
    await world.call(signed(b"abcd"), (b"ab", b"cd"))
    ((identity, body),) = world.seen
    assert identity.identified_by is IdentifiedBy.GATEWAY and identity.tenant == "acme" and body == b"abcd"


async def test_the_signature_covers_the_query_string() -> None:
    world = World()
    await world.call(signed(b"", "/v1/completions?x=1"), query_string=b"x=1")
    await world.call(signed(b"", "/v1/completions"), query_string=b"x=1")
    assert [identity.tenant for identity, _ in world.seen] == ["acme", "(unknown)"]


async def test_a_header_sent_twice_is_not_believed() -> None:
    world = World()
    await world.call({"authorization": f"Bearer {KEY}", "Authorization": "Bearer x"})
    assert world.seen[0][0].tenant == "(unknown)"


async def test_too_long_a_signed_body_is_413_and_an_unsigned_one_is_not_held() -> None:
    world = World()
    await world.call(signed(b"x" * 101), (b"x" * 60, b"x" * 41))
    assert world.status == 413 and not world.seen
    await world.call({"authorization": f"Bearer {KEY}"}, (b"x" * 101,))
    assert world.seen[0][1] == b"x" * 101


@pytest.mark.parametrize(
    "changed",
    [{SIGNATURE_HEADER: "v1=x"}, {TIMESTAMP_HEADER: "1"}, {TENANT_HEADER: "a/b"}, {TIMESTAMP_HEADER: ""}],
)
async def test_no_body_is_held_for_headers_that_cannot_be_genuine(changed: dict[str, str]) -> None:
    world = World("reject")
    reads: list[int] = []

    async def receive() -> Any:
        reads.append(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    headers = [(k.encode(), v.encode()) for k, v in {**signed(b""), **changed}.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/x",
        "raw_path": b"/x",
        "query_string": b"",
        "headers": headers,
    }

    async def send(message: Any) -> None:
        world.sent.append(message)

    await world.middleware(scope, receive, send)
    assert world.status == 401 and not reads


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ext_plugin.middleware.BODY_SECONDS", 0.05)
    world = World()

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"", "more_body": True}

    headers = [(k.encode(), v.encode()) for k, v in signed(b"").items()]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "headers": headers,
    }  # fmt: skip

    async def send(message: Any) -> None:
        world.sent.append(message)

    await world.middleware(scope, receive, send)
    assert world.status == 408 and not world.seen


async def test_a_client_that_hangs_up_while_its_body_is_read_is_let_go() -> None:
    world = World()
    await world.call(signed(b""), ())
    assert world.sent == [] and world.seen == [] and world.failed == []


async def test_reject_answers_401() -> None:
    world = World("reject")
    await world.call()
    assert world.status == 401 and not world.seen
    error = json.loads(world.sent[-1]["body"])["error"]
    assert error["type"] == "authentication_error" and "Authorization" in error["message"]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_pass_under_reject(path: str) -> None:
    world = World("reject")
    await world.call(path=path)
    assert len(world.seen) == 1


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/v1/../health", "/metrics/x", "/HEALTH", "/v1/models"]
)
async def test_nothing_that_merely_resembles_a_probe_passes(path: str) -> None:
    world = World("reject")
    await world.call(path=path)
    assert world.status == 401


async def test_websockets_are_identified_or_closed() -> None:
    world = World("reject")
    await world.call(type="websocket", method=None)
    assert world.sent == [{"type": "websocket.close", "code": 1008, "reason": world.sent[0]["reason"]}]
    await world.call({"authorization": f"Bearer {KEY}"}, type="websocket", method=None)
    assert world.seen[0][0].tenant == "acme"


@pytest.mark.parametrize(
    ("unknown", "kind", "status"),
    [("isolate", DomainKind.ISOLATED, None), ("public", DomainKind.ISOLATED, None), ("reject", None, 500)],
)
async def test_a_crash_isolates_or_where_strangers_are_rejected_closes(
    unknown: str, kind: DomainKind | None, status: int | None
) -> None:
    world = World(unknown)

    def boom(*args: Any) -> Any:
        raise RuntimeError("a bug")

    world.front_end.authenticator.identify = boom
    await world.call({"authorization": f"Bearer {KEY}"})
    assert world.failed == ["identity"]
    assert world.status == status
    assert [identity.domain.kind for identity, _ in world.seen] == ([kind] if kind else [])


async def test_lifespan_and_options_pass_untouched() -> None:
    world = World("reject")
    await world.call(method="OPTIONS")
    assert world.seen == [(None, b"")]
