"""A policy's text to a snapshot, or to all its problems at once."""

from __future__ import annotations

import hashlib
import pickle
import re
import traceback
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.policy import PolicyError, PolicyProblem, default_snapshot, load_policy, parse_policy
from vllm_ext.policy.translate import VOCABULARY

pytestmark = pytest.mark.unit

KEY = "sha256:" + hashlib.sha256(b"key-one-0123456789").hexdigest()
SECRET = "0123456789abcdef-secret"


def problems(text: str, **options: object) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, source="p.yaml", environ={}, **options)  # type: ignore[arg-type]
    return str(caught.value).splitlines()


def test_everything_that_a_policy_can_say(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file", "utf-8")
    (tmp_path / "key").write_text("key-two-0123456789\n")
    snapshot = parse_policy(
        f"""
version: 1
tenancy:
  salt_secret: env:SALT
  unknown: reject
  model_id: m
  tenants:
    acme:
      domain: shared
      api_keys: [{KEY}, file:key]
    globex: {{}}
  gateway: {{secret: env:GATE, replay_window: 5m, max_body: 1MiB, unlisted_tenants: unknown}}
  shared_prefixes:
    - {{name: a, domains: [shared, globex], text: hello}}
    - {{name: b, domains: all, file: prompt.txt}}
    - {{name: c, domains: all, messages: [{{role: system, content: hi}}]}}
admin: {{api_keys: [env:ADMIN]}}
metrics: {{max_tenant_labels: 7}}
""",
        source="p.yaml",
        base_dir=tmp_path,
        environ={"SALT": SECRET, "GATE": SECRET[::-1], "ADMIN": "admin-key-0123456789"},
    )
    tenancy = snapshot.policy.tenancy
    assert tenancy is not None
    assert tenancy.gateway is not None
    assert (tenancy.unknown, tenancy.model_id, snapshot.policy.metrics.max_tenant_labels) == (
        "reject",
        "m",
        7,
    )
    assert (tenancy.gateway.replay_window, tenancy.gateway.max_body) == (300.0, 2**20)
    assert (snapshot.salt_secret, snapshot.gateway_secret) == (SECRET.encode(), SECRET[::-1].encode())
    assert dict(snapshot.key_digests) == {
        hashlib.sha256(b"key-one-0123456789").digest(): "acme",
        hashlib.sha256(b"key-two-0123456789").digest(): "acme",
    }
    assert snapshot.admin_digests == {hashlib.sha256(b"admin-key-0123456789").digest()}
    assert dict(snapshot.shared_texts) == {"a": "hello", "b": "from a file"}
    assert [prefix.domains for prefix in tenancy.shared_prefixes] == [("shared", "globex"), "all", "all"]
    assert (snapshot.domain_of("acme"), snapshot.domain_of("globex")) == ("shared", "globex")
    assert snapshot.domains == {"shared", "globex"}
    assert snapshot.position(("tenancy", "tenants", "acme")) == (8, 5)
    assert snapshot.position(("tenancy", "tenants", "nobody")) is None
    assert set(snapshot.files) == {tmp_path / "prompt.txt", tmp_path / "key"}
    with pytest.raises(KeyError):
        snapshot.domain_of("nobody")


def test_least_policy_and_defaults() -> None:
    assert parse_policy("version: 1").policy.tenancy is None
    tenancy = parse_policy("version: 1\ntenancy: {}").policy.tenancy
    assert tenancy is not None
    assert (tenancy.unknown, tenancy.salt_secret, tenancy.tenants) == ("isolate", None, {})


def test_the_default_policy_shares_as_stock_vllm_does() -> None:
    tenancy = default_snapshot().policy.tenancy
    assert tenancy is not None
    assert (tenancy.unknown, tenancy.tenants, tenancy.gateway) == ("public", {}, None)


def test_signed_domain() -> None:
    text = (
        "version: 1\ntenancy:\n  tenants: {a: {domain: d}}\n  gateway: {secret: env:S, unlisted_tenants: %s}"
    )
    own = parse_policy(text % "own_domain", environ={"S": SECRET})
    assert [own.signed_domain(name) for name in ("a", "new", "d", "b/ad", "")] == [
        "d",
        "new",
        "d",
        None,
        None,
    ]
    unknown = parse_policy(text % "unknown", environ={"S": SECRET})
    assert [unknown.signed_domain(name) for name in ("a", "new")] == ["d", None]
    assert parse_policy("version: 1\ntenancy: {tenants: {a: {}}}").signed_domain("a") is None


def test_all_problems_at_once_each_at_its_place() -> None:
    found = problems(
        """version: 2
tenancy:
  salt_secret: env:UNSET
  unknwon: reject
  unknown: off
  tenants:
    123: {}
    b/d: {}
    public: {}
    acme:
      api_key: x
      api_keys:
        - sk-clear-key
      domain: no
    globex:
  gateway:
    replay_window: 2h
    max_body: 64MB
  shared_prefixes:
    - name: p
      domains: [acmee]
      text: a
      file: missing.txt
    - name: p
      domains: some
tenants: {}
metrics: {max_tenant_labels: 0}
""",
        base_dir="/nonexistent",
    )
    expected = [
        r"p\.yaml:1:10: version: .*version 1",
        r"p\.yaml:3:16: tenancy\.salt_secret: environment variable UNSET is not set",
        r"p\.yaml:4:3: tenancy\.unknwon: unknown key \(did you mean `unknown`\?\)",
        r"p\.yaml:5:12: tenancy\.unknown: must be `reject`, `isolate` or `public` \(`off` is a true",
        r"p\.yaml:7:5: tenancy\.tenants: this name is a number to YAML.*in quotes",
        r"p\.yaml:8:5: tenancy\.tenants\.b/d: not a name",
        r"p\.yaml:9:5: tenancy\.tenants\.public: `public` has a meaning of its own",
        r"p\.yaml:11:7: tenancy\.tenants\.acme\.api_key: unknown key \(did you mean `api_keys`\?\)",
        r"p\.yaml:13:11: tenancy\.tenants\.acme\.api_keys\[0\]: .*in clear \(replace it by .*: sha256:",
        r"p\.yaml:14:15: tenancy\.tenants\.acme\.domain: expected text \(.*quotes",
        r"p\.yaml:15:5: tenancy\.tenants\.globex: expected a mapping, here is nothing",
        r"p\.yaml:16:3: tenancy\.gateway\.secret: required, but missing",
        r"p\.yaml:17:20: tenancy\.gateway\.replay_window: out of range",
        r"p\.yaml:18:15: tenancy\.gateway\.max_body: not a size",
        r"p\.yaml:20:7: tenancy\.shared_prefixes\[0\]: exactly one of .* text and file",
        r"p\.yaml:21:17: tenancy\.shared_prefixes\[0\]\.domains\[0\]: no tenant .*did you mean `acme`\?",
        r"p\.yaml:23:13: tenancy\.shared_prefixes\[0\]\.file: cannot read the file: No such file",
        r"p\.yaml:24:13: tenancy\.shared_prefixes\[1\]\.name: line 20 has",
        r"p\.yaml:25:16: tenancy\.shared_prefixes\[1\]\.domains: expected a list",
        r"p\.yaml:26:1: tenants: unknown key \(`tenants` belongs under `tenancy` or `retention`\)",
        r"p\.yaml:27:30: metrics\.max_tenant_labels: must be greater than or equal to 1",
    ]
    for line, pattern in zip(found, expected, strict=True):
        assert re.match(pattern, line), (line, pattern)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: true", "version 1"),
        ("version: 1.0", "version 1"),
        ("version: '1'", "version 1"),
        ("tenancy: {}", "version: required"),
        ("[]", "expected a mapping"),
        ("version: 1\ntenancy:", "section is empty"),
        ("version: 1\ntenancy: {gateway: }", "section is empty"),
        ("version: 1\ntenancy: {unknown: rejekt}", "did you mean `reject`"),
        ("version: 1\ntenancy: {tenants: {a: {api_keys: env:X}}}", "expected a list"),
        ("version: 1\ntenancy: {tenants: {other: {}}}", "meaning of its own"),
        ("version: 1\ntenancy: {shared_prefixes: [{name: x, domains: all}]}", "here is none"),
        ("version: 1\ntenancy: {shared_prefixes: [{name: x, domains: all, text: ' '}]}", "text is empty"),
        ("version: 1\ntenancy: {shared_prefixes: [{name: x, domains: all, messages: []}]}", "shares nothing"),
        ("version: 1\ntenancy: {shared_prefixes: [{name: x, domains: [], text: t}]}", "shares nothing"),
        (
            "version: 1\ntenancy: {tenants: {a: {}}, shared_prefixes: [{name: x, domains: [a, a], text: t}]}",
            "twice",
        ),
        ("version: 1\ntenancy: {gateway: {secret: env:X, replay_window: .nan}}", "out of range"),
        ("version: 1\ntenancy: {gateway: {secret: env:X, max_body: 0}}", "must be greater than 0"),
    ],
)
def test_single_refusals(text: str, words: str) -> None:
    assert words in "\n".join(problems(text))


