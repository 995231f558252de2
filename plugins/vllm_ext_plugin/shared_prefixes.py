"""The policy's registered shared prefixes -> token ids, by the model's own tokenizer or chat template."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from vllm_ext.policy import PolicySnapshot
from vllm_ext.tenancy.shared_prefix import RegisteredPrefix
from vllm_ext_plugin.activation import CHAT_TEMPLATE_ENV

logger = logging.getLogger("vllm_ext")


def registered_prefixes(
    snapshot: PolicySnapshot, model_config: Any, block_size: int
) -> list[RegisteredPrefix]:
    """Tokenise every registered prefix.

    Raises:
        ValueError: there are prefixes but no tokenizer, or the chat template refuses the messages; names the
        prefix.
    """
    tenancy = snapshot.policy.tenancy
    if tenancy is None or not tenancy.shared_prefixes:
        return []
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise ValueError(
            "tenancy.shared_prefixes needs the model's tokenizer, but --skip-tokenizer-init is set"
        )
    prefixes = []
    for shared in tenancy.shared_prefixes:
        try:
            if shared.messages is not None:
                tokens = _render(tokenizer, [message.model_dump() for message in shared.messages])
            else:
                tokens = list(tokenizer.encode(snapshot.shared_texts[shared.name]))
        except Exception as error:
            raise ValueError(
                f"tenancy.shared_prefixes: {shared.name!r} cannot be turned into tokens: {error}"
            ) from error
        blocks = len(tokens) // block_size
        log = logger.info if blocks else logger.warning
        log(
            "shared prefix %r: %d tokens, %d whole blocks of %d%s",
            shared.name, len(tokens), blocks, block_size,
            "" if blocks else ": too short, nothing will be shared",
        )  # fmt: skip
        domains = None if shared.domains == "all" else frozenset(shared.domains)
        prefixes.append(RegisteredPrefix(shared.name, domains, tuple(tokens)))
    return prefixes


def _render(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    template = chat_template()
    options = {} if template is None else {"chat_template": template}
    tokens = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=False, return_dict=False, **options
    )
    return list(tokens)


def chat_template() -> str | None:
    """The server's `--chat-template` (a file's content, or the template itself as vLLM allows), or None for
    the model's own.
    """
    given = os.environ.get(CHAT_TEMPLATE_ENV)
    if given is None:
        return None
    path = Path(given)
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else given
    except OSError:  # a template given inline can be longer than any file name
        return given
