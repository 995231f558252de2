"""`vllm-ext policy …` as an operator runs it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from vllm_ext import __version__
from vllm_ext.cli import main
from vllm_ext.cli.render import print_error, print_rows
from vllm_ext.policy import PolicyError, PolicyStore, explain_tenant, load_policy, parse_policy

pytestmark = pytest.mark.unit

POLICIES = Path(__file__).parents[3] / "policies"
DEMO = str(POLICIES / "demo.yaml")
ACME_KEY = "demo-key-acme-0001"


def run(*args: str, env: dict[str, str] | None = None, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(args), env=env, input=stdin)


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"vllm-ext {__version__}\n")


def test_check_is_quiet_about_what_is_right() -> None:
    result = run("policy", "check", DEMO, str(POLICIES / "default.yaml"))
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    tenancy = "2 tenants, 2 trust domains, 1 shared prefix, unknown: isolate"
    digest = load_policy(DEMO).digest
    assert first == f"{DEMO}: ok ({tenancy}; retention: lru, 1 rule), digest {digest}"
    assert second.endswith(f"unknown: public), digest {load_policy(POLICIES / 'default.yaml').digest}")


def test_check_lists_all_errors_of_all_files_with_carets(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "version: 1\ntenancy:\n  unknwon: reject\n  tenants:\n    acme:\n      api_keys: [sk-clear-key]\n"
    )
    two.write_text("version: 1\ntenancy:\n\tunknown: reject\n")
    result = run("policy", "check", str(one), DEMO, str(two), str(tmp_path / "three.yaml"))
    assert result.exit_code == 2
    assert f"{DEMO}: ok" in result.stdout
    digest = hashlib.sha256(b"sk-clear-key").hexdigest()
    assert result.stderr.splitlines() == [
        f"{one}:3:3: tenancy.unknwon: unknown key (did you mean `unknown`?)",
        "      unknwon: …",
        "      ^",
        f"{one}:6:18: tenancy.tenants.acme.api_keys[0]: an API key must not stand in the policy in clear "
        f"(replace it by its digest: sha256:{digest})",
        "          api_keys: […]",
        "                     ^",
        f"{two}:3:1: YAML does not allow tabs for indentation (use spaces)",
        "     unknown: reject",
        "    ^",
        f"{tmp_path / 'three.yaml'}: there is no such file "
        "(check the path; a relative one starts at the current folder)",
    ]


def test_check_without_secrets() -> None:
    saas = str(POLICIES / "multi-tenant-saas.yaml")
    result = run("policy", "check", saas, env={"VLLM_EXT_SALT_SECRET": "short"})
    assert result.exit_code == 2
    assert "has 5 bytes" in result.stderr
    assert run("policy", "check", "--no-secrets", saas).exit_code == 0


def test_check_prints_the_digest_that_the_server_shows(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("first")
    file = tmp_path / "p.yaml"
    prefixes = "[{name: p, domains: all, file: prompt.txt}]"
    file.write_text(f"version: 1\ntenancy: {{salt_secret: env:S, shared_prefixes: {prefixes}}}")
    env = {"S": "salt-secret-0123456789"}

    def shown(*options: str) -> str:
        result = run("policy", "check", str(file), *options, env=env)
        match = re.fullmatch(r".*: ok \(.*\), digest ([0-9a-f]{64})\n", result.stdout)
        assert match is not None
        return match[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S", env["S"])
        assert shown() == PolicyStore(file).current.digest
    assert shown("--no-secrets") == shown()
    before = shown()
    (tmp_path / "prompt.txt").write_text("second")
    assert shown() != before


def test_explain() -> None:
    result = run(
        "policy", "explain", DEMO, "--tenant", "acme", "--api-key-env", "MY_KEY", env={"MY_KEY": ACME_KEY}
    )
    assert result.exit_code == 0
    lines = Path(DEMO).read_text().splitlines()
    line = 1 + next(index for index, text in enumerate(lines) if text.strip() == "acme:")
    assert (
        f"key in $MY_KEY: identifies acme (tenancy.tenants.acme.api_keys[0]) [{DEMO}:{line + 2}]"
        in result.stdout
    )
    assert f"tenant: acme [{DEMO}:{line}]" in result.stdout
    assert "shared prefix: assistant-v1 (messages), with acme, globex" in result.stdout
    assert ACME_KEY not in result.output
    assert hashlib.sha256(ACME_KEY.encode()).hexdigest() not in result.output


def test_explain_needs_someone_to_explain() -> None:
    assert run("policy", "explain", DEMO).exit_code == 2
    unset = run("policy", "explain", DEMO, "--api-key-env", "SURELY_NOT_SET")
    assert unset.exit_code == 2
    assert "SURELY_NOT_SET is not set" in unset.stderr
    by_key = run("policy", "explain", DEMO, "--api-key-env", "MY_KEY", env={"MY_KEY": ACME_KEY})
    assert "tenant: acme" in by_key.stdout
    assert run("policy", "explain", "missing.yaml", "--tenant", "x").exit_code == 2


def test_schema(tmp_path: Path) -> None:
    shipped = (POLICIES / "policy.schema.json").read_text("utf-8")
    assert run("policy", "schema").stdout == shipped
    out = tmp_path / "schema.json"
    assert run("policy", "schema", "--out", str(out)).exit_code == 0
    assert json.loads(out.read_text("utf-8")) == json.loads(shipped)
    assert "cannot write" in run("policy", "schema", "--out", str(tmp_path)).stderr


def test_digest_reads_stdin_or_environment() -> None:
    line = f"sha256:{hashlib.sha256(ACME_KEY.encode()).hexdigest()}\n"
    assert run("policy", "digest", stdin=ACME_KEY + "\n").stdout == line
    assert run("policy", "digest", "--env", "K", env={"K": ACME_KEY}).stdout == line
    assert line.strip() in Path(DEMO).read_text()
    for bad in ("", "\n", "two words", "a\nb\n"):
        result = run("policy", "digest", stdin=bad)
        assert result.exit_code == 2
        assert "standard input" in result.stderr
        assert "words" not in result.stderr


def test_digest_takes_no_key_as_an_argument() -> None:
    assert run("policy", "digest", ACME_KEY).exit_code == 2


def test_on_a_terminal_explain_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = explain_tenant(load_policy(DEMO), "acme")
    print_rows(rows, DEMO, Console(force_terminal=True, width=100))
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.search(r"│ trust domain\s+│ acme", shown)


def test_brackets_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy("version: 1\ntenancy: {tenants: {'[bold]x': {}}}", source="p")
    print_error(caught.value, Console(width=40))
    assert "p:2:21: tenancy.tenants.[bold]x: not a name" in capsys.readouterr().out


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20))
def test_nothing_on_the_command_line_shows_a_key(noise: str) -> None:
    key = f"{noise}Zq9vXw3kTy7mPb5cRd"
    for args in (
        ("policy", "explain", DEMO, "--tenant", "acme", "--api-key-env", "K"),
        ("policy", "explain", DEMO, "--api-key-env", "K"),
        ("policy", "digest", "--env", "K"),
    ):
        result = run(*args, env={"K": key})
        assert result.exit_code == 0
        assert "Zq9vXw3kTy7mPb5cRd" not in result.output