def test_one_key_for_two_is_refused_whatever_way_it_is_given() -> None:
    text = f"""version: 1
tenancy:
  tenants:
    a: {{api_keys: [{KEY}]}}
    b: {{api_keys: [env:K]}}
admin: {{api_keys: [{KEY}]}}
"""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, environ={"K": "key-one-0123456789"})
    first, second = caught.value.problems
    assert (first.field, first.message) == (
        "tenancy.tenants.b.api_keys[0]",
        "the same key as line 4's, of tenant a",
    )
    assert second.field == "admin.api_keys[0]"
    assert "tenant's" in str(second)


def test_a_tenant_is_not_a_domain() -> None:
    text = """version: 1
tenancy:
  tenants: {retail: {domain: bank}, wealth: {domain: bank}}
  shared_prefixes: [{name: x, domains: [retail], text: t}]
"""
    assert problems(text) == [
        "p.yaml:4:41: tenancy.shared_prefixes[0].domains[0]: "
        "`retail` is a tenant; its trust domain is `bank`: write `bank`"
    ]
    # The name of a tenant that is also another tenant's domain is a domain.
    assert parse_policy(text.replace("wealth: {domain: bank}", "wealth: {domain: retail}"))


def test_gateway_and_salts_need_two_secrets() -> None:
    text = "version: 1\ntenancy:\n  salt_secret: env:A\n  gateway: {secret: env:%s}\n"
    for other in "AB":  # the same reference, and another one to the same value
        with pytest.raises(PolicyError) as caught:
            parse_policy(text % other, environ={"A": SECRET, "B": SECRET + "\n"})
        (problem,) = caught.value.problems
        assert problem.field == "tenancy.gateway.secret"
        assert "line 3's salt_secret: the gateway would hold the key that signs stamps" in problem.message
        assert SECRET not in f"{caught.value} {caught.value!r}"
    assert parse_policy(text % "B", environ={"A": SECRET, "B": SECRET[::-1]}).gateway_secret
    with pytest.raises(PolicyError, match="the same value"):
        parse_policy(text % "A", environ={}, resolve_secrets=False)
    assert parse_policy(text % "B", environ={}, resolve_secrets=False)


