from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.tenancy.framing import frame
from vllm_ext.tenancy.identity import IdentifiedBy, Identity, TrustDomain
from vllm_ext.tenancy.stamp import Stamper, StampError

pytestmark = pytest.mark.unit

SECRET = b"0123456789abcdef0123456789abcdef"
STAMPER = Stamper(SECRET)
ACME = Identity("acme", TrustDomain.declared("acme"), IdentifiedBy.API_KEY, "known")


@given(st.text(max_size=20), st.text(max_size=20), st.one_of(st.none(), st.text(min_size=1, max_size=20)))
def test_a_stamp_brings_back_what_was_stamped(tenant: str, request_id: str, client_salt: str | None) -> None:
    identity = Identity(tenant, TrustDomain.unlisted(tenant), IdentifiedBy.GATEWAY, "unlisted")
    stamped = STAMPER.verify(STAMPER.stamp(identity, client_salt, request_id), request_id)
    assert (stamped.identity, stamped.client_salt) == (identity, client_salt)


def reason(stamp: object, request_id: str = "r1", stamper: Stamper = STAMPER) -> str:
    with pytest.raises(StampError) as caught:
        stamper.verify(stamp, request_id)
    return caught.value.reason


def test_a_stamp_is_good_for_its_own_request_only() -> None:
    assert reason(STAMPER.stamp(ACME, None, "r1"), "r2") == "bad_mac"


def test_a_stamp_of_another_server_is_refused() -> None:
    assert reason(Stamper(SECRET[::-1]).stamp(ACME, None, "r1")) == "bad_mac"


@given(st.data())
def test_no_altered_stamp_is_believed(data: st.DataObject) -> None:
    stamp = STAMPER.stamp(ACME, None, "r1")
    at = data.draw(st.integers(0, len(stamp) - 1))
    letter = data.draw(st.characters(max_codepoint=0x2FF).filter(lambda c: c.lower() != stamp[at].lower()))
    assert reason(stamp[:at] + letter + stamp[at + 1 :]) in ("bad_mac", "malformed")


@given(
    st.one_of(
        st.none(), st.integers(), st.booleans(), st.lists(st.integers()), st.text(), st.binary(), st.floats()
    )
)
def test_anything_else_is_refused_and_nothing_crashes(junk: object) -> None:
    assert reason(junk) in ("malformed", "bad_mac")


def test_a_stamp_has_one_spelling() -> None:
    payload, mac = STAMPER.stamp(ACME, None, "r1").split(".")
    assert payload.endswith("=="), "the last letter has bits to spare, or this test says nothing"
    assert reason(f"{payload[:-3]}{chr(ord(payload[-3]) + 1)}==.{mac}") == "malformed"


def test_very_long_stamps_are_not_decoded() -> None:
    assert reason("A" * 1_000_000 + ".00") == "malformed"


def test_a_genuine_mac_over_another_format_is_another_version() -> None:
    payload = frame("vllm_ext/stamp/2", "acme")
    stamp = f"{base64.urlsafe_b64encode(payload).decode()}.{STAMPER._mac(payload, 'r1').hex()}"
    assert reason(stamp) == "other_version"
