"""What the schema cannot say: references that lead somewhere, names that are unique, domains that exist.

Works on the plain document rather than on the validated model and tolerates any shape, so that one run
reports these problems together with the schema's.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from vllm_ext.policy.problems import Path, PolicyProblem
from vllm_ext.policy.references import (
    Reference,
    ReferenceProblem,
    key_digest,
    parse_key_reference,
    parse_secret_reference,
    resolve_key,
    resolve_secret,
)
from vllm_ext.policy.retention_checks import check_retention
from vllm_ext.policy.translate import at, nearest
from vllm_ext.policy.yaml_source import YamlDocument, find

MAX_TEXT_BYTES = 4 * 1024 * 1024

_SECRETS: tuple[tuple[str | None, ...], ...] = (("tenancy", "salt_secret"), ("tenancy", "gateway", "secret"))
_KEYS: tuple[tuple[str | None, ...], ...] = (
    ("tenancy", "tenants", None, "api_keys", None),
    ("admin", "api_keys", None),
)
_Parse = Callable[[object], Reference]
_Resolve = Callable[[Reference, FilePath, Mapping[str, str]], bytes]
_PREFIX = ("tenancy", "shared_prefixes", None)


@dataclass(slots=True)
class Findings:
    """What the references lead to, and what is wrong. Holds secrets: never shown."""

    problems: list[PolicyProblem] = field(default_factory=list)
    secrets: dict[Path, bytes] = field(default_factory=dict, repr=False)
    keys: dict[Path, bytes] = field(default_factory=dict, repr=False)
    texts: dict[str, str] = field(default_factory=dict)
    file_digests: dict[str, str] = field(default_factory=dict)
    files: list[FilePath] = field(default_factory=list)


def check(
    document: YamlDocument, base_dir: FilePath, environ: Mapping[str, str], *, resolve_secrets: bool
) -> Findings:
    """Follow every reference and compare what must fit together."""
    findings = Findings()
    wanted: list[tuple[tuple[str | None, ...], _Parse, _Resolve, dict[Path, bytes]]] = [
        *((pattern, parse_secret_reference, resolve_secret, findings.secrets) for pattern in _SECRETS),
        *((pattern, parse_key_reference, resolve_key, findings.keys) for pattern in _KEYS),
    ]
    for pattern, parse, resolve, found in wanted:
        for path, value in find(document.value, pattern):
            try:
                reference = parse(value)
            except ReferenceProblem:
                continue  # the schema's validators report it
            if (file := reference.path(base_dir)) is not None:
                findings.files.append(file)
            if not resolve_secrets and reference.kind != "sha256":
                continue
            try:
                found[path] = resolve(reference, base_dir, environ)
            except ReferenceProblem as error:
                findings.problems.append(at(document, path, error.message, error.hint))
    _duplicate_keys(document, findings)
    _one_value_for_two(document, findings)
    _prefix_names(document, findings)
    _prefix_domains(document, findings)
    _prefix_texts(document, findings, base_dir)
    findings.problems += check_retention(document)
    return findings


def _duplicate_keys(document: YamlDocument, findings: Findings) -> None:
    first: dict[bytes, Path] = {}
    for path, digest in findings.keys.items():
        earlier = first.setdefault(digest, path)
        if earlier == path:
            continue
        place = document.nearest_position(earlier)
        owner = "an admin" if earlier[0] == "admin" else f"tenant {earlier[2]}"
        hint = (
            "an admin's key must not be a tenant's"
            if path[0] == "admin"
            else "one key identifies one tenant, once"
        )
        findings.problems.append(at(document, path, f"the same key as line {place.line}'s, of {owner}", hint))


def _one_value_for_two(document: YamlDocument, findings: Findings) -> None:
    """A secret must not be known to whoever holds another secret, or a key."""
    salt, gateway = ("tenancy", "salt_secret"), ("tenancy", "gateway", "secret")
    remedy = "give each a value of its own: openssl rand -hex 32"
    written = {
        path: value
        for pattern in _SECRETS
        for path, value in find(document.value, pattern)
        if isinstance(value, str)
    }
    values = findings.secrets
    # Without the values (`resolve_secrets=False`), one reference in both places says as much.
    if gateway in written and (
        written[gateway] == written.get(salt)
        if gateway not in values or salt not in values
        else hmac.compare_digest(values[gateway], values[salt])
    ):
        line = document.nearest_position(salt).line
        message = (
            f"the same value as line {line}'s salt_secret: the gateway would hold the key that signs stamps"
        )
        findings.problems.append(at(document, gateway, message, remedy))
    digests = {key_digest(value): path for path, value in values.items()}
    for path, digest in findings.keys.items():
        if (secret := digests.get(digest)) is not None:
            line = document.nearest_position(secret).line
            message = (
                f"the same value as line {line}'s {secret[-1]}: whoever holds this key would hold the secret"
            )
            findings.problems.append(at(document, path, message, remedy))


def _prefix_names(document: YamlDocument, findings: Findings) -> None:
    first: dict[str, Path] = {}
    for path, name in find(document.value, (*_PREFIX, "name")):
        if isinstance(name, str) and first.setdefault(name, path) != path:
            line = document.nearest_position(first[name]).line
            findings.problems.append(
                at(document, path, f"line {line} has a shared prefix of this name", "rename one")
            )


def _prefix_domains(document: YamlDocument, findings: Findings) -> None:
    domain_of: dict[str, str] = {}
    for path, tenant in find(document.value, ("tenancy", "tenants", None)):
        domain = tenant.get("domain") if isinstance(tenant, Mapping) else None
        domain_of[str(path[-1])] = domain if isinstance(domain, str) else str(path[-1])
    declared = set(domain_of.values())
    seen: set[tuple[Path, str]] = set()
    for path, domain in find(document.value, (*_PREFIX, "domains", None)):
        if not isinstance(domain, str):
            continue
        if domain not in declared and domain in domain_of:
            message = f"`{domain}` is a tenant; its trust domain is `{domain_of[domain]}`"
            findings.problems.append(at(document, path, f"{message}: write `{domain_of[domain]}`"))
        elif domain not in declared:
            hint = nearest(domain, declared) or "declare a tenant of that domain, or write `domains: all`"
            findings.problems.append(
                at(document, path, f"no tenant belongs to a trust domain `{domain}`", hint)
            )
        elif (path[:-1], domain) in seen:
            findings.problems.append(at(document, path, f"`{domain}` is listed twice", "keep one"))
        seen.add((path[:-1], domain))


def _prefix_texts(document: YamlDocument, findings: Findings, base_dir: FilePath) -> None:
    for path, prefix in find(document.value, _PREFIX):
        if not isinstance(prefix, Mapping) or not isinstance(name := prefix.get("name"), str):
            continue
        if isinstance(text := prefix.get("text"), str):
            findings.texts[name] = text
        if isinstance(file := prefix.get("file"), str) and file.strip():
            _prefix_file(document, findings, (*path, "file"), name, base_dir, file)


def _prefix_file(
    document: YamlDocument, findings: Findings, path: Path, name: str, base_dir: FilePath, file: str
) -> None:
    def report(message: str, hint: str) -> None:
        findings.problems.append(at(document, path, message, hint))

    findings.files.append(base_dir / file)
    try:
        with (base_dir / file).open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason: Any = getattr(error, "strerror", None) or "not a path"
        return report(f"cannot read the file: {reason}", "the path is relative to the policy file")
    if len(data) > MAX_TEXT_BYTES:
        return report(
            f"the file is larger than {MAX_TEXT_BYTES} bytes", "a shared prefix is a prompt's beginning"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return report(f"the file is not UTF-8, at byte {error.start}", "save it as UTF-8")
    if not text.strip():
        return report("the file is empty", "a shared prefix needs a text")
    findings.texts[name] = text
    findings.file_digests[file] = hashlib.sha256(data).hexdigest()
