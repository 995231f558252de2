"""One loaded policy: immutable, complete, and silent about its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NoReturn

from vllm_ext.policy.fields import is_valid_name
from vllm_ext.policy.problems import Path, Position
from vllm_ext.policy.schema import Policy


@dataclass(frozen=True, eq=False, repr=False)
class PolicySnapshot:
    """A policy file as it was at one moment, with everything it refers to. Read by all, written by none."""

    policy: Policy
    source: str
    """The file's path, or what else the text was read from."""
    digest: str
    """Hex SHA-256 of the text and of the shared prefixes' files. Secrets and keys do not enter it."""
    loaded_at: float
    """Unix time in seconds."""
    salt_secret: bytes | None = field(default=None)
    """None: no reference in the policy, or loaded with ``resolve_secrets=False``."""
    gateway_secret: bytes | None = field(default=None)
    key_digests: Mapping[bytes, str] = field(default_factory=dict)
    """SHA-256 of an API key (32 bytes) -> tenant."""
    admin_digests: frozenset[bytes] = frozenset()
    shared_texts: Mapping[str, str] = field(default_factory=dict)
    """Shared prefix's name -> its text, for the forms ``text`` and ``file``."""
    files: tuple[FilePath, ...] = ()
    """Files that the policy refers to, for watching."""
    key_paths: Mapping[bytes, Path] = field(default_factory=dict)
    """SHA-256 of an API key -> where the policy names it."""
    positions: Mapping[Path, Position] = field(default_factory=dict)
    fingerprint: bytes = b""
    """Changes whenever anything does, secrets included. Keyed with a key of this process, so it tells nothing
    to others."""

    @property
    def domains(self) -> frozenset[str]:
        """The trust domains that listed tenants belong to."""
        tenancy = self.policy.tenancy
        return frozenset(self.domain_of(tenant) for tenant in tenancy.tenants) if tenancy else frozenset()

    def domain_of(self, tenant: str) -> str:
        """The trust domain of a listed tenant. Raises KeyError for any other."""
        tenancy = self.policy.tenancy
        if tenancy is None or tenant not in tenancy.tenants:
            raise KeyError(tenant)
        return tenancy.tenants[tenant].domain or tenant

    def signed_domain(self, tenant: str) -> str | None:
        """The trust domain of a tenant that the gateway vouches for; None: the rule for the unknown applies.

        An unlisted tenant gets a domain of its own where the policy says so; were a listed domain of that
        name, it would still be another one.
        """
        tenancy = self.policy.tenancy
        if tenancy is None or tenancy.gateway is None:
            return None
        if tenant in tenancy.tenants:
            return self.domain_of(tenant)
        if tenancy.gateway.unlisted_tenants == "unknown" or not is_valid_name(tenant):
            return None
        return tenant

    def position(self, path: Path) -> Position | None:
        """Where the file says ``path``, as in ``("tenancy", "tenants", "acme")``; None when it does not."""
        return self.positions.get(tuple(path))

    def __repr__(self) -> str:
        tenants = len(self.policy.tenancy.tenants) if self.policy.tenancy else 0
        return f"PolicySnapshot(source={self.source!r}, digest={self.digest[:12]!r}, tenants={tenants})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a PolicySnapshot holds secrets and is not pickled; send the policy's text or path instead"
        )
