"""References to secrets and keys: forms, resolution, and what is never repeated."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from vllm_ext.policy.references import (
    ReferenceProblem,
    parse_key_reference,
    parse_secret_reference,
    resolve_key,
    resolve_secret,
)

pytestmark = pytest.mark.unit

DIGEST = hashlib.sha256(b"some-key").hexdigest()


@pytest.mark.parametrize("text", [f"sha256:{DIGEST}", "env:MY_KEY", "file:/run/secrets/key", "file:key.txt"])
def test_key_reference_round_trip(text: str) -> None:
    assert str(parse_key_reference(text)) == text


def test_digest_is_lower_cased_and_resolves_to_itself() -> None:
    reference = parse_key_reference(f"sha256:{DIGEST.upper()}")
    assert resolve_key(reference, Path(), {}) == hashlib.sha256(b"some-key").digest()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("sha256:abc", "64 hex digits"),
        ("sha256:" + "g" * 64, "64 hex digits"),
        ("sha256:" + hashlib.sha256(b"").hexdigest(), "empty key"),
        ("sha256:" + hashlib.sha256(b"\n").hexdigest(), "empty key"),
        ("env:", "environment variable"),
        ("env:MY-KEY", "environment variable"),
        ("file:", "takes a path"),
        (DIGEST, "without a kind"),
        ({"env": "X"}, "one word"),
        (42, "expected a reference"),
        (None, "expected a reference"),
    ],
)
def test_malformed_key_reference(value: object, words: str) -> None:
    with pytest.raises(ReferenceProblem, match=words):
        parse_key_reference(value)


def test_key_in_clear_is_answered_with_its_digest_and_not_repeated() -> None:
    with pytest.raises(ReferenceProblem) as caught:
        parse_key_reference("sk-live-1234567890")
    shown = f"{caught.value.message} {caught.value.hint}"
    assert "sk-live" not in shown
    assert hashlib.sha256(b"sk-live-1234567890").hexdigest() in shown


def test_secret_in_clear_and_secret_by_digest_are_refused() -> None:
    with pytest.raises(ReferenceProblem, match="in clear") as caught:
        parse_secret_reference("hunter2hunter2hunter2")
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"
    with pytest.raises(ReferenceProblem, match="digest"):
        parse_secret_reference(f"sha256:{DIGEST}")


def test_secret_from_file_loses_one_line_break_only(tmp_path: Path) -> None:
    (tmp_path / "salt").write_bytes(b"0123456789abcdef\n\r\n")
    assert resolve_secret(parse_secret_reference("file:salt"), tmp_path, {}) == b"0123456789abcdef\n"


@pytest.mark.parametrize(
    ("reference", "environ", "words"),
    [
        ("env:UNSET", {}, "UNSET is not set"),
        ("env:SHORT", {"SHORT": "fifteen-bytes-x"}, "has 15 bytes, at least 16"),
        ("file:missing", {}, "cannot read file:missing"),
        ("file:.", {}, "cannot read"),
        ("file:huge", {}, "larger than"),
    ],
)
def test_secret_that_cannot_be_had(
    reference: str, environ: dict[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "huge").write_bytes(b"x" * 70_000)
    with pytest.raises(ReferenceProblem, match=words) as caught:
        resolve_secret(parse_secret_reference(reference), tmp_path, environ)
    assert "fifteen-bytes" not in caught.value.message


@pytest.mark.parametrize("kind", ["env", "file"])
def test_key_that_can_be_guessed(kind: str, tmp_path: Path) -> None:
    for key in ("fifteen-chars-x", "é" * 15):
        (tmp_path / "K").write_text(key + "\n", "utf-8")
        with pytest.raises(ReferenceProblem, match="has 15 characters, at least 16") as caught:
            resolve_key(parse_key_reference(f"{kind}:K"), tmp_path, {"K": key})
        assert key not in f"{caught.value.message} {caught.value.hint}"
    key = "sixteen-chars-xx"
    (tmp_path / "K").write_text(key)
    found = resolve_key(parse_key_reference(f"{kind}:K"), tmp_path, {"K": key})
    assert found == hashlib.sha256(key.encode()).digest()


@pytest.mark.parametrize(
    ("value", "words"), [("", "is empty"), ("two words", "white space"), ("a\nb", "white space")]
)
def test_key_that_no_client_could_send(value: str, words: str) -> None:
    with pytest.raises(ReferenceProblem, match=words):
        resolve_key(parse_key_reference("env:K"), Path(), {"K": value})
