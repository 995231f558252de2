"""What a policy means for one tenant: rows, lines, and no secrets."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_ext.policy import ExplainRow, PolicySnapshot, explain_tenant, key_digest, parse_policy
from vllm_ext.tenancy.salt import ModelIdentity

pytestmark = pytest.mark.unit

TEXT = """version: 1
tenancy:
  salt_secret: env:SALT
  unknown: reject
  tenants:
    acme:
      domain: corp
      api_keys: [env:ACME]
    acme-lab:
      domain: corp
    globex: {}
  shared_prefixes:
    - {name: manual, domains: [corp], text: hello}
    - {name: greeting, domains: all, text: hi}
admin: {api_keys: [env:ADMIN]}
"""
GATEWAY = "  gateway: {secret: env:GATE, unlisted_tenants: own_domain}\n"
ENVIRONMENT = {
    "SALT": "salt-0123456789abcdef",
    "GATE": "gate-0123456789abcdef",
    "ACME": "acme-key-0123456",
    "ADMIN": "admin-key-0123456",
}


def load(text: str = TEXT) -> PolicySnapshot:
    return parse_policy(text, environ=ENVIRONMENT)


def with_gateway(rule: str = "own_domain") -> PolicySnapshot:
    return load(
        TEXT.replace("  unknown: reject\n", "  unknown: reject\n" + GATEWAY.replace("own_domain", rule))
    )


def values(rows: list[ExplainRow], setting: str) -> list[tuple[str, int | None]]:
    return [
        (row.value, row.position.line if row.position else None) for row in rows if row.setting == setting
    ]


def test_listed_tenant() -> None:
    rows = explain_tenant(load(), "acme")
    assert values(rows, "tenant") == [("acme", 6)]
    assert values(rows, "identified by") == [("API key env:ACME", 8)]
    assert values(rows, "trust domain") == [("corp", 7)]
    assert values(rows, "shares its domain with") == [("acme-lab", None)]
    assert values(rows, "shared prefix") == [
        ("manual (text), with corp", 13),
        ("greeting (text), with all tenants", 14),
    ]
    assert "only narrows" in values(rows, "client's cache_salt")[0][0]
    assert values(rows, "requests without identity") == [("reject: refused with 401", 4)]
    assert values(rows, "salt secret") == [("set, from env:SALT", 3)]
    identity = [
        "model",
        "revision",
        "tokenizer",
        "tokenizer revision",
        "dtype",
        "KV dtype",
        "quantisation",
        "LoRA set-up",
        "vLLM version",
    ]
    assert len(identity) == len(dataclasses.fields(ModelIdentity)), "each part of a salt is named"
    assert values(rows, "model identity in salts") == [(", ".join(identity), None)]
    named = TEXT.replace("  unknown: reject\n", "  unknown: reject\n  model_id: m7\n")
    rows = explain_tenant(load(named), "acme")
    stands_for = f"m7 (stands for {', '.join(identity[:4])}), {', '.join(identity[4:])}"
    assert values(rows, "model identity in salts") == [(stands_for, 5)]


def test_tenant_that_nothing_identifies() -> None:
    rows = explain_tenant(load(), "globex")
    assert "no request is ever this tenant's" in values(rows, "identified by")[0][0]
    assert values(rows, "trust domain") == [("globex (its own name, by default)", 11)]
    assert values(rows, "shared prefix") == [("greeting (text), with all tenants", 14)]


def test_misspelt_tenant_gets_the_nearest_name_and_the_rule() -> None:
    rows = explain_tenant(load(), "globx")
    assert values(rows, "tenant") == [("globx: not listed, did you mean `globex`?", 5)]
    assert values(rows, "treated as unknown") == [("refused with 401", 4)]
    assert values(rows, "trust domain") == [("none", None)]


def test_signed_tenant_that_is_not_listed() -> None:
    rows = explain_tenant(with_gateway(), "initech")
    assert values(rows, "identified by") == [("signed gateway header (secret from env:GATE)", 5)]
    assert values(rows, "trust domain") == [("initech (its own; unlisted_tenants: own_domain)", 5)]
    assert values(rows, "shared prefix") == [("greeting (text), with all tenants", 15)]
    # A listed domain of the same name is another domain.
    rows = explain_tenant(with_gateway(), "corp")
    assert values(rows, "shares its domain with") == [("no other listed tenant", None)]
    assert values(rows, "shared prefix") == [("greeting (text), with all tenants", 15)]


def test_signed_tenant_under_the_rule_for_the_unknown() -> None:
    rows = explain_tenant(with_gateway("unknown"), "initech")
    assert values(rows, "treated as unknown") == [("refused with 401", 4)]
    assert values(rows, "why") == [("unlisted_tenants: unknown", 5)]
    assert "cannot be a tenant's name" in values(explain_tenant(with_gateway(), "a b"), "why")[0][0]


@pytest.mark.parametrize(
    ("key", "tenant", "value"),
    [
        ("acme-key-0123456", "acme", "identifies acme (tenancy.tenants.acme.api_keys[0])"),
        ("acme-key-0123456", None, "identifies acme (tenancy.tenants.acme.api_keys[0])"),
        ("acme-key-0123456", "globex", "identifies acme, NOT globex (tenancy.tenants.acme.api_keys[0])"),
        ("admin-key-0123456", None, "an admin's, it identifies no tenant"),
        ("nobody's", None, "not known: no tenant has this key"),
    ],
)
def test_key(key: str, tenant: str | None, value: str) -> None:
    rows = explain_tenant(load(), tenant, key_source="$K", key_digest=key_digest(key.encode()))
    assert values(rows, "key in $K")[0][0] == value
    if tenant is None and key.startswith("acme"):
        assert values(rows, "tenant") == [("acme", 6)]
    if tenant is None and not key.startswith("acme"):
        assert values(rows, "treated as unknown") == [("refused with 401", 4)]


def test_other_rules_and_no_tenancy() -> None:
    rows = explain_tenant(load("version: 1\ntenancy: {unknown: public}"), "x")
    assert values(rows, "trust domain") == [("public", None)]
    assert "random at each server start" in values(rows, "salt secret")[0][0]
    rows = explain_tenant(load("version: 1"), "x")
    assert [row.setting for row in rows] == ["tenancy"]


def test_secrets_and_keys_are_not_in_any_row() -> None:
    for snapshot in (load(), with_gateway()):
        for tenant in ("acme", "globex", "initech", None):
            shown = repr(
                explain_tenant(snapshot, tenant, key_source="$K", key_digest=key_digest(b"acme-key-0123456"))
            )
            for secret in ENVIRONMENT.values():
                assert secret not in shown
                assert key_digest(secret.encode()).hex() not in shown
