"""What the retention section's parts ask of each other, and of the tenants and shared prefixes.

As ``checks``: on the plain document, whatever its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm_ext.policy.problems import Path, PolicyProblem
from vllm_ext.policy.retention import DEFAULT_CLASS, DOMAIN_WORDS, EVERY_OTHER, PROMPT_ROLES, UNKNOWN
from vllm_ext.policy.translate import at, nearest
from vllm_ext.policy.units import parse_share
from vllm_ext.policy.yaml_source import YamlDocument, find

_ORDINARY = 35


def check_retention(document: YamlDocument) -> Iterator[PolicyProblem]:
    """Every problem between the parts of the section."""
    yield from _ttls(document)
    yield from _rule_classes(document)
    yield from _unreachable_rules(document)
    yield from _declared_names(document)
    yield from _shares(document)


def _ttls(document: YamlDocument) -> Iterator[PolicyProblem]:
    """After its ttl a block falls back to the default: from below, that would raise it."""
    default = _value(document, ("retention", "default", "priority"))
    default = default if isinstance(default, int) else _ORDINARY
    decoded = _value(document, ("retention", "default", "decoded_priority"))
    ordinary = {"priority": default, "decoded_priority": decoded if isinstance(decoded, int) else default}
    for path, fields in find(document.value, ("retention", "classes", None)):
        if not isinstance(fields, Mapping):
            continue
        for name, floor in ordinary.items():
            ttl = name.replace("priority", "ttl")
            priority = fields.get(name)
            if fields.get(ttl) is not None and isinstance(priority, int) and priority <= floor:
                message = (
                    f"a {ttl} needs a {name} above the default's {floor}: after it the blocks fall back to "
                    f"{floor}, so from {priority} they would {'rise' if priority < floor else 'not change'}"
                )
                yield at(document, (*path, ttl), message, f"remove the {ttl}, or raise the {name}")


def _rule_classes(document: YamlDocument) -> Iterator[PolicyProblem]:
    classes = {
        str(path[-1]): fields
        for path, fields in find(document.value, ("retention", "classes", None))
        if isinstance(fields, Mapping)
    }
    known = {*classes, DEFAULT_CLASS}
    for path, rule in find(document.value, ("retention", "rules", None)):
        name = rule.get("class") if isinstance(rule, Mapping) else None
        if not isinstance(name, str):
            continue
        place = (*path, "class")
        if name not in known:
            hint = nearest(name, known) or "define it under `retention.classes`"
            yield at(document, place, f"there is no class `{name}`", hint)
        elif name in classes and (lacks := _lacks(rule, classes[name])):
            what = "decoded blocks" if lacks == "decoded_priority" else "prompt blocks"
            yield at(document, place, f"`{name}` says nothing about {what}", f"give the class a {lacks}")


def _lacks(rule: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """The value without which the rule gives nothing."""
    if rule.get("role") == "decoded":
        return "decoded_priority" if fields.get("decoded_priority") is None else None
    places = rule.get("role") in PROMPT_ROLES or any(rule.get(key) for key in ("tokens", "shared_prefix"))
    return "priority" if places and fields.get("priority") is None else None


def _unreachable_rules(document: YamlDocument) -> Iterator[PolicyProblem]:
    catch_all: Path | None = None
    for path, rule in find(document.value, ("retention", "rules", None)):
        if catch_all is not None:
            line = document.nearest_position(catch_all).line
            message = f"never reached: the rule on line {line} has no condition, so it takes every token"
            yield at(document, path, message, "move that rule to the end, or remove this one")
        elif isinstance(rule, Mapping) and [key for key, value in rule.items() if value is not None] == [
            "class"
        ]:
            catch_all = path


def _declared_names(document: YamlDocument) -> Iterator[PolicyProblem]:
    tenants, domains = {}, set()
    for path, tenant in find(document.value, ("tenancy", "tenants", None)):
        name = str(path[-1])
        tenants[name] = tenant
        domain = tenant.get("domain") if isinstance(tenant, Mapping) else None
        domains.add(domain if isinstance(domain, str) else name)
    prefixes = {
        name
        for _, name in find(document.value, ("tenancy", "shared_prefixes", None, "name"))
        if isinstance(name, str)
    }
    declare_tenant = "declare it under `tenancy.tenants`"
    for path, name in _tenant_names(document):
        if name not in (UNKNOWN, *tenants):
            hint = nearest(name, tenants) or declare_tenant
            yield at(document, path, f"there is no tenant `{name}`", hint)
    for path, name in _listed(document, "domains"):
        if name not in domains.union(DOMAIN_WORDS):
            hint = nearest(name, domains) or declare_tenant.replace("it", "a tenant of it")
            yield at(document, path, f"no tenant belongs to a trust domain `{name}`", hint)
    for path, name in _listed(document, "shared_prefix"):
        if name != "any" and name not in prefixes:
            hint = nearest(name, prefixes) or "register it under `tenancy.shared_prefixes`, or write any"
            yield at(document, path, f"there is no shared prefix `{name}`", hint)


def _listed(document: YamlDocument, field: str) -> Iterator[tuple[Path, str]]:
    """Names in a rule's field, which is a name or a list of names."""
    for path, value in find(document.value, ("retention", "rules", None, field)):
        items: Iterable[tuple[Path, Any]] = [(path, value)]
        if isinstance(value, tuple):
            items = [((*path, index), item) for index, item in enumerate(value)]
        yield from ((place, item) for place, item in items if isinstance(item, str))


def _tenant_names(document: YamlDocument) -> Iterator[tuple[Path, str]]:
    yield from _listed(document, "tenants")
    for path, _ in find(document.value, ("retention", "tenants", None)):
        if path[-1] != EVERY_OTHER:
            yield path, str(path[-1])
    for path, _ in find(document.value, ("retention", "client_wishes", "tenants", None)):
        yield path, str(path[-1])


def _shares(document: YamlDocument) -> Iterator[PolicyProblem]:
    total = 0.0
    for path, share in find(document.value, ("retention", "tenants", None, "min_share")):
        if path[2] == EVERY_OTHER:
            message = "a min_share cannot be promised to tenants whose number nobody knows"
            yield at(document, path, message, "give it to tenants by name")
            continue
        try:
            total += parse_share(share)
        except ValueError:
            continue  # the schema's validators report it
    if total > 1 + 1e-9:
        message = f"the min_shares add up to {total * 100:g} %, more than there is"
        yield at(document, ("retention", "tenants"), message, "lower some of them")


def _value(document: YamlDocument, path: Path) -> Any:
    return next((value for _, value in find(document.value, tuple(map(str, path)))), None)
