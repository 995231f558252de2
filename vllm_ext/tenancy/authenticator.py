"""From an HTTP request's headers to an `Identity`: API key, then signed gateway header, then the policy's
rule for the unknown.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from vllm_ext.policy import PolicySnapshot
from vllm_ext.tenancy.gateway import (
    SIGNATURE_HEADER,
    TENANT_HEADER,
    TIMESTAMP_HEADER,
    GatewayError,
    GatewayVerifier,
)
from vllm_ext.tenancy.identity import IdentifiedBy, Identity, Rejection, TrustDomain

API_KEY_HEADERS = ("x-api-key", "api-key")
"""Besides `Authorization: Bearer`: what Anthropic's and Azure's clients send."""
_GATEWAY_HEADERS = (TENANT_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)


class Credentials:
    """The headers of one request that say who is asking; nothing else of the request is kept.

    Args:
        headers: raw header pairs as ASGI gives them (names in lower case, any bytes as values).
    """

    __slots__ = ("_values", "repeated")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, str] = {}
        self.repeated: set[str] = set()
        for raw_name, raw_value in headers:
            name = raw_name.decode("latin-1").lower()
            if name == "authorization" or name in API_KEY_HEADERS or name in _GATEWAY_HEADERS:
                # A header sent twice is read differently by different proxies: such a credential is not
                # believed.
                if name in self._values:
                    self.repeated.add(name)
                self._values[name] = raw_value.decode("latin-1").strip()

    @property
    def api_keys(self) -> list[str]:
        """Every API key presented: the bearer token may be vLLM's own, and the tenant's stand beside it."""
        found = []
        scheme, _, bearer = self._values.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and bearer.strip() and "authorization" not in self.repeated:
            found.append(bearer.strip())
        found += [self._values[name] for name in API_KEY_HEADERS if self._presented(name)]
        return found

    def _presented(self, name: str) -> bool:
        return bool(self._values.get(name)) and name not in self.repeated

    @property
    def claims_gateway(self) -> bool:
        """Whether the request holds a signed header (true or false), so that its body is needed to check
        it.
        """
        return SIGNATURE_HEADER in self._values or TENANT_HEADER in self._values

    def gateway_header(self, name: str) -> str:
        return "" if name in self.repeated else self._values.get(name, "")


class KeyIndex:
    """Finds whose API key a presented key is, without leaking through timing how close a guess came.

    Digests are looked up under an HMAC with a key that this process drew at random, then compared in constant
    time.
    """

    def __init__(self, digests: Mapping[bytes, str]) -> None:
        self._blinding = secrets.token_bytes(32)
        self._owners = {self._blind(digest): (digest, owner) for digest, owner in digests.items()}

    def owner(self, presented: str) -> str | None:
        digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
        known, owner = self._owners.get(self._blind(digest), (bytes(32), None))
        return owner if hmac.compare_digest(known, digest) else None

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._blinding, digest, "sha256")


class AdminKeys:
    """Whose keys may look at the policy and change it.

    Args:
        digests: SHA-256 of each key.
    """

    def __init__(self, digests: Collection[bytes]) -> None:
        self._keys = KeyIndex(dict.fromkeys(digests, "admin"))
        self.exist = bool(digests)

    def hold(self, credentials: Credentials) -> bool:
        """Whether one of the presented keys is an admin's."""
        return any(self._keys.owner(key) is not None for key in credentials.api_keys)


@dataclass(frozen=True, slots=True)
class RequestLine:
    """Method and raw target of a request, as the gateway signed them. `WEBSOCKET` is the method of a
    handshake.
    """

    method: str
    target: str