@pytest.mark.parametrize("secret", ["salt_secret: env:S", "gateway: {secret: env:S}"])
@pytest.mark.parametrize("key", ["env:K", "sha256:" + hashlib.sha256(SECRET.encode()).hexdigest()])
def test_a_key_is_no_secret(secret: str, key: str) -> None:
    text = f"""version: 1
tenancy:
  {secret}
  tenants: {{a: {{api_keys: [%s]}}}}
admin: {{api_keys: [%s]}}
"""
    for where, keys in (("tenancy.tenants.a.api_keys[0]", (key, KEY)), ("admin.api_keys[0]", (KEY, key))):
        with pytest.raises(PolicyError) as caught:
            parse_policy(text % keys, environ={"S": SECRET, "K": SECRET})
        (problem,) = caught.value.problems
        assert problem.field == where
        assert "the same value as line 3's" in problem.message
        assert SECRET not in f"{caught.value} {caught.value!r}"
    assert parse_policy(text % (KEY, key), environ={"S": SECRET[::-1], "K": SECRET})


def test_secrets_may_be_left_unresolved() -> None:
    text = f"version: 1\ntenancy: {{salt_secret: env:NO, tenants: {{a: {{api_keys: [{KEY}, env:NO2]}}}}}}"
    snapshot = parse_policy(text, resolve_secrets=False, environ={})
    assert snapshot.salt_secret is None
    assert list(snapshot.key_digests.values()) == ["a"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"version: 1\n# caf\xe9", ":2:6: the file is not UTF-8"),
        (b"x" * (5 * 1024 * 1024), "larger than"),
    ],
)
def test_whole_file_problems(data: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(PolicyError, match=words):
        load_policy(file)


def test_folder_and_byte_order_mark(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="folder"):
        load_policy(tmp_path)
    file = tmp_path / "p.yaml"
    file.write_bytes(b"\xef\xbb\xbfversion: 1\r\n")
    assert load_policy(str(file)).policy.version == 1


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "empty"), (b"\xff", "not UTF-8"), (b"x" * 5_000_000, "larger")]
)
def test_shared_prefix_files_that_cannot_serve(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data)
    text = "version: 1\ntenancy: {shared_prefixes: [{name: x, domains: all, file: f}]}"
    assert words in problems(text, base_dir=tmp_path)[0]


