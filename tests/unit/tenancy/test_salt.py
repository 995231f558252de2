from __future__ import annotations

import hashlib
import hmac
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.tenancy.identity import DomainKind, TrustDomain
from vllm_ext.tenancy.salt import ModelIdentity, Salter

pytestmark = pytest.mark.unit

SECRET = b"a test secret of 32 bytes length"
MODEL = ModelIdentity("org/model", "main", "org/model", "main", "bfloat16", "auto", "", "", "0.32.0")
SALTER = Salter(SECRET, MODEL)


def by_hand(*parts: bytes) -> str:
    """The documented formula, written without any of our code."""
    message = len(parts).to_bytes(4, "big") + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(SECRET, message, hashlib.sha256).hexdigest()


MODEL_FIELDS = (b"org/model", b"main", b"org/model", b"main", b"bfloat16", b"auto", b"", b"", b"0.32.0")


def test_salt_follows_the_documented_formula() -> None:
    expected = by_hand(b"vllm_ext/salt/1", b"declared", b"acme", *MODEL_FIELDS, b"\x01", b"mine")
    assert SALTER.domain_salt(TrustDomain.declared("acme"), "mine") == expected


@pytest.mark.parametrize(
    ("domain", "client_salt", "salt"),
    [
        (
            TrustDomain.declared("acme"),
            None,
            "518411602d1eec0dde14f6cf73deb5caa8f208ef9cc0cbf8070aee1a34215cf6",
        ),
        (
            TrustDomain.declared("acme"),
            "s",
            "ee804cbfe1e311ad4c41057ba287a0533917096392c94591e672cc4ace5f41f3",
        ),
        (
            TrustDomain.unlisted("acme"),
            None,
            "f5fc25b5479212b989f5e927511f58d4510e519c8473ccf8c7c741a61f517eb8",
        ),
        (TrustDomain.public(), None, "506fd20bff110162592337b1130483a594f78f764aecf3e0a75ce78d0b0ef0b3"),
    ],
)
def test_fixed_vectors(domain: TrustDomain, client_salt: str | None, salt: str) -> None:
    """If one of these changes, every replica and every KV tier out there loses its cache: raise SALT_VERSION
    and say so.
    """
    assert SALTER.domain_salt(domain, client_salt) == salt


def test_fixed_vectors_of_shared_sets() -> None:
    assert (
        SALTER.shared_salt(["b", "a", "a"])
        == SALTER.shared_salt(["a", "b"])
        == "126a18a163140caa45b3f05af63e12c9c84b2c96dd0f3401b0aab32fe58aacb9"
    )
    assert SALTER.shared_salt(None) == "3dbabbe9cf3f34105f0eb8426fa10224a6e4265b52d72697b46cca56eee523f9"


@pytest.mark.parametrize("field", [field.name for field in fields(ModelIdentity)])
def test_every_part_of_the_model_identity_changes_the_salt(field: str) -> None:
    other = Salter(SECRET, replace(MODEL, **{field: "other"}))
    domain = TrustDomain.declared("acme")
    assert other.domain_salt(domain) != SALTER.domain_salt(domain)
    assert other.shared_salt(["acme"]) != SALTER.shared_salt(["acme"])


def test_another_secret_gives_other_salts() -> None:
    assert Salter(SECRET[::-1], MODEL).domain_salt(TrustDomain.declared("a")) != SALTER.domain_salt(
        TrustDomain.declared("a")
    )


domains = st.builds(TrustDomain, st.sampled_from(DomainKind), st.text(max_size=12))
client_salts = st.one_of(st.none(), st.text(min_size=1, max_size=12))


@given(domains, client_salts, domains, client_salts)
def test_salts_are_equal_only_for_the_same_domain_and_client_salt(
    left: TrustDomain, left_salt: str | None, right: TrustDomain, right_salt: str | None
) -> None:
    same = (left, left_salt) == (right, right_salt)
    assert (SALTER.domain_salt(left, left_salt) == SALTER.domain_salt(right, right_salt)) == same


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_client_who_sends_a_derived_salt_does_not_get_it(name: str, victim: str) -> None:
    victim_salt = SALTER.domain_salt(TrustDomain.declared(victim))
    for domain in (TrustDomain.declared(name), TrustDomain.public(), TrustDomain.isolated()):
        assert SALTER.domain_salt(domain, victim_salt) != victim_salt


def test_a_shared_set_never_meets_a_private_domain() -> None:
    private = {SALTER.domain_salt(TrustDomain(kind, "all")) for kind in DomainKind}
    assert SALTER.shared_salt(None) not in private
    assert SALTER.shared_salt(["all"]) != SALTER.shared_salt(None)


def test_empty_client_salt_is_none() -> None:
    assert SALTER.domain_salt(TrustDomain.public(), "") == SALTER.domain_salt(TrustDomain.public(), None)


def test_short_secret_is_refused_and_secrets_are_not_shown() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Salter(b"short", MODEL)
    assert SECRET.decode() not in repr(SALTER)
