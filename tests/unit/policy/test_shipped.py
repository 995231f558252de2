"""The policy files that operators start from, their schema, and the built-in default."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from vllm_ext.policy import PolicyError, PolicySnapshot, load_policy, parse_policy, policy_json_schema
from vllm_ext.policy.loading import default_text

pytestmark = pytest.mark.unit

POLICIES = Path(__file__).parents[3] / "policies"
SHIPPED = sorted(POLICIES.glob("*.yaml"))
SCHEMA = json.loads((POLICIES / "policy.schema.json").read_text("utf-8"))
ENVIRONMENT = {
    "VLLM_EXT_SALT_SECRET": "salt-secret-of-the-test",
    "VLLM_EXT_GATEWAY_SECRET": "gateway-secret-of-the-test",
    "VLLM_EXT_ADMIN_KEY": "admin-key-of-the-test",
    "NIGHTLY_REPORTS_API_KEY": "nightly-key-of-the-test",
    "AGENT_PAYMENTS_KEY": "payments-key-of-the-test",
    "AGENT_PAYMENTS_CI_KEY": "payments-ci-key-of-the-test",
    "AGENT_WEB_KEY": "web-key-of-the-test",
    "AGENT_INFRA_KEY": "infra-key-of-the-test",
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> PolicySnapshot:
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    return load_policy(POLICIES / name)


def test_these_are_all() -> None:
    assert [file.name for file in SHIPPED] == [
        "agents.yaml",
        "default.yaml",
        "demo.yaml",
        "multi-tenant-saas.yaml",
    ]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_loads_and_validates(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(file.name, monkeypatch)
    text = file.read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=./policy.schema.json\n")
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(text))


def test_schema_is_the_one_we_print() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert policy_json_schema() == SCHEMA


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "version: 2",
        "version: 1\ntenancy:",
        "version: 1\nnonsense: 1",
        "version: 1\ntenancy: {unknown: maybe}",
        "version: 1\ntenancy: {tenants: {a/b: {}}}",
        "version: 1\ntenancy: {tenants: {public: {}}}",
        "version: 1\ntenancy: {tenants: {a: {api_keys: [clear-key]}}}",
        "version: 1\ntenancy: {salt_secret: in-clear}",
        "version: 1\ntenancy: {gateway: {secret: 'env:A', replay_window: soon}}",
        "version: 1\ntenancy: {gateway: {secret: 'env:A', max_body: 64MB}}",
        "version: 1\ntenancy: {shared_prefixes: [{name: a, domains: all}]}",
        "version: 1\ntenancy: {shared_prefixes: [{name: a, domains: all, text: x, file: y}]}",
        "version: 1\ntenancy: {shared_prefixes: [{name: a, domains: [], text: x}]}",
        "version: 1\nretention:",
        "version: 1\nretention: {order: fifo}",
        "version: 1\nretention: {default: {priority: 101}}",
        "version: 1\nretention: {classes: {a: {}}}",
        "version: 1\nretention: {classes: {a: {decoded_priority: 1, ttl: 1h}}}",
        "version: 1\nretention: {classes: {a: {priority: 90, ttl: 1d}}}",
        "version: 1\nretention: {classes: {default: {priority: 90}}}",
        "version: 1\nretention: {rules: [{role: tail}]}",
        "version: 1\nretention: {rules: [{class: default, role: head}]}",
        "version: 1\nretention: {rules: [{class: default, role: decoded, tokens: 0..9}]}",
        "version: 1\nretention: {rules: [{class: default, tokens: 9}]}",
        "version: 1\nretention: {rules: [{class: default, tenants: []}]}",
        "version: 1\nretention: {rules: [{class: default, domains: [all]}]}",
        "version: 1\nretention: {tenants: {unknown: {}}}",
        "version: 1\nretention: {tenants: {unknown: {max_share: 60}}}",
        "version: 1\nretention: {tenants: {public: {max_share: 6%}}}",
        "version: 1\nretention: {client_wishes: {allow: always}}",
        "version: 1\nretention: {client_wishes: {tenants: {'*': {allow: never}}}}",
    ],
)
def test_schema_and_loader_refuse_alike(text: str) -> None:
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(yaml.safe_load(text))
    with pytest.raises(PolicyError):
        parse_policy(text, environ={"A": "0123456789abcdef"})


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nretention: {}",
        "version: 1\nretention: {classes: {a: {priority: 90, ttl: 1h, decoded_priority: 5}}}",
        "version: 1\nretention: {classes: {a: {decoded_priority: 50, decoded_ttl: 60}}}",
        "version: 1\nretention: {rules: [{class: default, tenants: [unknown], tokens: -256..}]}",
        "version: 1\nretention: {rules: [{class: default, role: decoded, domains: [public, isolated]}]}",
        "version: 1\nretention: {tenants: {unknown: {max_share: 0.5}, '*': {max_share: 12.5%}}}",
        "version: 1\nretention: {client_wishes: {allow: clamped, tenants: {unknown: {max_ttl: 5m}}}}",
    ],
)
def test_schema_and_loader_accept_alike(text: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(yaml.safe_load(text))
    parse_policy(text)


def test_built_in_default_is_the_shipped_one() -> None:
    assert default_text() == (POLICIES / "default.yaml").read_text("utf-8")


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = load("demo.yaml", monkeypatch)
    tenancy = snapshot.policy.tenancy
    assert tenancy is not None
    assert (tenancy.unknown, tenancy.salt_secret) == ("isolate", None)
    assert dict(snapshot.key_digests) == {
        hashlib.sha256(b"demo-key-acme-0001").digest(): "acme",
        hashlib.sha256(b"demo-key-globex-0001").digest(): "globex",
    }
    assert snapshot.admin_digests == {hashlib.sha256(b"demo-admin-key-0001").digest()}
    (prefix,) = tenancy.shared_prefixes
    assert (prefix.name, prefix.domains) == ("assistant-v1", ("acme", "globex"))
    assert prefix.messages is not None
    assert 120 <= len(prefix.messages[0].content.split()) <= 200


def test_saas(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = load("multi-tenant-saas.yaml", monkeypatch)
    tenancy = snapshot.policy.tenancy
    assert tenancy is not None
    assert tenancy.unknown == "reject"
    assert snapshot.salt_secret == b"salt-secret-of-the-test"
    assert snapshot.gateway_secret == b"gateway-secret-of-the-test"
    assert snapshot.signed_domain("northwind-outlet") == "northwind-group"
    assert snapshot.signed_domain("a-customer-of-tomorrow") == "a-customer-of-tomorrow"
    assert {prefix.domains for prefix in tenancy.shared_prefixes} == {"all"}
    retention = snapshot.policy.retention
    assert retention is not None
    assert (retention.order, retention.client_wishes.allow) == ("lru", "never")
    share = retention.share_of("a-customer-of-tomorrow")
    assert share is not None
    assert (share.min_share, share.max_share) == (None, 0.4)


def test_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = load("agents.yaml", monkeypatch)
    assert snapshot.domain_of("payments-ci") == snapshot.domain_of("payments") == "payments"
    assert snapshot.domain_of("web") == "web"
    assert len(snapshot.key_digests) == 4
    retention = snapshot.policy.retention
    assert retention is not None
    assert (retention.order, retention.client_wishes.allow) == ("reuse", "clamped")
    assert retention.tenants["infra"].min_share == 0.15
