"""From a policy file to a snapshot, or to all that is wrong with it at once."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path as FilePath
from types import MappingProxyType

from pydantic import ValidationError

from vllm_ext.policy.checks import MAX_TEXT_BYTES, Findings, check
from vllm_ext.policy.excerpt import with_excerpt
from vllm_ext.policy.problems import PolicyError, PolicyProblem
from vllm_ext.policy.schema import Policy
from vllm_ext.policy.snapshot import PolicySnapshot
from vllm_ext.policy.translate import translate
from vllm_ext.policy.yaml_source import YamlDocument, read_yaml

DEFAULT_SOURCE = "built-in default policy"
_FINGERPRINT_KEY = secrets.token_bytes(32)


def load_policy(path: str | os.PathLike[str], *, resolve_secrets: bool = True) -> PolicySnapshot:
    """Read a policy file and everything it refers to.

    ``resolve_secrets=False`` checks references for form only, for machines that do not have the secrets.
    Raises PolicyError with every problem.
    """
    file = FilePath(path)
    return parse_policy(
        read_policy_text(file), source=str(path), base_dir=file.parent, resolve_secrets=resolve_secrets
    )


def read_policy_text(file: FilePath) -> str:
    """The file's text. Raises PolicyError."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise _whole_file(
            file, "there is no such file", "check the path; a relative one starts at the current folder"
        ) from None
    except IsADirectoryError:
        raise _whole_file(file, "this is a folder", "name the policy file in it") from None
    except (OSError, ValueError) as error:
        raise _whole_file(
            file, f"cannot be read: {getattr(error, 'strerror', None) or 'not a path'}"
        ) from None
    if len(data) > MAX_TEXT_BYTES:
        raise _whole_file(
            file, f"larger than {MAX_TEXT_BYTES} bytes", "put long shared prefixes in files of their own"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        problem = PolicyProblem(line, column, "", "the file is not UTF-8", "save it as UTF-8")
        raise PolicyError(str(file), [problem]) from None


def parse_policy(
    text: str,
    *,
    source: str = "policy",
    base_dir: str | os.PathLike[str] = ".",
    resolve_secrets: bool = True,
    environ: Mapping[str, str] | None = None,
) -> PolicySnapshot:
    """The snapshot of a policy's text; relative paths in it start at ``base_dir``. Raises PolicyError."""
    document = read_yaml(text)
    problems = list(document.problems)
    policy: Policy | None = None
    findings = Findings()
    if document.value is not None:
        try:
            policy = Policy.model_validate(document.value)
        except ValidationError as error:
            problems += translate(error, document)
        findings = check(
            document,
            FilePath(base_dir),
            os.environ if environ is None else environ,
            resolve_secrets=resolve_secrets,
        )
        problems += findings.problems
    if policy is None or problems:
        raise PolicyError(source, (with_excerpt(problem, document) for problem in problems), findings.files)
    return _snapshot(policy, document, findings, source)


def default_snapshot() -> PolicySnapshot:
    """The built-in policy, used when no file is named: stock vLLM's sharing."""
    return parse_policy(default_text(), source=DEFAULT_SOURCE)


def default_text() -> str:
    """The built-in policy's YAML, as in ``policies/default.yaml``."""
    return resources.files("vllm_ext.policy").joinpath("default.yaml").read_text("utf-8")


def _snapshot(policy: Policy, document: YamlDocument, findings: Findings, source: str) -> PolicySnapshot:
    tenant_keys = {digest: str(path[2]) for path, digest in findings.keys.items() if path[0] == "tenancy"}
    files = [f"{name}\0{digest}" for name, digest in sorted(findings.file_digests.items())]
    public = [document.text, *files]
    digest = hashlib.sha256(_framed(part.encode() for part in public)).hexdigest()
    private = [
        digest.encode(),
        *(part for path, value in sorted(findings.secrets.items()) for part in (repr(path).encode(), value)),
        *(part for path, value in findings.keys.items() for part in (repr(path).encode(), value)),
    ]
    return PolicySnapshot(
        policy=policy,
        source=source,
        digest=digest,
        loaded_at=time.time(),
        salt_secret=findings.secrets.get(("tenancy", "salt_secret")),
        gateway_secret=findings.secrets.get(("tenancy", "gateway", "secret")),
        key_digests=MappingProxyType(tenant_keys),
        admin_digests=frozenset(digest for path, digest in findings.keys.items() if path[0] == "admin"),
        shared_texts=MappingProxyType(dict(findings.texts)),
        files=tuple(dict.fromkeys(findings.files)),
        key_paths=MappingProxyType({digest: path for path, digest in findings.keys.items()}),
        positions=MappingProxyType(document.positions()),
        fingerprint=hashlib.blake2b(_framed(private), key=_FINGERPRINT_KEY, digest_size=32).digest(),
    )


def _framed(parts: Iterable[bytes]) -> bytes:
    """Length-prefixed, so that no two lists of parts look alike."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _whole_file(file: FilePath, message: str, hint: str | None = None) -> PolicyError:
    return PolicyError(str(file), [PolicyProblem(None, None, "", message, hint)])
