"""Registered shared prefixes: text that the operator declares public to a set of trust domains.

A block whose tokens, and all tokens before it, lie inside a registered prefix holds nothing private: it is
hashed under the set's salt, so every domain in the set reuses it. From the first block that holds anything
else, the request's own salt enters the hash, and all later blocks inherit it. A prefix that ends inside a
block shares the blocks before that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_ext.tenancy.identity import DomainKind, TrustDomain
from vllm_ext.tenancy.salt import Salter


@dataclass(frozen=True, slots=True)
class RegisteredPrefix:
    """A registered prompt in tokens.

    Attributes:
        name: the policy's name for it.
        domains: declared trust domains that may share it; None for every known tenant.
        token_ids: what the model's tokenizer (or chat template) makes of it.
    """

    name: str
    domains: frozenset[str] | None
    token_ids: tuple[int, ...]

    def admits(self, domain: TrustDomain) -> bool:
        """Only tenants that somebody vouched for: never the public domain, never an isolated one."""
        if self.domains is None:
            return domain.kind in (DomainKind.DECLARED, DomainKind.UNLISTED)
        return domain.kind is DomainKind.DECLARED and domain.name in self.domains


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """The head of a request that it shares: `num_tokens` (a multiple of the block size, > 0) under `salt`."""

    name: str
    num_tokens: int
    salt: str


class SharedPrefixes:
    """Finds the longest shared head of a prompt.

    Args:
        prefixes: the registered prompts.
        salter: gives each set of domains its salt.
        block_size: tokens per hashed block; prefixes shorter than one block can never be shared.
    """

    def __init__(self, prefixes: Iterable[RegisteredPrefix], salter: Salter, block_size: int) -> None:
        self.block_size = block_size
        self._by_first_block: dict[tuple[int, ...], list[tuple[RegisteredPrefix, str]]] = {}
        for prefix in prefixes:
            if len(prefix.token_ids) >= block_size:
                salt = salter.shared_salt(prefix.domains)
                entries = self._by_first_block.setdefault(prefix.token_ids[:block_size], [])
                entries.append((prefix, salt))

    def __bool__(self) -> bool:
        return bool(self._by_first_block)

    def match(
        self, domain: TrustDomain, token_ids: Sequence[int], limit: int | None = None
    ) -> SharedRegion | None:
        """The shared head of `token_ids` for a request of `domain`, or None.

        Args:
            limit: tokens from here on are private whatever they are (where the first image or embedding
                begins).

        Several registered prefixes may fit: the one that covers most blocks wins; of equals the one
        registered first.
        """
        available = len(token_ids) if limit is None else min(limit, len(token_ids))
        if available < self.block_size:
            return None
        best: SharedRegion | None = None
        for prefix, salt in self._by_first_block.get(tuple(token_ids[: self.block_size]), ()):
            if prefix.admits(domain):
                shared = self._common_blocks(prefix.token_ids, token_ids, available) * self.block_size
                if best is None or shared > best.num_tokens:
                    best = SharedRegion(prefix.name, shared, salt)
        return best

    def _common_blocks(self, prefix: tuple[int, ...], token_ids: Sequence[int], available: int) -> int:
        """Whole equal blocks at the head. Slices are compared in C, halving: O(tokens) overall."""
        low, high = 0, min(len(prefix), available) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            start, stop = low * self.block_size, middle * self.block_size
            if prefix[start:stop] == tuple(token_ids[start:stop]):
                low = middle
            else:
                high = middle - 1
        return low
