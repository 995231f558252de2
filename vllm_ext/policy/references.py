"""References to secrets and keys. A policy names where a secret is; it never contains one.

``env:NAME`` and ``file:PATH`` name a place, ``sha256:<64 hex>`` is the digest of an API key. The value behind
a reference is read once, at load, and lives only in the snapshot.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MIN_SECRET_BYTES = 16
MIN_KEY_CHARACTERS = 16
MAX_SECRET_BYTES = 64 * 1024
KEY_PATTERN = r"^(sha256:[0-9a-fA-F]{64}|env:[A-Za-z_][A-Za-z0-9_]*|file:.+)$"
SECRET_PATTERN = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:.+)$"

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
# `printf '' | sha256sum` and `echo | sha256sum`: the digests people paste when their key variable was empty.
_EMPTY_DIGESTS = {hashlib.sha256(empty).hexdigest() for empty in (b"", b"\n")}


class ReferenceProblem(ValueError):
    """A reference that is malformed or leads nowhere. Says what and how to mend it, never the value."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a secret or a key is found: a variable's name, a path, or a key's digest (lower-case hex)."""

    kind: Literal["sha256", "env", "file"]
    value: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    def __repr__(self) -> str:
        return f"Reference({self.short()!r})"

    def short(self) -> str:
        """As written, with a digest cut to eight digits: enough to find the line by."""
        return f"sha256:{self.value[:8]}…" if self.kind == "sha256" else str(self)

    def path(self, base_dir: Path) -> Path | None:
        """The file behind a ``file:`` reference; a relative path starts at the policy file's folder."""
        return base_dir / self.value if self.kind == "file" else None


def parse_key_reference(value: object) -> Reference:
    """``sha256:``, ``env:`` or ``file:``. Raises ReferenceProblem."""
    reference = _parse(value, what="API key")
    if reference is not None:
        return reference
    assert isinstance(value, str)
    if len(value) == 64 and _HEX.fullmatch(value):
        raise ReferenceProblem(
            "64 hex digits without a kind",
            "if this is the key's digest, write sha256: before it; never a key in clear",
        )
    raise ReferenceProblem(
        "an API key must not stand in the policy in clear",
        f"replace it by its digest: {key_digest_line(value)}",
    )


def parse_secret_reference(value: object) -> Reference:
    """``env:`` or ``file:``. Raises ReferenceProblem."""
    reference = _parse(value, what="secret")
    if reference is None:
        raise ReferenceProblem(
            "a secret must not stand in the policy in clear",
            "put it in an environment variable and write env:NAME, or in a file and write file:PATH",
        )
    if reference.kind == "sha256":
        raise ReferenceProblem(
            "a secret cannot be given by its digest, the server needs the value",
            "write env:NAME or file:PATH",
        )
    return reference


def _parse(value: object, *, what: str) -> Reference | None:
    """None when the text is no reference at all, hence probably the thing itself."""
    if isinstance(value, Reference):
        return value
    if not isinstance(value, str):
        if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in ("sha256", "env", "file"):
            raise ReferenceProblem(
                "a reference is one word", f"no space after the colon: {next(iter(value))}:…"
            )
        forms = "env:NAME or file:PATH" if what == "secret" else "sha256:DIGEST, env:NAME or file:PATH"
        raise ReferenceProblem(f"expected a reference to the {what}", f"write {forms}")
    kind, colon, rest = value.partition(":")
    if not colon:
        return None
    match kind:
        case "sha256":
            if len(rest) != 64 or not _HEX.fullmatch(rest):
                raise ReferenceProblem(
                    f"sha256: takes 64 hex digits, here are {len(rest)} characters",
                    "`vllm-ext policy digest` prints the line to paste",
                )
            if rest.lower() in _EMPTY_DIGESTS:
                raise ReferenceProblem(
                    "this is the digest of an empty key", "digest the key itself: `vllm-ext policy digest`"
                )
            return Reference("sha256", rest.lower())
        case "env":
            if not _ENV_NAME.fullmatch(rest):
                raise ReferenceProblem(
                    "env: takes the name of an environment variable",
                    "letters, digits and _, as in env:MY_SECRET",
                )
            return Reference("env", rest)
        case "file":
            if not rest.strip() or "\0" in rest:
                raise ReferenceProblem("file: takes a path", "as in file:/run/secrets/salt")
            return Reference("file", rest)
    return None


def key_digest(key: bytes) -> bytes:
    """The 32 bytes by which an API key is known: SHA-256 of the key as sent by the client."""
    return hashlib.sha256(key).digest()


def key_digest_line(key: str) -> str:
    """The ``sha256:…`` line for a policy file."""
    return f"sha256:{key_digest(key.encode('utf-8', 'surrogatepass')).hex()}"


def resolve_secret(reference: Reference, base_dir: Path, environ: Mapping[str, str]) -> bytes:
    """The secret's bytes, a single trailing line break removed. Raises ReferenceProblem."""
    value = _read(reference, base_dir, environ)
    if len(value) < MIN_SECRET_BYTES:
        raise ReferenceProblem(
            f"the secret in {reference} has {len(value)} bytes, at least {MIN_SECRET_BYTES} are needed",
            "make one with: openssl rand -hex 32",
        )
    return value


def resolve_key(reference: Reference, base_dir: Path, environ: Mapping[str, str]) -> bytes:
    """The key's digest (32 bytes). Raises ReferenceProblem.

    A key that can be seen must be long enough; of one that is given by its digest nobody can tell.
    """
    if reference.kind == "sha256":
        return bytes.fromhex(reference.value)
    key = checked_key(_read(reference, base_dir, environ), str(reference))
    length = len(key.decode("utf-8", "replace"))
    if length < MIN_KEY_CHARACTERS:
        raise ReferenceProblem(
            f"the API key in {reference} has {length} characters, at least {MIN_KEY_CHARACTERS} are needed",
            "make one with: openssl rand -hex 32",
        )
    return key_digest(key)


def checked_key(key: bytes, source: str) -> bytes:
    """The key, if a client could send it in a header. Raises ReferenceProblem, naming ``source`` only."""
    if not key:
        raise ReferenceProblem(
            f"the API key in {source} is empty", "put the key there, or remove the reference"
        )
    if any(byte <= 0x20 or byte == 0x7F for byte in key):
        raise ReferenceProblem(
            f"the API key in {source} contains white space or control characters",
            "one key, on one line, nothing else",
        )
    return key


def strip_line_break(value: bytes) -> bytes:
    """Editors and ``echo`` end a line; the line break is not part of a secret."""
    return value.removesuffix(b"\n").removesuffix(b"\r")


def _read(reference: Reference, base_dir: Path, environ: Mapping[str, str]) -> bytes:
    if reference.kind == "env":
        text = environ.get(reference.value)
        if text is None:
            raise ReferenceProblem(
                f"environment variable {reference.value} is not set", "set it before the server starts"
            )
        return strip_line_break(os.fsencode(text))
    try:
        with (base_dir / reference.value).open("rb") as file:
            value = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ReferenceProblem(
            f"cannot read {reference}: {error.strerror or type(error).__name__}",
            "the path is relative to the policy file; the server's user must be allowed to read it",
        ) from None
    if len(value) > MAX_SECRET_BYTES:
        raise ReferenceProblem(
            f"{reference} is larger than {MAX_SECRET_BYTES} bytes", "name a file with only the secret"
        )
    return strip_line_break(value)
