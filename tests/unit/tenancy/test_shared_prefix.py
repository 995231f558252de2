from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.tenancy.identity import TrustDomain
from vllm_ext.tenancy.salt import ModelIdentity, Salter
from vllm_ext.tenancy.shared_prefix import RegisteredPrefix, SharedPrefixes

pytestmark = pytest.mark.unit

SALTER = Salter(b"0123456789abcdef", ModelIdentity("m", "", "m", "", "bf16", "auto", "", "", "0.32"))
ACME, GLOBEX = TrustDomain.declared("acme"), TrustDomain.declared("globex")
tokens = st.lists(st.integers(0, 2), max_size=24)


def prefixes(*registered: RegisteredPrefix, block_size: int = 4) -> SharedPrefixes:
    return SharedPrefixes(registered, SALTER, block_size)


def common(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(st.lists(tokens, max_size=4), tokens, st.integers(1, 5), st.one_of(st.none(), st.integers(0, 24)))
def test_the_shared_head_is_the_longest_run_of_whole_registered_blocks(
    registered: list[list[int]], prompt: list[int], block_size: int, limit: int | None
) -> None:
    shared = prefixes(
        *(RegisteredPrefix(str(i), frozenset({"acme"}), tuple(ids)) for i, ids in enumerate(registered)),
        block_size=block_size,
    )
    longest = max(
        (min(common(ids, prompt), len(prompt) if limit is None else limit) for ids in registered), default=0
    )
    region = shared.match(ACME, prompt, limit)
    assert (region.num_tokens if region else 0) == longest // block_size * block_size


def test_a_prefix_that_ends_inside_a_block_shares_the_blocks_before() -> None:
    shared = prefixes(RegisteredPrefix("p", None, tuple(range(10))))
    region = shared.match(ACME, [*range(10), 77, 78, 79])
    assert region is not None and region.num_tokens == 8


def test_only_the_listed_domains_share() -> None:
    shared = prefixes(RegisteredPrefix("p", frozenset({"acme"}), tuple(range(8))))
    prompt = list(range(8))
    assert shared.match(ACME, prompt) is not None
    for other in (GLOBEX, TrustDomain.unlisted("acme"), TrustDomain.public(), TrustDomain.isolated()):
        assert shared.match(other, prompt) is None


def test_all_means_every_tenant_somebody_vouched_for() -> None:
    shared = prefixes(RegisteredPrefix("p", None, tuple(range(8))))
    prompt = list(range(8))
    assert shared.match(ACME, prompt) == shared.match(TrustDomain.unlisted("x"), prompt) is not None
    assert shared.match(TrustDomain.public(), prompt) is None
    assert shared.match(TrustDomain.isolated(), prompt) is None


def test_a_set_that_changes_changes_its_salt() -> None:
    prompt = tuple(range(8))
    before = prefixes(RegisteredPrefix("p", frozenset({"acme", "globex"}), prompt)).match(ACME, prompt)
    after = prefixes(RegisteredPrefix("p", frozenset({"acme"}), prompt)).match(ACME, prompt)
    assert before is not None and after is not None and before.salt != after.salt


def test_too_short_prefixes_share_nothing() -> None:
    assert not prefixes(RegisteredPrefix("p", None, (1, 2, 3)))
