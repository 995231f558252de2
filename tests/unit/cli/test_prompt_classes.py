"""`vllm-ext policy explain --prompt-file`: a prompt's retention classes, range by range."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from vllm_ext.cli import main
from vllm_ext.cli import prompt as prompt_module
from vllm_ext.cli.prompt import PromptError, PromptReader
from vllm_ext.cli.prompt_classes import ClassRow
from vllm_ext.cli.render import print_classes
from vllm_ext.policy import Position

pytestmark = pytest.mark.unit

POLICY = """version: 1
tenancy:
  unknown: isolate
  tenants: {acme: {}, globex: {}}
  shared_prefixes:
    - name: greeting
      domains: [acme]
      messages: [{role: system, content: be kind and be brief}]
    - {name: plain, domains: all, text: once upon a time}
retention:
  classes:
    head: {priority: 90}
    system: {priority: 60, ttl: 1h}
    past: {priority: 40, ttl: 90s, decoded_priority: 40}
  rules:
    - {class: head, shared_prefix: any}
    - {class: system, role: system}
    - {class: past, role: history}
    - {class: past, tenants: [unknown], tokens: -2..}
  client_wishes: {allow: clamped, max_priority: 50}
"""
TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}> {% generation %}{{ message['content'] }}{% endgeneration %} <end> "
    "{% endfor %}{% if tools %}{{ tools | tojson }} {% endif %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT = [
    {"role": "system", "content": "be kind and be brief"},
    {"role": "user", "content": "who"},
    {"role": "assistant", "content": "me"},
    {"role": "user", "content": "why you"},
]

WORDS = (
    "?", "<system>", "<user>", "<assistant>", "<end>", "be", "kind", "and", "brief", "who", "me", "why",
    "you", "once", "upon", "a", "time",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy, a chat, a text and a model whose every word is a token."""
    tokenizers = pytest.importorskip("tokenizers", reason="comes with vLLM")
    pytest.importorskip("jinja2", reason="comes with vLLM")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    (tmp_path / "text.txt").write_text("once upon a time who me why you")
    return tmp_path


def explain(folder: Path, prompt: str, *args: str, tenant: str = "acme") -> Result:
    command = ["policy", "explain", str(folder / "policy.yaml"), "--tenant", tenant]
    command += ["--prompt-file", str(folder / prompt), *args]
    return CliRunner().invoke(main, command)


def classes(result: Result, folder: Path) -> list[str]:
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("tokens ")]
    return [line.replace(str(folder / "policy.yaml"), "p") for line in lines]


def test_a_chat(folder: Path) -> None:
    result = explain(folder, "chat.json", "--tokenizer", str(folder), "--block-size", "4")
    assert classes(result, folder) == [
        "tokens 0..4 (system, shared greeting): class head, priority 90 for good [p:16]",
        "tokens 4..7 (system): class system, priority 60 for 1h, then 35 [p:17]",
        "tokens 7..13 (history): class past, priority 40 for 90s, then 35 [p:18]",
        "tokens 13..18 (tail): class default, priority 35 for good [default]",
        "tokens 18.. (decoded): class default, priority 35 for good [default]",
    ]


def test_a_request_body_with_tools_and_a_first_turn(folder: Path) -> None:
    (folder / "body.json").write_text(json.dumps({"messages": CHAT[1:2], "tools": [{"name": "x"}]}))
    found = classes(explain(folder, "body.json", "--tokenizer", str(folder)), folder)
    assert found[0].startswith("tokens 0..6 (tail): class default")


def test_a_text_has_no_parts_but_may_begin_as_a_shared_prefix(folder: Path) -> None:
    args = ("--tokenizer", str(folder), "--block-size", "2")
    assert classes(explain(folder, "text.txt", *args, tenant="globex"), folder)[:2] == [
        "tokens 0..4 (not known, shared plain): class head, priority 90 for good [p:16]",
        "tokens 4..8 (not known): class default, priority 35 for good [default]",
    ]
    # Unknown callers share nothing.
    assert classes(explain(folder, "text.txt", *args, tenant="nobody"), folder)[:2] == [
        "tokens 0..6 (not known): class default, priority 35 for good [default]",
        "tokens 6..8 (not known): class past, priority 40 for 90s, then 35 [p:19]",
    ]


def test_a_wish(folder: Path) -> None:
    wish = json.dumps({"ranges": [{"start": 13, "priority": 80, "duration_ms": 1500}], "pin": 1})
    result = explain(folder, "chat.json", "--tokenizer", str(folder), "--wish", wish)
    assert (
        "tokens 13..18 (tail): class default, as the client asks, priority 50 for 1.5s, then 35 [default]"
    ) in classes(result, folder)
    assert "not followed as asked: unknown_key" in result.stdout
    assert "not followed as asked: priority_clamped" in result.stdout


def test_without_a_tokenizer(folder: Path) -> None:
    found = classes(explain(folder, "chat.json", "--tokens", "100", tenant="nobody"), folder)
    assert found[1] == "tokens 98..100 (not known): class past, priority 40 for 90s, then 35 [p:19]"


def test_without_a_section(folder: Path) -> None:
    (folder / "policy.yaml").write_text(POLICY.partition("retention:")[0])
    result = explain(folder, "chat.json", "--tokens", "100")
    assert "has no `retention`" in result.stdout
    assert classes(result, folder)[0].startswith("tokens 0..100 (not known): class default")


def test_what_is_missing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(prompt: str, *args: str) -> str:
        result = explain(folder, prompt, *args)
        assert result.exit_code == 2
        return result.stderr

    assert "--tokenizer DIR (the model's folder) or --tokens N" in error("chat.json")
    assert "either" in error("chat.json", "--tokens", "5", "--tokenizer", str(folder))
    assert "No such file" in error("missing.json", "--tokens", "5")
    assert "No such file" in error("missing.json", "--tokenizer", str(folder))
    assert "no tokenizer.json" in error("chat.json", "--tokenizer", str(folder / "nowhere"))
    (folder / "bad.json").write_text('[{"content": "hi"}]')
    assert "has no role" in error("bad.json", "--tokenizer", str(folder))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    assert "refuses the messages: no chats" in error("chat.json", "--tokenizer", str(folder))
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in error("chat.json", "--tokenizer", str(folder))
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot read" in error("chat.json", "--tokenizer", str(folder))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert "the package tokenizers, which comes with vLLM" in error("chat.json", "--tokenizer", str(folder))


def test_a_template_in_the_tokenizers_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ bos_token }} " + TEMPLATE},
    ]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = PromptReader(folder).read(folder / "chat.json")
    assert (len(prompt.token_ids), prompt.system_end, prompt.tail_start) == (19, 8, 14)


def test_a_template_that_refuses_a_chat_without_a_user(folder: Path) -> None:
    guard = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(guard + TEMPLATE)
    (folder / "policy.yaml").write_text(POLICY)
    prompt = PromptReader(folder).read(folder / "chat.json")
    assert (prompt.system_end, prompt.tail_start) == (None, 13)
    assert prompt_module.SYSTEM_ROLES == ("system", "developer")
    with pytest.raises(PromptError, match="too short"):
        PromptReader(folder)._chat(CHAT[:1], None)


def test_on_a_terminal_it_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ClassRow("0..16", "system", "[bold]head", "90", "for 1h, then 35", Position(7, 5)),
        ClassRow("16..", "decoded", "default", "35", "for good", None),
    ]
    print_classes(rows, "p.yaml", Console(force_terminal=True, width=100))
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.search(r"│ 0\.\.16\s+│ system\s+│ \[bold\]head\s+│\s+90 │ for 1h, then 35 │\s+7 │", shown)
