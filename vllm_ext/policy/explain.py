"""What a policy means for one tenant, as plain rows, each with the place in the file that says so.

Rendering is the command line's business. A later part of the policy adds its rows by a function in
``SECTIONS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_ext.policy.fields import is_valid_name
from vllm_ext.policy.problems import Path, format_path
from vllm_ext.policy.references import Reference
from vllm_ext.policy.retention_explain import retention_rows
from vllm_ext.policy.rows import ExplainRow, Subject
from vllm_ext.policy.schema import TenancyPolicy
from vllm_ext.policy.snapshot import PolicySnapshot
from vllm_ext.policy.translate import nearest

UNKNOWN_RULES = {
    "reject": "refused with 401",
    "isolate": "served, but shares cached prefixes with no other request",
    "public": "served, and shares cached prefixes with all other unknown requests",
}
NAME_PARTS = "model, revision, tokenizer, tokenizer revision"
"""The parts of the model identity that ``tenancy.model_id`` stands for."""
OTHER_PARTS = "dtype, KV dtype, quantisation, LoRA set-up, vLLM version"


def explain_tenant(
    snapshot: PolicySnapshot,
    tenant: str | None,
    *,
    key_source: str | None = None,
    key_digest: bytes | None = None,
) -> list[ExplainRow]:
    """All rows for a tenant, or, with ``tenant=None``, for whoever holds the key."""
    if tenant is None and key_digest is not None:
        tenant = snapshot.key_digests.get(key_digest)
    subject = Subject(tenant, key_source, key_digest)
    return [row for section in SECTIONS for row in section(snapshot, subject)]


def _who(snapshot: PolicySnapshot, subject: Subject) -> Iterator[ExplainRow]:
    tenancy, tenant = snapshot.policy.tenancy, subject.tenant
    if subject.key_digest is not None:
        yield _key_row(snapshot, subject)
    if tenancy is None:
        yield ExplainRow(
            "tenancy", "off: the file has no `tenancy`, all requests share one cache as in stock vLLM"
        )
        return
    if tenant is None:
        yield ExplainRow("tenant", "none: the key is not known")
        return
    if tenant in tenancy.tenants:
        path: Path = ("tenancy", "tenants", tenant)
        yield ExplainRow("tenant", tenant, snapshot.position(path))
        for index, reference in enumerate(tenancy.tenants[tenant].api_keys):
            yield ExplainRow("identified by", _key(reference), snapshot.position((*path, "api_keys", index)))
        if tenancy.gateway is None and not tenancy.tenants[tenant].api_keys:
            yield ExplainRow(
                "identified by", "nothing: no API key and no gateway, so no request is ever this tenant's"
            )
    else:
        yield ExplainRow("tenant", _unlisted(tenancy, tenant), snapshot.position(("tenancy", "tenants")))
    if tenancy.gateway is not None and (tenant in tenancy.tenants or snapshot.signed_domain(tenant)):
        value = f"signed gateway header (secret from {tenancy.gateway.secret})"
        yield ExplainRow("identified by", value, snapshot.position(("tenancy", "gateway")))


def _sharing(snapshot: PolicySnapshot, subject: Subject) -> Iterator[ExplainRow]:
    tenancy, tenant = snapshot.policy.tenancy, subject.tenant
    if tenancy is None:
        return
    domain = None
    if tenant is not None:
        domain = snapshot.domain_of(tenant) if tenant in tenancy.tenants else snapshot.signed_domain(tenant)
    if tenant is None or domain is None:
        yield from _outside(snapshot, tenancy, tenant)
        return
    yield _domain_row(snapshot, tenancy, tenant, domain)
    listed = (
        tenant in tenancy.tenants
    )  # an unlisted tenant is alone, even beside a listed domain of the same name
    others = [
        name for name in tenancy.tenants if listed and name != tenant and snapshot.domain_of(name) == domain
    ]
    yield ExplainRow("shares its domain with", ", ".join(others) or "no other listed tenant")
    reusable = 0
    for index, prefix in enumerate(tenancy.shared_prefixes):
        if prefix.domains == "all" or (listed and domain in prefix.domains):
            form = next(form for form in ("text", "file", "messages") if getattr(prefix, form) is not None)
            whom = "all tenants" if prefix.domains == "all" else ", ".join(prefix.domains)
            position = snapshot.position(("tenancy", "shared_prefixes", index))
            yield ExplainRow("shared prefix", f"{prefix.name} ({form}), with {whom}", position)
            reusable += 1
    if not reusable:
        yield ExplainRow("shared prefix", "none")
    yield ExplainRow("client's cache_salt", "only narrows the trust domain; it never reaches into another")


def _outside(snapshot: PolicySnapshot, tenancy: TenancyPolicy, tenant: str | None) -> Iterator[ExplainRow]:
    rule = snapshot.position(("tenancy", "unknown"))
    yield ExplainRow("treated as unknown", UNKNOWN_RULES[tenancy.unknown], rule)
    if tenant is not None and tenancy.gateway is not None:
        unlisted = snapshot.position(("tenancy", "gateway", "unlisted_tenants"))
        if not is_valid_name(tenant):
            yield ExplainRow(
                "why", "this cannot be a tenant's name: 1 to 128 letters, digits and . _ : - only"
            )
        else:
            yield ExplainRow("why", f"unlisted_tenants: {tenancy.gateway.unlisted_tenants}", unlisted)
    yield ExplainRow(
        "trust domain", {"reject": "none", "isolate": "one per request", "public": "public"}[tenancy.unknown]
    )
    yield ExplainRow("shared prefix", "none: they are for known tenants")


def _server(snapshot: PolicySnapshot, subject: Subject) -> Iterator[ExplainRow]:
    tenancy = snapshot.policy.tenancy
    if tenancy is None:
        return
    rule = f"{tenancy.unknown}: {UNKNOWN_RULES[tenancy.unknown]}"
    yield ExplainRow("requests without identity", rule, snapshot.position(("tenancy", "unknown")))
    secret = "random at each server start: nothing is shared between replicas or across restarts"
    if tenancy.salt_secret is not None:
        secret = (
            f"set, from {tenancy.salt_secret}"
            if snapshot.salt_secret
            else f"{tenancy.salt_secret}, not looked up"
        )
    yield ExplainRow("salt secret", secret, snapshot.position(("tenancy", "salt_secret")))
    name = NAME_PARTS
    if tenancy.model_id is not None:
        name = f"{tenancy.model_id} (stands for {NAME_PARTS})"
    model = f"{name}, {OTHER_PARTS}"
    yield ExplainRow("model identity in salts", model, snapshot.position(("tenancy", "model_id")))


def _telemetry(snapshot: PolicySnapshot, subject: Subject) -> Iterator[ExplainRow]:
    telemetry = snapshot.policy.telemetry
    if telemetry is None:
        return
    value = "off"
    if telemetry.block_trace is not None:
        value = f"{telemetry.block_trace}: keyed hashes of this tenant's blocks are written to it, no tokens"
    yield ExplainRow("block trace", value, snapshot.position(("telemetry", "block_trace")))


SECTIONS: list[Callable[[PolicySnapshot, Subject], Iterator[ExplainRow]]] = [
    _who,
    _sharing,
    _server,
    retention_rows,
    _telemetry,
]


def _key_row(snapshot: PolicySnapshot, subject: Subject) -> ExplainRow:
    assert subject.key_digest is not None
    path = snapshot.key_paths.get(subject.key_digest)
    setting, position = f"key in {subject.key_source}", snapshot.position(path) if path else None
    if subject.key_digest in snapshot.admin_digests:
        return ExplainRow(setting, "an admin's, it identifies no tenant", position)
    owner = snapshot.key_digests.get(subject.key_digest)
    if owner is None:
        return ExplainRow(setting, "not known: no tenant has this key")
    assert path is not None
    clash = f", NOT {subject.tenant}" if subject.tenant not in (None, owner) else ""
    return ExplainRow(setting, f"identifies {owner}{clash} ({format_path(path)})", position)


def _key(reference: Reference) -> str:
    return f"API key {reference.short()}"


def _domain_row(snapshot: PolicySnapshot, tenancy: TenancyPolicy, tenant: str, domain: str) -> ExplainRow:
    if tenant not in tenancy.tenants:
        position = snapshot.position(("tenancy", "gateway", "unlisted_tenants"))
        return ExplainRow("trust domain", f"{domain} (its own; unlisted_tenants: own_domain)", position)
    path: Path = ("tenancy", "tenants", tenant)
    if tenancy.tenants[tenant].domain is None:
        return ExplainRow("trust domain", f"{domain} (its own name, by default)", snapshot.position(path))
    return ExplainRow("trust domain", domain, snapshot.position((*path, "domain")))


def _unlisted(tenancy: TenancyPolicy, tenant: str) -> str:
    hint = nearest(tenant, tenancy.tenants)
    return f"{tenant}: not listed" + (f", {hint}" if hint else "")
