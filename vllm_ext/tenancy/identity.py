"""Who is asking, and in which trust domain: the plain values that the rest of the pillar passes around."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum

UNKNOWN_TENANT = "(unknown)"
"""Tenant label of a caller that nobody vouched for. Tenant names cannot hold parentheses, so it collides with
none.
"""


class DomainKind(StrEnum):
    """What a trust domain's name means. The kind enters the salt, so equal names of different kinds never
    share KV.
    """

    DECLARED = "declared"
    """A domain that the policy names (a tenant's `domain`, or the tenant's own name)."""
    UNLISTED = "unlisted"
    """The domain of a tenant that the gateway signed for and the policy does not list."""
    PUBLIC = "public"
    """The one domain of all unknown callers under `unknown: public`."""
    ISOLATED = "isolated"
    """A domain of one request (one HTTP call): its name is random and never used again."""


@dataclass(frozen=True, slots=True)
class TrustDomain:
    """A set of requests that may reuse each other's KV."""

    kind: DomainKind
    name: str

    @property
    def label(self) -> str:
        """The value for logs and metrics: the random name of an isolated domain is never a label."""
        if self.kind in (DomainKind.PUBLIC, DomainKind.ISOLATED):
            return f"({self.kind.value})"
        # No name holds a slash, so an unlisted domain cannot pass for a declared one of that name.
        return f"unlisted/{self.name}" if self.kind is DomainKind.UNLISTED else self.name

    @staticmethod
    def declared(name: str) -> TrustDomain:
        return TrustDomain(DomainKind.DECLARED, name)

    @staticmethod
    def unlisted(tenant: str) -> TrustDomain:
        return TrustDomain(DomainKind.UNLISTED, tenant)

    @staticmethod
    def public() -> TrustDomain:
        return TrustDomain(DomainKind.PUBLIC, "")

    @staticmethod
    def isolated() -> TrustDomain:
        return TrustDomain(DomainKind.ISOLATED, secrets.token_hex(16))


class IdentifiedBy(StrEnum):
    """Which rule told us who is asking (first match wins, in this order)."""

    API_KEY = "api_key"
    GATEWAY = "gateway"
    PYTHON = "python"
    """In-process callers (`LLM`, `use_tenant`): whoever runs code in the server is trusted to say who
    asks.
    """
    UNKNOWN_RULE = "unknown_rule"


@dataclass(frozen=True, slots=True)
class Identity:
    """The answer to "who is asking": immutable, one per HTTP call, carried into the engine by a stamp."""

    tenant: str
    domain: TrustDomain
    identified_by: IdentifiedBy
    reason: str
    """Why this domain, as a metric label: `known`, `no_credentials`, `unknown_key`, `bad_signature`,
    `internal_error` …
    """

    @staticmethod
    def isolated(reason: str) -> Identity:
        """What every doubt ends in: a domain that nobody else is in."""
        return Identity(UNKNOWN_TENANT, TrustDomain.isolated(), IdentifiedBy.UNKNOWN_RULE, reason)

    @staticmethod
    def public(reason: str) -> Identity:
        return Identity(UNKNOWN_TENANT, TrustDomain.public(), IdentifiedBy.UNKNOWN_RULE, reason)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The policy's `unknown: reject` met a caller that it does not know."""

    reason: str
    message: str
