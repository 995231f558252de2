"""What the engine does with a request's stamp: verify it, and decide the salts of its blocks.

The front end is not trusted to be the only way in (gRPC, batch, another front end): whatever reaches the
scheduler without a genuine stamp falls to the policy's rule for the unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.identity import Identity, Rejection
from vllm_ext.tenancy.salt import Salter
from vllm_ext.tenancy.shared_prefix import SharedPrefixes, SharedRegion
from vllm_ext.tenancy.stamp import ISOLATE, Stamper, StampError


@dataclass(frozen=True, slots=True)
class Ruling:
    """How the blocks of one request are salted.

    Attributes:
        identity: who is asking, as the engine believes it.
        salt: salt of everything private.
        shared: the head that is salted otherwise, if any.
        rejected: the request must not run (policy `unknown: reject`, and no genuine stamp).
    """

    identity: Identity
    salt: str
    shared: SharedRegion | None
    rejected: Rejection | None = None

    @property
    def first_salt(self) -> str:
        """The salt of block 0."""
        return self.shared.salt if self.shared else self.salt


class EngineTenancy:
    """Verifies stamps and rules on salts in the engine process. `rule` may raise; its caller then uses
    `rule_closed`.
    """

    def __init__(
        self, stamper: Stamper, salter: Salter, authenticator: Authenticator, shared: SharedPrefixes
    ) -> None:
        self._stamper = stamper
        self._salter = salter
        self.authenticator = authenticator
        self.shared_prefixes = shared
        self.stamp_failures: Counter[str] = Counter()
        self.decisions: Counter[tuple[str, str]] = Counter()

    def rule(
        self,
        stamp: object,
        request_id: str,
        client_salt: str | None,
        token_ids: Sequence[int] | None,
        private_from: int | None = None,
    ) -> Ruling:
        """Rule on one request.

        Args:
            stamp: what the request carries under `STAMP_KEY`, of any type; None if nothing.
            client_salt: the request's own salt field, used only where no genuine stamp says what the client's
                salt was. token_ids: the prompt, or None where it has embeddings instead (nothing is shared
                then). private_from: position of the first token that is private whatever it is.
        """
        identity, client_salt = self._believe(stamp, request_id, client_salt)
        rejected = None
        if isinstance(identity, Rejection):
            rejected, identity = identity, Identity.isolated(identity.reason)
        shared = (
            self.shared_prefixes.match(identity.domain, token_ids, private_from)
            if token_ids is not None
            else None
        )
        decision = "rejected" if rejected else ("shared_prefix" if shared else identity.domain.kind.value)
        self.decisions[decision, identity.reason] += 1
        return Ruling(identity, self._salter.domain_salt(identity.domain, client_salt), shared, rejected)

    def rule_closed(self) -> Ruling:
        """The ruling when ours has crashed: a random salt, that needs none of the code that may be broken."""
        self.decisions["isolated", "internal_error"] += 1
        identity = Identity.isolated("internal_error")
        return Ruling(identity, identity.domain.name, None)

    def _believe(
        self, stamp: object, request_id: str, client_salt: str | None
    ) -> tuple[Identity | Rejection, str | None]:
        if stamp == ISOLATE:
            return Identity.isolated("front_end_error"), None
        try:
            if stamp is None:
                raise StampError("missing")
            stamped = self._stamper.verify(stamp, request_id)
        except StampError as error:
            self.stamp_failures[error.reason] += 1
            message = "the request reached the engine without this server's own stamp"
            return self.authenticator.unknown(f"stamp_{error.reason}", message), client_salt
        return stamped.identity, stamped.client_salt