def test_digest_follows_text_and_prefix_files_but_not_secrets(tmp_path: Path) -> None:
    text = "version: 1\ntenancy: {salt_secret: env:S, shared_prefixes: [{name: x, domains: all, file: f}]}"

    def load(content: str, secret: str, suffix: str = "") -> tuple[str, bytes]:
        (tmp_path / "f").write_text(content)
        snapshot = parse_policy(text + suffix, base_dir=tmp_path, environ={"S": secret})
        return snapshot.digest, snapshot.fingerprint

    digest, fingerprint = load("one", SECRET)
    assert load("one", SECRET) == (digest, fingerprint)
    assert load("two", SECRET)[0] != digest
    assert load("one", SECRET, "\n# more")[0] != digest
    other_digest, other_fingerprint = load("one", SECRET[::-1])
    assert other_digest == digest
    assert other_fingerprint != fingerprint


def test_a_snapshot_is_not_pickled_and_not_altered() -> None:
    snapshot = default_snapshot()
    with pytest.raises(TypeError, match="holds secrets"):
        pickle.dumps(snapshot)
    with pytest.raises(AttributeError):
        snapshot.digest = ""  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        snapshot.policy.version = 1


def test_an_error_survives_pickling() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy("version: 3", source="p.yaml")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -- whatever the text

_WORDS = st.sampled_from(
    [
        *sorted(VOCABULARY),
        "all",
        "isolate",
        "env:X",
        "1",
        "- ",
        "<<",
        "*a",
        "&a ",
        ": ",
        "\n",
        "  ",
        "{",
        "}",
        "[",
        "'",
    ]
)
_SOUP = st.lists(_WORDS | st.text(max_size=3), max_size=40).map("".join)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["all", "env:X", KEY])
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(sorted(VOCABULARY)) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
_DOCUMENTS = st.fixed_dictionaries(
    {"version": st.just(1) | _SCALARS},
    optional={
        "tenancy": st.fixed_dictionaries(
            {}, optional=dict.fromkeys(("tenants", "gateway", "shared_prefixes", "unknown"), _TREES)
        ),
        "admin": _TREES,
        "metrics": _TREES,
    },
)


def _points_into(text: str) -> None:
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    problems: tuple[PolicyProblem, ...] = ()
    try:
        parse_policy(text, environ={}, base_dir="/nonexistent")
    except PolicyError as error:
        problems = error.problems
        assert problems
    for problem in problems:
        assert problem.line is not None
        assert problem.column is not None
        assert 1 <= problem.line <= len(lines)
        assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
        assert problem.message
        assert problem.excerpt is not None
        assert 0 <= problem.excerpt.caret <= len(lines[problem.line - 1])


