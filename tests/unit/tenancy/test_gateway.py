from __future__ import annotations

import hmac
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.tenancy.gateway import GatewayError, GatewayVerifier, sign

pytestmark = pytest.mark.unit

SECRET = b"gateway secret of enough bytes"
GOOD = {
    "method": "POST",
    "target": "/v1/completions?x=1",
    "tenant": "acme",
    "timestamp": "1700000000.25",
    "body": b'{"a": 1}',
}


class Clock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def verifier(clock: Clock | None = None) -> GatewayVerifier:
    return GatewayVerifier(SECRET, 30.0, clock or Clock())


def verify(who: GatewayVerifier, signature: str | None = None, **changed: object) -> str:
    return who.verify(**{"signature": signature or sign(SECRET, **GOOD), **GOOD, **changed})  # type: ignore[arg-type]


def reason(who: GatewayVerifier, signature: str | None = None, **changed: object) -> str:
    with pytest.raises(GatewayError) as caught:
        verify(who, signature, **changed)
    return caught.value.reason


def test_a_signed_header_names_its_tenant() -> None:
    assert verify(verifier()) == "acme"


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "GET"},
        {"target": "/v1/completions"},
        {"target": "/v1/completions?x=2"},
        {"tenant": "globex"},
        {"timestamp": "1700000000.26"},
        {"body": b'{"a": 2}'},
        {"body": b""},
    ],
)
def test_every_signed_part_is_covered(changed: dict[str, object]) -> None:
    assert reason(verifier(), **changed) == "bad_signature"


VECTOR = {
    "method": "POST",
    "target": "/v1/chat/completions?x=1",
    "tenant": "acme",
    "timestamp": "1700000000.25",
    "body": b'{"model": "m", "messages": []}',
}
VECTOR_SECRET = "gateway-secret-0123456789abcdef"
VECTOR_FRAME = (
    "00000006"
    "00000012766c6c6d5f6578742f676174657761792f31"
    "00000004504f5354"
    "000000182f76312f636861742f636f6d706c6574696f6e733f783d31"
    "0000000461636d65"
    "0000000d313730303030303030302e3235"
    "00000020415397cbcc853572f4346b30c38904c310453a12c48688bfa639c329e92256ef"
)
VECTOR_SIGNATURE = "v1=22c59dd390e9b7fa8acd5f3b512f7b6717465bfc0d5fce181bdd49024a3b6d5b"
DOCUMENT = (Path(__file__).parents[3] / "docs" / "tenancy.md").read_text("utf-8")


def test_the_documented_vector() -> None:
    """Gateways are written to these bytes, in other languages: they do not change within `v1`."""
    secret = VECTOR_SECRET.encode()
    assert sign(secret, **VECTOR) == VECTOR_SIGNATURE  # type: ignore[arg-type]
    mac = hmac.digest(secret, bytes.fromhex(VECTOR_FRAME), "sha256").hex()
    assert f"v1={mac}" == VECTOR_SIGNATURE
    who = GatewayVerifier(secret, 30.0, Clock())
    assert who.verify(**VECTOR, signature=VECTOR_SIGNATURE) == "acme"  # type: ignore[arg-type]


def test_the_document_shows_that_vector() -> None:
    texts = {name: value.decode() if isinstance(value, bytes) else value for name, value in VECTOR.items()}
    rows = {**texts, "secret": VECTOR_SECRET, "frame, hex": VECTOR_FRAME, "signature": VECTOR_SIGNATURE}
    for name, value in rows.items():
        assert f"| {name} | `{value}` |" in DOCUMENT


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("openssl")), reason="needs bash and openssl")
def test_the_documented_shell_script_signs_it() -> None:
    (script,) = re.findall(r"```bash\n(export LC_ALL=C.*?)```", DOCUMENT, re.DOTALL)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{VECTOR_SIGNATURE}\n"


def test_another_secret_does_not_verify() -> None:
    assert reason(verifier(), sign(SECRET[::-1], **GOOD)) == "bad_signature"  # type: ignore[arg-type]


def test_a_signature_is_accepted_once() -> None:
    who = verifier()
    verify(who)
    assert reason(who) == "replayed"


@pytest.mark.parametrize("offset", [-31.0, 31.0])
def test_outside_the_window(offset: float) -> None:
    assert reason(verifier(Clock(1_700_000_000.25 + offset))) == "outside_window"


@given(st.lists(st.tuples(st.floats(-29, 29), st.floats(0, 20)), min_size=1, max_size=20))
def test_no_signature_is_ever_accepted_twice_however_time_goes(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    who = verifier(clock)
    accepted: list[dict[str, object]] = []
    for skew, pause in steps:
        clock.now += pause
        fresh = {**GOOD, "timestamp": f"{clock.now + skew:.6f}"}
        try:
            who.verify(**fresh, signature=sign(SECRET, **fresh))  # type: ignore[arg-type]
            accepted.append(fresh)
        except GatewayError:
            replayed = fresh in accepted
            assert replayed
        for old in accepted:
            with pytest.raises(GatewayError):
                who.verify(**old, signature=sign(SECRET, **old))  # type: ignore[arg-type]


def test_a_window_that_is_widened_brings_no_used_signature_back() -> None:
    clock = Clock()
    who = verifier(clock)
    verify(who)
    clock.now += 40  # beyond the window of 30 s: the signature may be forgotten now
    other = {**GOOD, "timestamp": f"{clock.now:.3f}"}
    who.verify(**other, signature=sign(SECRET, **other))  # type: ignore[arg-type]
    who.set_window(3600)
    assert reason(who) == "outside_window"
    clock.now += 600
    fresh = {**GOOD, "timestamp": f"{clock.now - 500:.3f}"}
    assert who.verify(**fresh, signature=sign(SECRET, **fresh)) == "acme"  # type: ignore[arg-type]


def test_used_signatures_are_forgotten_when_they_are_too_old_to_replay() -> None:
    clock = Clock()
    who = verifier(clock)
    for second in range(500):
        clock.now = 1_700_000_000.0 + second
        fresh = {**GOOD, "timestamp": f"{clock.now:.3f}"}
        who.verify(**fresh, signature=sign(SECRET, **fresh))  # type: ignore[arg-type]
    assert len(who._seen) <= 2 * 30 + 2


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=80), st.binary(max_size=20))
def test_junk_headers_raise_only_gateway_errors(
    tenant: str, timestamp: str, signature: str, body: bytes
) -> None:
    with pytest.raises(GatewayError):
        verifier().verify(
            method="POST", target="/", tenant=tenant, timestamp=timestamp, signature=signature, body=body
        )


@pytest.mark.parametrize("timestamp", ["nan", "inf", "-1", "1e9", "", "१७०००००००", "9" * 400])
def test_odd_numbers_are_not_timestamps(timestamp: str) -> None:
    assert reason(verifier(), timestamp=timestamp) in ("malformed_header", "bad_signature")


def test_the_secret_is_not_shown() -> None:
    assert SECRET.decode() not in repr(verifier())
