from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.policy import parse_policy
from vllm_ext.tenancy.authenticator import AdminKeys, Authenticator, Credentials, KeyIndex, RequestLine
from vllm_ext.tenancy.engine_side import EngineTenancy
from vllm_ext.tenancy.gateway import SIGNATURE_HEADER, TENANT_HEADER, TIMESTAMP_HEADER, GatewayVerifier, sign
from vllm_ext.tenancy.identity import DomainKind, IdentifiedBy, Identity, Rejection, TrustDomain
from vllm_ext.tenancy.salt import ModelIdentity, Salter
from vllm_ext.tenancy.shared_prefix import RegisteredPrefix, SharedPrefixes
from vllm_ext.tenancy.stamp import ISOLATE, Stamper

pytestmark = pytest.mark.unit

LINE = RequestLine("POST", "/v1/completions")
SECRET = b"0123456789abcdef0123456789abcdef"


def sha(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def authenticator(unknown: str = "isolate", unlisted: str = "own_domain") -> Authenticator:
    tenancy = {
        "unknown": unknown,
        "tenants": {
            "acme": {"api_keys": [sha("acme-key")]},
            "acme-eu": {"domain": "acme", "api_keys": [sha("eu-key")]},
        },
        "gateway": {"secret": "env:GW", "unlisted_tenants": unlisted},
    }
    policy = {"version": 1, "tenancy": tenancy, "admin": {"api_keys": [sha("admin-key")]}}
    snapshot = parse_policy(json.dumps(policy), environ={"GW": SECRET.decode()})
    return Authenticator(snapshot, GatewayVerifier(SECRET, 30.0, clock=lambda: 1000.0))


def bearer(key: str) -> Credentials:
    return Credentials([(b"authorization", f"Bearer {key}".encode())])


def by_gateway(tenant: str) -> Credentials:
    signature = sign(
        SECRET, method=LINE.method, target=LINE.target, tenant=tenant, timestamp="1000", body=b""
    )
    pairs = [(TENANT_HEADER, tenant), (TIMESTAMP_HEADER, "1000"), (SIGNATURE_HEADER, signature)]
    return Credentials((name.encode(), value.encode()) for name, value in pairs)


def identity(who: Authenticator, credentials: Credentials) -> Identity:
    found = who.identify(credentials, LINE, b"")
    assert isinstance(found, Identity)
    return found


def test_key_then_gateway_then_the_rule() -> None:
    who = authenticator()
    assert identity(who, bearer("acme-key")).tenant == "acme"
    assert identity(who, bearer("eu-key")).domain == TrustDomain.declared("acme")
    signed = identity(who, by_gateway("acme"))
    assert (signed.tenant, signed.identified_by) == ("acme", IdentifiedBy.GATEWAY)
    assert identity(who, bearer("other")).domain.kind is DomainKind.ISOLATED
    assert identity(who, Credentials([])).reason == "no_credentials"


def test_the_bearer_token_may_be_vllms_own() -> None:
    both = Credentials([(b"authorization", b"Bearer vllm-own-key"), (b"x-api-key", b"acme-key")])
    assert identity(authenticator("reject"), both).tenant == "acme"
    admin = Credentials([(b"authorization", b"Bearer vllm-own-key"), (b"x-api-key", b"admin-key")])
    assert AdminKeys([hashlib.sha256(b"admin-key").digest()]).hold(admin)


def test_keys_of_two_tenants_are_no_identity() -> None:
    both = Credentials([(b"authorization", b"Bearer acme-key"), (b"x-api-key", b"eu-key")])
    found = authenticator("reject").identify(both, LINE, b"")
    assert isinstance(found, Rejection) and found.reason == "conflicting_keys"


def test_every_isolated_identity_has_a_domain_of_its_own() -> None:
    who = authenticator()
    assert len({identity(who, Credentials([])).domain for _ in range(100)}) == 100


def test_an_unlisted_tenant_never_meets_a_listed_domain_of_the_same_name() -> None:
    policy = {
        "version": 1,
        "tenancy": {
            "tenants": {"t": {"domain": "shop", "api_keys": [sha("k")]}},
            "gateway": {"secret": "env:GW"},
        },
    }
    snapshot = parse_policy(json.dumps(policy), environ={"GW": SECRET.decode()})
    who = Authenticator(snapshot, GatewayVerifier(SECRET, 30.0, clock=lambda: 1000.0))
    salter = Salter(SECRET, ModelIdentity("m", "", "m", "", "", "", "", "", ""))
    listed, unlisted = identity(who, bearer("k")), identity(who, by_gateway("shop"))
    assert listed.domain == TrustDomain.declared("shop") and unlisted.domain == TrustDomain.unlisted("shop")
    assert salter.domain_salt(listed.domain) != salter.domain_salt(unlisted.domain)


def test_unlisted_tenants_may_be_unknown() -> None:
    found = authenticator("reject", "unknown").identify(by_gateway("newcomer"), LINE, b"")
    assert isinstance(found, Rejection) and found.reason == "unlisted_tenant"
    assert identity(authenticator("reject"), by_gateway("newcomer")).domain == TrustDomain.unlisted(
        "newcomer"
    )


def test_admins_are_not_tenants() -> None:
    who = authenticator()
    admins = AdminKeys([hashlib.sha256(b"admin-key").digest()])
    assert admins.exist and admins.hold(bearer("admin-key")) and not admins.hold(bearer("acme-key"))
    assert not AdminKeys([]).exist and not AdminKeys([]).hold(bearer("admin-key"))
    assert identity(who, bearer("admin-key")).tenant == "(unknown)"


@given(
    st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=60)), max_size=6), st.binary(max_size=20)
)
def test_arbitrary_headers_never_raise_and_never_become_a_tenant(
    headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    found = authenticator().identify(Credentials(headers), LINE, body)
    assert isinstance(found, Identity) and found.domain.kind is DomainKind.ISOLATED


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=4), max_size=5), st.text(max_size=8))
def test_key_index_finds_exactly_its_keys(keys: dict[str, str], probe: str) -> None:
    digests = {hashlib.sha256(key.encode()).digest(): owner for key, owner in keys.items()}
    assert KeyIndex(digests).owner(probe) == keys.get(probe)


