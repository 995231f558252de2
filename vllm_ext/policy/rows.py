"""What an explanation is made of."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.policy.problems import Position


@dataclass(frozen=True, slots=True)
class ExplainRow:
    """One thing that a tenant gets. ``position`` is None for a default that the file does not mention."""

    setting: str
    value: str
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom to explain. ``tenant`` is None for a request whose key nobody has."""

    tenant: str | None
    key_source: str | None = None
    """Where an API key that was tried came from, as in ``$MY_KEY``."""
    key_digest: bytes | None = None
    """That key's SHA-256."""
