"""The stamp: how the front end tells the engine who is asking, so that nobody else can.

The only fields that travel from every front end to the scheduler are ones that clients can write too. So the
identity travels signed, and the signature covers the engine's internal request id (which vLLM makes random),
so a stamp that leaks is worth nothing on another request.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass

from vllm_ext.tenancy.framing import frame, unframe
from vllm_ext.tenancy.identity import DomainKind, IdentifiedBy, Identity, TrustDomain

STAMP_KEY = "vllm_ext.stamp"
"""Key in `SamplingParams.extra_args` or `PoolingParams.extra_kwargs` that carries the stamp."""
TENANT_KEY = "vllm_ext.tenant"
"""Key by which in-process Python callers name their tenant. Never read from HTTP."""
ISOLATE = "isolate"
"""The unsigned stamp "give this request a domain of its own": anyone may say it, it grants nothing."""

_STAMP_VERSION = "vllm_ext/stamp/1"
_MAX_STAMP_CHARS = 16384


class StampError(ValueError):
    """A stamp that cannot be believed. `reason` is one of a few fixed words, fit for a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"request stamp refused: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stamped:
    """What a genuine stamp says."""

    identity: Identity
    client_salt: str | None


class Stamper:
    """Signs and verifies stamps with the salt secret (frames of stamps and salts begin with different
    words).
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Stamper(secret=***)"

    def stamp(self, identity: Identity, client_salt: str | None, request_id: str) -> str:
        """Sign `identity` and the client's own salt for the request with this internal id."""
        payload = frame(
            _STAMP_VERSION,
            identity.tenant,
            identity.domain.kind.value,
            identity.domain.name,
            identity.identified_by.value,
            identity.reason,
            client_salt or b"",
        )
        return f"{base64.urlsafe_b64encode(payload).decode()}.{self._mac(payload, request_id).hex()}"

    def verify(self, stamp: object, request_id: str) -> Stamped:
        """Check `stamp` against this request.

        Raises:
            StampError: it is not a string (`malformed`), not ours or altered or for another request
            (`bad_mac`), …
        """
        if not isinstance(stamp, str) or len(stamp) > _MAX_STAMP_CHARS:
            raise StampError("malformed")
        encoded, _, mac_hex = stamp.partition(".")
        try:
            payload = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True)
            mac = bytes.fromhex(mac_hex)
        except ValueError as error:
            raise StampError("malformed") from error
        if base64.urlsafe_b64encode(payload).decode() != encoded:
            raise StampError("malformed")  # base64 has several spellings of some bytes; one stamp has one
        if not hmac.compare_digest(mac, self._mac(payload, request_id)):
            raise StampError("bad_mac")
        return _decode(payload)

    def _mac(self, payload: bytes, request_id: str) -> bytes:
        return hmac.digest(self._secret, frame(_STAMP_VERSION, "mac", request_id, payload), "sha256")


def _decode(payload: bytes) -> Stamped:
    """Only reached with a genuine MAC: a failure here means that front end and engine run different
    versions.
    """
    try:
        version, *texts = (field.decode("utf-8", "surrogatepass") for field in unframe(payload))
        tenant, kind, name, identified_by, reason, client_salt = texts
        if version != _STAMP_VERSION:
            raise ValueError(version)
        identity = Identity(tenant, TrustDomain(DomainKind(kind), name), IdentifiedBy(identified_by), reason)
    except ValueError as error:
        raise StampError("other_version") from error
    return Stamped(identity, client_salt or None)
