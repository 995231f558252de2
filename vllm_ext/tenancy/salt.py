"""The cache salt: what makes two trust domains' equal prompts hash to different blocks.

vLLM mixes `cache_salt` into the hash of a request's first block and every later block inherits it through its
parent's hash (vLLM RFC #16016). Here the salt is not taken from the client but derived:

    salt = HMAC-SHA256(secret, frame(version, domain kind, domain, model identity …, client salt))

so it cannot be guessed without the secret, is the same on every replica that holds the same secret
(prefix-aware routers and shared KV tiers keep working), and a client's own `cache_salt` can only split its
domain further.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from vllm_ext.tenancy.framing import frame
from vllm_ext.tenancy.identity import TrustDomain

SALT_VERSION = "vllm_ext/salt/1"
SHARED_SALT_VERSION = "vllm_ext/shared-salt/1"
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What KV blocks depend on besides the tokens: a block of another model, revision, dtype or engine must
    never match.

    Adapters are not here: vLLM puts a request's LoRA name and path into every block's hash by itself.
    """

    model: str
    revision: str
    tokenizer: str
    tokenizer_revision: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    adapters: str
    engine_version: str


class Salter:
    """Derives salts from one secret for one model.

    Args:
        secret: at least 16 bytes.
        model: what the KV cache depends on.
    """

    __slots__ = ("_model_fields", "_secret")

    def __init__(self, secret: bytes, model: ModelIdentity) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"the salt secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed"
            )
        self._secret = secret
        self._model_fields: tuple[str, ...] = astuple(model)

    def __repr__(self) -> str:
        return "Salter(secret=***)"

    def domain_salt(self, domain: TrustDomain, client_salt: str | None = None) -> str:
        """The salt of everything private to `domain`; 64 hex digits. An empty `client_salt` is the same as
        none.
        """
        narrowed = (b"\x01", client_salt) if client_salt else (b"\x00", b"")
        return self._hmac(frame(SALT_VERSION, domain.kind.value, domain.name, *self._model_fields, *narrowed))

    def shared_salt(self, domains: Iterable[str] | None) -> str:
        """The salt of registered prefixes that are public to exactly these declared domains (None: to every
        known tenant).

        Registering a prefix for other domains changes the salt, so a domain that is taken out of the set
        loses the blocks at once.
        """
        members = ("all",) if domains is None else ("set", *sorted(set(domains)))
        return self._hmac(frame(SHARED_SALT_VERSION, *self._model_fields, frame(*members)))

    def _hmac(self, message: bytes) -> str:
        return hmac.digest(self._secret, message, "sha256").hex()