@settings(max_examples=300, deadline=None)
@given(st.text() | _SOUP)
def test_any_text_gives_a_policy_or_a_policy_error(text: str) -> None:
    _points_into(text)


@settings(max_examples=200, deadline=None)
@given(_TREES | _DOCUMENTS, st.booleans())
def test_any_document_gives_a_policy_or_a_policy_error(tree: object, flow: bool) -> None:
    _points_into(yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True))


# -- secrets stay inside

# The middle keeps hypothesis from trying words that stand in the policy anyway.
_PRINTABLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)
_SECRETS = st.builds("{}Zq9vXw3kTy7mPb5cRd{}".format, _PRINTABLE, _PRINTABLE).filter(
    lambda text: not re.match(r"(env|file|sha256):", text)
)


@settings(max_examples=150, deadline=None)
@given(_SECRETS, _SECRETS, _SECRETS)
def test_resolved_secrets_are_never_shown(salt: str, gateway: str, key: str) -> None:
    tenancy = "{salt_secret: env:A, gateway: {secret: env:B}, tenants: {t: {api_keys: [env:C]}}}"
    text = f"version: 1\ntenancy: {tenancy}"
    environ = {"A": salt, "B": gateway, "C": key}
    if len(set(environ.values())) < 3:  # one value in two places is refused
        with pytest.raises(PolicyError) as caught:
            parse_policy(text, environ=environ)
        assert "Zq9vXw3kTy7mPb5cRd" not in f"{caught.value!r} {caught.value}"
        return
    snapshot = parse_policy(text, environ=environ)
    policy = snapshot.policy
    shown = f"{snapshot!r} {snapshot} {policy!r} {policy} {policy.model_dump()} {snapshot.digest}"
    for secret in (salt, gateway, key):
        assert secret not in shown
        assert secret.encode().hex() not in shown


_PLACES = [
    "version: 1\ntenancy:\n  salt_secret: %s\n",
    "version: 1\ntenancy:\n  gateway: {secret: %s}\n",
    "version: 1\ntenancy:\n  gateway:\n    secret: [%s]\n",
    "version: 1\ntenancy:\n  tenants:\n    a:\n      api_keys:\n        - %s   # %s\n",
    "version: 1\ntenancy:\n  tenants:\n    a:\n      api_keys: %s\n",
    "version: 1\ntenancy:\n  tenants:\n    a:\n      api_key: %s\n",
    "version: 1\ntenancy:\n  tenants:\n    a: %s\n",
    "version: 1\ntenancy:\n  tenants:\n    a:\n      api_keys:\n        - {%s: 1, %s: 2}\n",
    "version: 1\ntenancy:\n  tenants:\n    a:\n      api_keys: {%s: {x: 1, x: 2}}\n",
    "version: 1\nadmin:\n  api_keys: [sha256:%s]\n",
    "version: 1\nadmin: %s\n",
    "version: 1\n  salt_secret: %s\n",
    "version: 1\ntenancy:\n  salt_secret:\n\t%s\n",
]


@settings(max_examples=300, deadline=None)
@given(_SECRETS, st.sampled_from(_PLACES), st.booleans())
def test_secrets_in_clear_are_refused_and_not_repeated(secret: str, place: str, quoted: bool) -> None:
    written = "'" + secret.replace("'", "''") + "'" if quoted else secret
    text = place.replace("%s", written)
    try:
        parse_policy(text, source="p.yaml", environ={})
    except PolicyError as error:
        shown = f"{error}\n{error!r}\n{''.join(traceback.format_exception(error))}\n{error.problems!r}"
        shown += "\n".join(problem.excerpt.text for problem in error.problems if problem.excerpt)
        assert "Zq9vXw3kTy7mPb5cRd" not in shown
    else:
        # An unquoted text that starts with `#` is a comment: nothing was given.
        assert not quoted
