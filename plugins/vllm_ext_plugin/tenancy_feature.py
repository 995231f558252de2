"""The engine's half of tenancy: whatever front end a request came through, its blocks are salted here."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext.tenancy.authenticator import Authenticator
from vllm_ext.tenancy.engine_side import EngineTenancy, Ruling
from vllm_ext.tenancy.identity import Identity
from vllm_ext.tenancy.salt import Salter
from vllm_ext.tenancy.shared_prefix import SharedPrefixes
from vllm_ext.tenancy.stamp import STAMP_KEY, Stamper
from vllm_ext_plugin import block_hashes
from vllm_ext_plugin.engine_config import salt_secret
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.model_identity import model_identity
from vllm_ext_plugin.shared_prefixes import registered_prefixes

IDENTITY = "_vllm_ext_identity"

logger = logging.getLogger("vllm_ext")


class TenancyFeature:
    """Enforces salts in one engine.

    Args:
        config: vLLM's configuration.
        store: the engine process' own copy of the policy; it must have a `tenancy` section.
        hash_block_size: tokens per hashed block.
        faults: counts our own exceptions.
    """

    def __init__(self, config: Any, store: PolicyStore, hash_block_size: int, faults: Faults) -> None:
        self._config = config
        self._block_size = hash_block_size
        self._faults = faults
        self._prepared: tuple[PolicySnapshot, EngineTenancy] | None = None
        self._secret = salt_secret(store.current)
        self.ruler = self._build(store.current)
        block_hashes.install()
        store.validators.append(self._prepare)
        store.on_swap.append(self._swapped)

    def enforce(self, request: Any) -> Ruling:
        """Salt the request's blocks. Never raises: if our code fails, the request gets a domain of its
        own.
        """
        try:
            return self._enforce(request)
        except Exception:
            self._faults.caught("salting")
        ruling = self.ruler.rule_closed()
        request.__dict__[IDENTITY] = ruling.identity
        request.__dict__.pop(block_hashes.SPLIT, None)
        request.__dict__.pop(block_hashes.SHARED_NAME, None)
        request.cache_salt = ruling.salt
        request.block_hashes.clear()
        try:
            request.update_block_hashes()
        except Exception:
            # Not even hashing works: the request runs without a hash, so nothing of it can be found by
            # anyone.
            self._faults.caught("hashing")
            request.block_hashes.clear()
            request._block_hasher = None
        return ruling

    def _enforce(self, request: Any) -> Ruling:
        params = request.sampling_params or request.pooling_params
        extra = getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None) or {}
        ruling = self.ruler.rule(
            extra.get(STAMP_KEY),
            request.request_id,
            request.cache_salt,
            None if request.prompt_embeds is not None else request.prompt_token_ids,
            min((feature.mm_position.offset for feature in request.mm_features), default=None),
        )
        changed = request.cache_salt != ruling.first_salt or bool(request.mm_features)
        request.cache_salt = ruling.first_salt
        request.__dict__[IDENTITY] = ruling.identity
        if ruling.shared is not None:
            request.__dict__[block_hashes.SHARED_NAME] = ruling.shared.name
            request.__dict__[block_hashes.SPLIT] = block_hashes.Split(ruling.shared.num_tokens, ruling.salt)
            changed = True
        if request.mm_features:
            # vLLM shares encoder outputs by this identifier across all requests: make it the domain's own.
            request.mm_features = [
                dataclasses.replace(feature, identifier=f"{ruling.salt[:32]}:{feature.identifier}")
                for feature in request.mm_features
            ]
        if changed:
            request.block_hashes.clear()
            request.update_block_hashes()
        return ruling

    def continues(self, session: Any, update: Any) -> bool:
        """Whether a streaming session's next input comes from whom the session belongs to."""
        before, now = identity_of(session), identity_of(update)
        if before is not None and now is not None and before.domain == now.domain:
            return True
        self.ruler.stamp_failures["other_session"] += 1
        return False

    def totals(self) -> dict[str, list[tuple[list[str], float]]]:
        """Running totals for the front end's Prometheus counters."""
        return {
            "decisions": [([*labels], float(count)) for labels, count in self.ruler.decisions.items()],
            "stamp_failures": [
                ([reason], float(count)) for reason, count in self.ruler.stamp_failures.items()
            ],
        }

    def _build(self, snapshot: PolicySnapshot) -> EngineTenancy:
        tenancy = snapshot.policy.tenancy
        assert tenancy is not None
        salter = Salter(self._secret, model_identity(self._config, tenancy.model_id))
        prefixes = registered_prefixes(snapshot, self._config.model_config, self._block_size)
        return EngineTenancy(
            Stamper(self._secret),
            salter,
            Authenticator(snapshot),
            SharedPrefixes(prefixes, salter, self._block_size),
        )

    def _prepare(self, snapshot: PolicySnapshot) -> None:
        """Before a swap: whatever can fail for the new policy fails here, while the old one stays in
        force.
        """
        self._prepared = (snapshot, self._build(snapshot))

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        prepared, self._prepared = self._prepared, None
        built = prepared[1] if prepared and prepared[0] is new else self._build(new)
        built.decisions, built.stamp_failures = self.ruler.decisions, self.ruler.stamp_failures
        self.ruler = built


def identity_of(request: Any) -> Identity | None:
    """The identity that the engine believes of a vLLM `Request` (None before it was added)."""
    return request.__dict__.get(IDENTITY)
