"""What a reload changed, in a few words for the log. Names only: no secrets, keys or texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_ext.policy.retention import RetentionPolicy
from vllm_ext.policy.schema import GatewayPolicy, TenancyPolicy
from vllm_ext.policy.snapshot import PolicySnapshot

MAX_NAMES = 5
"""How many names are written out of a longer list."""


def describe_changes(old: PolicySnapshot, new: PolicySnapshot) -> str:
    """As in ``+1 tenant treasury, unknown: isolate -> reject, retention rules changed``."""
    before, after = old.policy, new.policy
    words: list[str] = []
    if before.tenancy is not None and after.tenancy is not None:
        words += _tenancy(old, new, before.tenancy, after.tenancy)
    if before.retention is not None and after.retention is not None:
        words += _retention(before.retention, after.retention)
    if old.admin_digests != new.admin_digests:
        words.append("admin keys changed")
    words += _values("metrics.", before.metrics, after.metrics, ("max_tenant_labels",))
    return ", ".join(words) or "comments or layout only"


def _tenancy(
    old: PolicySnapshot, new: PolicySnapshot, before: TenancyPolicy, after: TenancyPolicy
) -> Iterator[str]:
    yield from _came_and_went("tenant", "tenants", before.tenants, after.tenants)
    kept = [name for name in after.tenants if name in before.tenants]
    moved = [name for name in kept if old.domain_of(name) != new.domain_of(name)]
    if len(moved) == 1:
        yield f"domain of {moved[0]}: {old.domain_of(moved[0])} -> {new.domain_of(moved[0])}"
    elif moved:
        yield f"domains of {_names(moved)} changed"
    keys, new_keys = _keys_by_tenant(old), _keys_by_tenant(new)
    if rotated := [name for name in kept if keys.get(name) != new_keys.get(name)]:
        yield f"API keys of {_names(rotated)} changed"
    yield from _values("", before, after, ("unknown",))
    yield from _gateway(before.gateway, after.gateway, old.gateway_secret != new.gateway_secret)
    if before.trusted_connectors != after.trusted_connectors:
        yield "trusted_connectors changed"
    prefixes = {prefix.name: prefix for prefix in before.shared_prefixes}
    new_prefixes = {prefix.name: prefix for prefix in after.shared_prefixes}
    yield from _came_and_went("shared prefix", "shared prefixes", prefixes, new_prefixes)
    if changed := [
        name
        for name, prefix in new_prefixes.items()
        if name in prefixes
        and (prefix != prefixes[name] or old.shared_texts.get(name) != new.shared_texts.get(name))
    ]:
        yield f"shared prefix{'es' if len(changed) > 1 else ''} {_names(changed)} changed"


def _gateway(
    before: GatewayPolicy | None, after: GatewayPolicy | None, another_secret: bool
) -> Iterator[str]:
    if before is None or after is None:
        if before is not after:
            yield f"gateway {'removed' if after is None else 'added'}"
        return
    if another_secret:
        yield "gateway.secret changed"
    yield from _values("gateway.", before, after, ("replay_window", "max_body", "unlisted_tenants"))


def _retention(before: RetentionPolicy, after: RetentionPolicy) -> Iterator[str]:
    for field, what in (
        ("default", "default"),
        ("classes", "classes"),
        ("rules", "rules"),
        ("tenants", "shares"),
        ("client_wishes", "client wishes"),
    ):
        if getattr(before, field) != getattr(after, field):
            yield f"retention {what} changed"


def _came_and_went(
    singular: str, plural: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[str]:
    for sign, names in (
        ("+", [name for name in after if name not in before]),
        ("-", [name for name in before if name not in after]),
    ):
        if names:
            yield f"{sign}{len(names)} {singular if len(names) == 1 else plural} {_names(names)}"


def _values(prefix: str, before: object, after: object, fields: Iterable[str]) -> Iterator[str]:
    for field in fields:
        was, now = getattr(before, field), getattr(after, field)
        if was != now:
            unit = " s" if isinstance(now, float) else ""
            yield f"{prefix}{field}: {was}{unit} -> {now}{unit}"


def _keys_by_tenant(snapshot: PolicySnapshot) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    for digest, tenant in snapshot.key_digests.items():
        found.setdefault(tenant, set()).add(digest)
    return found


def _names(names: list[str]) -> str:
    """Joined by spaces: the commas are between changes."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return " ".join(names[:MAX_NAMES]) + more
