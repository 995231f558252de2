"""A prompt file as the retention rules see it: how many tokens, and which of them are which part of the
conversation.

Without vLLM: a local `tokenizer.json` through the `tokenizers` package and the model's chat template through
`jinja2`, both of which come with vLLM and are imported only here, when needed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_ext.policy import PolicySnapshot, SharedPrefixPolicy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SYSTEM_ROLES = ("system", "developer")


class PromptError(ValueError):
    """A prompt or tokenizer that cannot be read; says what and how to mend it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. `system_end` and `tail_start` are None where they are not known."""

    token_ids: tuple[int, ...]
    system_end: int | None = None
    tail_start: int | None = None


class PromptReader:
    """Turns texts and chats into tokens as vLLM does.

    Args:
        folder: a model's folder with `tokenizer.json` and, for chats, a chat template.

    Raises:
        PromptError: there is no usable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _load_tokenizer(folder)

    def read(self, file: Path) -> Prompt:
        """A prompt file: JSON with chat messages (a list, or a request's body), or else plain text."""
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
        chat = _as_chat(text)
        return Prompt(self.tokens(text)) if chat is None else self._chat(*chat)

    def tokens(self, text: str) -> tuple[int, ...]:
        """As /v1/completions does."""
        return tuple(self._tokenizer.encode(text).ids)

    def shared_prefix(self, shared: SharedPrefixPolicy, snapshot: PolicySnapshot) -> tuple[int, ...]:
        """The tokens of a registered shared prefix."""
        if shared.messages is None:
            return self.tokens(snapshot.shared_texts[shared.name])
        text = self._render([message.model_dump() for message in shared.messages], None, False)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _chat(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Prompt:
        text = self._render(messages, tools, True)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ends = [end for _, end in encoding.offsets]
        roles = [message.get("role") for message in messages]
        leading = next((i for i, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
        answered = max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=leading)

        def tokens_of(count: int) -> int | None:
            """How many tokens the first messages make; None when the template does not put them first."""
            if count == 0:
                return 0
            try:
                head = self._render(messages[:count], tools, False)
            except PromptError:  # some templates refuse a chat without a user
                return None
            return sum(1 for end in ends if end <= len(head)) if text.startswith(head) else None

        return Prompt(tuple(encoding.ids), tokens_of(leading), tokens_of(answered))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, generation_prompt: bool
    ) -> str:
        jinja2 = _import("jinja2")
        _import("jinja2.sandbox")
        config = _json(self.folder / "tokenizer_config.json", {})
        tokens = {
            name: value if isinstance(value, str) else value.get("content", "")
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            template = environment.from_string(_chat_template(self.folder, config))
            return str(
                template.render(
                    messages=messages, tools=tools, add_generation_prompt=generation_prompt, **tokens
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from None


def _load_tokenizer(folder: Path) -> Tokenizer:
    tokenizers = _import("tokenizers")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PromptError(
            f"there is no tokenizer.json in {folder}; name the model's folder, or give --tokens"
        )
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exception
        raise PromptError(f"cannot read {file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PromptError(
            f"the package {package}, which comes with vLLM, is not installed: install it, or give --tokens N"
        ) from None


def _as_chat(text: str) -> tuple[list[dict[str, Any]], list[Any] | None] | None:
    """Messages and tools, if the text is such JSON."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    tools: Any = None
    if isinstance(value, dict):
        value, tools = value.get("messages"), value.get("tools")
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return None
    if any("role" not in item for item in value):
        raise PromptError("a chat message has no role; write [{role, content}, …]")
    return value, tools if isinstance(tools, list) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = [item for item in template if isinstance(item, dict)]
        template = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if not isinstance(template, str):
        raise PromptError(f"the model in {folder} has no chat template; give the prompt as plain text")
    return template


def _json(file: Path, default: dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {file}: {error}") from None
    return value if isinstance(value, dict) else default


def _generation_tag() -> type:
    """`{% generation %}` marks the assistant's words for training; here its content counts, not the mark."""
    extension: Any = _import("jinja2.ext").Extension

    class GenerationTag(extension):  # type: ignore[misc]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
