"""The retention classes of a prompt, range by range, for ``vllm-ext policy explain``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vllm_ext.cache.retention import Classifier, RequestShape, Retention, RetentionRange
from vllm_ext.cache.wishes import WishReason
from vllm_ext.cli.prompt import Prompt, PromptReader
from vllm_ext.policy import PolicySnapshot, Position
from vllm_ext.policy.retention_explain import in_words
from vllm_ext.tenancy.identity import UNKNOWN_TENANT, DomainKind, TrustDomain
from vllm_ext.tenancy.shared_prefix import RegisteredPrefix


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One range of tokens. ``position`` is where the policy says so; None for a built-in default."""

    tokens: str
    part: str
    class_name: str
    priority: str
    ttl: str
    position: Position | None


def read_shape(
    snapshot: PolicySnapshot,
    tenant: str | None,
    file: Path,
    tokenizer: Path | None,
    num_tokens: int | None,
    block_size: int,
) -> RequestShape:
    """What a request of the tenant with this prompt looks like to the rules.

    With ``num_tokens`` the prompt is taken to have so many, its parts and shared prefix unknown.
    Raises PromptError, and OSError when the file cannot be read.
    """
    name, domain = _caller(snapshot, tenant)
    if tokenizer is None:
        file.open("rb").close()
        return RequestShape(num_tokens or 0, name, domain.label)
    reader = PromptReader(tokenizer)
    prompt = reader.read(file)
    shared_name, shared_tokens = _shared(snapshot, reader, prompt, domain, block_size)
    return RequestShape(
        len(prompt.token_ids),
        name,
        domain.label,
        system_end=prompt.system_end,
        tail_start=prompt.tail_start,
        shared_tokens=shared_tokens,
        shared_name=shared_name,
    )


def explain_prompt(
    snapshot: PolicySnapshot, shape: RequestShape
) -> tuple[list[ClassRow], tuple[WishReason, ...]]:
    """The prompt's ranges in order, cut where parts of the chat meet, then the decoded tokens; and why the
    client's wish is not followed as asked."""
    retention = Classifier(snapshot.policy.retention).classify(shape)
    rows = [_row(snapshot, one, f"{one.start}..{one.end}", part) for one, part in _parts(retention, shape)]
    rows.append(_row(snapshot, retention.decoded, f"{shape.num_prompt_tokens}..", "decoded"))
    return rows, retention.wish_reasons


def _caller(snapshot: PolicySnapshot, tenant: str | None) -> tuple[str, TrustDomain]:
    tenancy = snapshot.policy.tenancy
    if tenancy is not None and tenant is not None:
        if tenant in tenancy.tenants:
            return tenant, TrustDomain.declared(snapshot.domain_of(tenant))
        if (domain := snapshot.signed_domain(tenant)) is not None:
            return tenant, TrustDomain.unlisted(domain)
    isolated = tenancy is not None and tenancy.unknown == "isolate"
    return UNKNOWN_TENANT, TrustDomain(DomainKind.ISOLATED if isolated else DomainKind.PUBLIC, "")


def _shared(
    snapshot: PolicySnapshot, reader: PromptReader, prompt: Prompt, domain: TrustDomain, block_size: int
) -> tuple[str | None, int]:
    """The registered prefix that covers most whole blocks of the prompt."""
    best: tuple[str | None, int] = (None, 0)
    for shared in snapshot.policy.tenancy.shared_prefixes if snapshot.policy.tenancy else ():
        tokens = reader.shared_prefix(shared, snapshot)
        domains = None if shared.domains == "all" else frozenset(shared.domains)
        if not RegisteredPrefix(shared.name, domains, tokens).admits(domain):
            continue
        pairs = enumerate(zip(tokens, prompt.token_ids, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(prompt.token_ids)))
        if same // block_size * block_size > best[1]:
            best = shared.name, same // block_size * block_size
    return best


def _parts(retention: Retention, shape: RequestShape) -> Iterator[tuple[RetentionRange, str]]:
    """The ranges, cut where the parts of the conversation meet, each with its part's name."""
    cuts = [place for place in (shape.system_end, shape.tail_start) if place is not None]
    for one in retention.ranges:
        places = sorted({one.start, one.end, *(place for place in cuts if one.start < place < one.end)})
        for start, end in pairwise(places):
            yield one._replace(start=start, end=end), _part(start, shape)


def _part(token: int, shape: RequestShape) -> str:
    system, tail = shape.system_end, shape.tail_start
    if system is not None and token < system:
        part = "system"
    elif tail is None:
        part = "not known"
    elif token >= tail:
        part = "tail"
    else:
        part = "not known" if system is None else "history"
    return f"{part}, shared {shape.shared_name}" if token < shape.shared_tokens else part


def _row(snapshot: PolicySnapshot, one: RetentionRange, tokens: str, part: str) -> ClassRow:
    grant = one.grant
    path = ("retention", "default") if one.rule is None else ("retention", "rules", one.rule)
    ttl = "for good" if grant.ttl is None else f"for {in_words(grant.ttl)}, then {grant.base}"
    name = f"{one.class_name}, as the client asks" if one.wished else one.class_name
    return ClassRow(tokens, part, name, str(grant.priority), ttl, snapshot.position(path))