def engine(unknown: str = "isolate") -> EngineTenancy:
    salter = Salter(SECRET, ModelIdentity("m", "", "m", "", "", "", "", "", ""))
    shared = SharedPrefixes([RegisteredPrefix("p", None, tuple(range(8)))], salter, 4)
    return EngineTenancy(Stamper(SECRET), salter, authenticator(unknown), shared)


ACME = Identity("acme", TrustDomain.declared("acme"), IdentifiedBy.API_KEY, "known")
STAMP = Stamper(SECRET).stamp(ACME, "mine", "r1")


def test_a_stamped_request_gets_its_domains_salt() -> None:
    ruling = engine().rule(STAMP, "r1", "ignored", [9] * 8)
    salter = Salter(SECRET, ModelIdentity("m", "", "m", "", "", "", "", "", ""))
    assert ruling.identity == ACME and ruling.salt == ruling.first_salt == salter.domain_salt(
        ACME.domain, "mine"
    )
    assert ruling.shared is None and ruling.rejected is None


def test_the_shared_head_goes_by_the_sets_salt_and_images_end_it() -> None:
    ruling = engine().rule(STAMP, "r1", None, [*range(8), 9])
    assert ruling.shared is not None and ruling.shared.num_tokens == 8 and ruling.first_salt != ruling.salt
    before_image = engine().rule(STAMP, "r1", None, [*range(8), 9], private_from=6)
    assert before_image.shared is not None and before_image.shared.num_tokens == 4
    assert engine().rule(STAMP, "r1", None, None).shared is None


@pytest.mark.parametrize(
    ("stamp", "reason"),
    [
        (None, "stamp_missing"),
        ("x.y", "stamp_malformed"),
        (STAMP.replace(".", ".0"), "stamp_malformed"),
        (5, "stamp_malformed"),
    ],
)
@pytest.mark.parametrize("unknown", ["isolate", "public", "reject"])
def test_without_a_genuine_stamp_the_rule_for_the_unknown_decides(
    stamp: Any, reason: str, unknown: str
) -> None:
    ruling = engine(unknown).rule(stamp, "r1", None, [*range(8)])
    assert ruling.identity.reason == reason
    assert ruling.identity.domain.kind is (DomainKind.PUBLIC if unknown == "public" else DomainKind.ISOLATED)
    assert (ruling.rejected is not None) == (unknown == "reject")
    assert ruling.shared is None


def test_anybody_may_ask_to_be_isolated_whatever_the_rule() -> None:
    for unknown in ("isolate", "public", "reject"):
        ruling = engine(unknown).rule(ISOLATE, "r1", None, [1])
        assert ruling.identity.domain.kind is DomainKind.ISOLATED


def test_closed_rulings_are_random_and_counted() -> None:
    tenancy = engine()
    assert len({tenancy.rule_closed().salt for _ in range(50)}) == 50
    assert tenancy.decisions["isolated", "internal_error"] == 50
