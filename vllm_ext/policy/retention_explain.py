"""What the retention section means for one tenant."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_ext.policy.problems import Path
from vllm_ext.policy.retention import (
    DEFAULT_CLASS,
    EVERY_OTHER,
    UNKNOWN,
    RetentionClass,
    RetentionPolicy,
    RetentionRule,
)
from vllm_ext.policy.rows import ExplainRow, Subject
from vllm_ext.policy.snapshot import PolicySnapshot

ORDERS = {"lru": "vLLM's own order", "reuse": "what is likely to come back is kept"}


def retention_rows(snapshot: PolicySnapshot, subject: Subject) -> Iterator[ExplainRow]:
    """Order, classes by rule, share and wishes of the subject; nothing when there is no such section."""
    retention = snapshot.policy.retention
    if retention is None:
        return
    tenant, domain = _place(snapshot, subject)
    order = f"{retention.order}: {ORDERS[retention.order]}"
    yield ExplainRow("eviction order", order, snapshot.position(("retention", "order")))
    for index, rule in enumerate(retention.rules):
        if (rule.tenants is None or tenant in rule.tenants) and (
            rule.domains is None or domain in rule.domains
        ):
            position = snapshot.position(("retention", "rules", index))
            yield ExplainRow(
                "kept", f"{_conditions(rule)}: {_class(retention, rule.class_name, rule)}", position
            )
    default = snapshot.position(("retention", "default"))
    yield ExplainRow("kept", f"everything else: {_class(retention, DEFAULT_CLASS)}", default)
    yield _share_row(snapshot, retention, tenant)
    yield _wishes_row(snapshot, retention, tenant)


def in_words(seconds: float) -> str:
    """A duration as a policy writes it."""
    for size, unit in ((3600, "h"), (60, "m"), (1, "s")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"


def _place(snapshot: PolicySnapshot, subject: Subject) -> tuple[str, str | None]:
    """The names under which rules find the subject."""
    tenancy, tenant = snapshot.policy.tenancy, subject.tenant
    if tenancy is not None and tenant is not None:
        if tenant in tenancy.tenants:
            return tenant, snapshot.domain_of(tenant)
        if snapshot.signed_domain(tenant):
            return tenant, None  # its own domain, which no rule can name
    return UNKNOWN, {"isolate": "isolated", "public": "public"}.get(tenancy.unknown if tenancy else "")


def _conditions(rule: RetentionRule) -> str:
    words = []
    if rule.role is not None:
        words.append("decoded tokens" if rule.role == "decoded" else f"the {rule.role} part")
    if rule.tokens is not None:
        words.append(f"tokens {rule.tokens}")
    if rule.shared_prefix is not None:
        names = "any" if rule.shared_prefix == "any" else " or ".join(rule.shared_prefix)
        words.append(f"shared prefix {names}")
    for field in ("models", "adapters"):
        if names := getattr(rule, field):
            words.append(f"{field.removesuffix('s')} {' or '.join(names)}")
    return " and ".join(words) or "every token"


def _class(retention: RetentionPolicy, name: str, rule: RetentionRule | None = None) -> str:
    """A class and what it gives to the tokens that the rule picks."""
    values = retention.classes.get(name) or RetentionClass.model_construct()
    default = retention.default
    words = [f"class {name}"]
    if rule is None or rule.role != "decoded":
        priority = default.priority if values.priority is None else values.priority
        words.append(f"priority {priority}{_for(values.ttl)}")
    if rule is None or not rule.is_for_places:
        decoded = default.decoded if values.decoded_priority is None else values.decoded_priority
        words.append(f"decoded {decoded}{_for(values.decoded_ttl)}")
    return ", ".join(words)


def _for(ttl: float | None) -> str:
    return "" if ttl is None else f" for {in_words(ttl)}"


def _share_row(snapshot: PolicySnapshot, retention: RetentionPolicy, tenant: str) -> ExplainRow:
    share = retention.share_of(tenant)
    if share is None:
        return ExplainRow("share of the KV blocks", "no bounds")
    path: Path = ("retention", "tenants", tenant if tenant in retention.tenants else EVERY_OTHER)
    bounds = []
    if share.min_share is not None:
        bounds.append(f"others leave it {_percent(share.min_share)}")
    if share.max_share is not None:
        bounds.append(f"above {_percent(share.max_share)} its own blocks go first")
    return ExplainRow("share of the KV blocks", ", ".join(bounds), snapshot.position(path))


def _percent(share: float) -> str:
    return f"{share * 100:.6g}%"


def _wishes_row(snapshot: PolicySnapshot, retention: RetentionPolicy, tenant: str) -> ExplainRow:
    bounds = retention.client_wishes.bounds(tenant, retention.default.priority)
    path: Path = ("retention", "client_wishes")
    if tenant in retention.client_wishes.tenants:
        path = (*path, "tenants", tenant)
    value = "not heard"
    if bounds.allowed:
        value = f"heard, priority up to {bounds.max_priority} for up to {in_words(bounds.max_ttl)}"
    return ExplainRow("clients' wishes", value, snapshot.position(path))