class Authenticator:
    """The identity rules of one policy snapshot. Thread-safe; built anew for every snapshot.

    Args:
        snapshot: must have a `tenancy` section.
        gateway: the verifier to use; give the old one's on a reload so that its memory of used signatures
            survives.
    """

    def __init__(self, snapshot: PolicySnapshot, gateway: GatewayVerifier | None = None) -> None:
        tenancy = snapshot.policy.tenancy
        if tenancy is None:
            raise ValueError("the policy has no `tenancy` section")
        self._snapshot = snapshot
        self._unknown = tenancy.unknown
        self._tenants = tenancy.tenants
        self._gateway_policy = tenancy.gateway
        self._keys = KeyIndex(snapshot.key_digests)
        self.gateway = gateway
        if gateway is None and tenancy.gateway is not None and snapshot.gateway_secret is not None:
            self.gateway = GatewayVerifier(snapshot.gateway_secret, tenancy.gateway.replay_window)

    @property
    def max_body(self) -> int:
        """The longest body, in bytes, that is held in memory to check a gateway's signature."""
        return self._gateway_policy.max_body if self._gateway_policy else 0

    def needs_body(self, credentials: Credentials) -> bool:
        """Whether the body must be read to know who asks: not for headers that cannot be genuine anyway."""
        if self.gateway is None or not credentials.claims_gateway or self.key_owners(credentials):
            return False
        try:
            self.gateway.check_form(
                tenant=credentials.gateway_header(TENANT_HEADER),
                timestamp=credentials.gateway_header(TIMESTAMP_HEADER),
                signature=credentials.gateway_header(SIGNATURE_HEADER),
            )
        except GatewayError:
            return False
        return True

    def key_owners(self, credentials: Credentials) -> set[str]:
        """The tenants whose keys were presented; more than one is no identity."""
        owners = (self._keys.owner(key) for key in credentials.api_keys)
        return {owner for owner in owners if owner is not None}

    def identify(
        self, credentials: Credentials, line: RequestLine, body: bytes | None
    ) -> Identity | Rejection:
        """Who is asking.

        Args:
            body: the whole body where `needs_body` asked for it, else None.
        """
        owners = self.key_owners(credentials)
        if len(owners) == 1:
            return self.listed_tenant(owners.pop(), IdentifiedBy.API_KEY)
        if owners:
            return self.unknown(
                "conflicting_keys", "the request holds API keys of different tenants: send one"
            )
        if self.gateway is not None and credentials.claims_gateway:
            return self._by_gateway(credentials, line, body if body is not None else b"")
        if credentials.api_keys:
            return self.unknown("unknown_key", "the API key is not one of this server's")
        return self.unknown("no_credentials", "no API key was given: send `Authorization: Bearer KEY`")

    def listed_tenant(self, tenant: str, identified_by: IdentifiedBy) -> Identity:
        domain = TrustDomain.declared(self._snapshot.domain_of(tenant))
        return Identity(tenant, domain, identified_by, "known")

    def is_listed(self, tenant: str) -> bool:
        return tenant in self._tenants

    def listed_names(self) -> list[str]:
        return sorted(self._tenants)

    def unknown(self, reason: str, message: str) -> Identity | Rejection:
        """What the policy's rule for the unknown says."""
        if self._unknown == "reject":
            return Rejection(reason, message)
        return Identity.public(reason) if self._unknown == "public" else Identity.isolated(reason)

    def unlisted_tenant(self, tenant: str, identified_by: IdentifiedBy) -> Identity | Rejection:
        """A tenant that somebody trusted vouched for, but that the policy does not list."""
        if self._snapshot.signed_domain(tenant) is not None:
            return Identity(tenant, TrustDomain.unlisted(tenant), identified_by, "unlisted")
        return self.unknown("unlisted_tenant", f"tenant {tenant!r} is not in this server's policy")

    def _by_gateway(self, credentials: Credentials, line: RequestLine, body: bytes) -> Identity | Rejection:
        assert self.gateway is not None
        try:
            tenant = self.gateway.verify(
                method=line.method,
                target=line.target,
                tenant=credentials.gateway_header(TENANT_HEADER),
                timestamp=credentials.gateway_header(TIMESTAMP_HEADER),
                signature=credentials.gateway_header(SIGNATURE_HEADER),
                body=body,
            )
        except GatewayError as error:
            return self.unknown(error.reason, str(error))
        if self.is_listed(tenant):
            return self.listed_tenant(tenant, IdentifiedBy.GATEWAY)
        return self.unlisted_tenant(tenant, IdentifiedBy.GATEWAY)
