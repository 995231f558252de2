"""Where a chat prompt's system prompt ends and its last turn begins, found in the tokens themselves.

The engine sees token ids, not messages, and must not depend on which route made them. So the markers that the
chat template puts between messages are worked out once, by rendering a made-up conversation, and then looked
for in each prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ext_plugin.shared_prefixes import chat_template

logger = logging.getLogger("vllm_ext")

_SYSTEM, _FIRST, _ANSWER, _SECOND = "SYSTEMxqj", "FIRSTzkw", "ANSWERvpf", "SECONDgth"


@dataclass(frozen=True, slots=True)
class Roles:
    """Token positions: [0, system_end) is the system prompt, [tail_start, end) follows the last answer.

    None where it cannot be told.
    """

    system_end: int | None = None
    tail_start: int | None = None


class RoleFinder:
    """Finds the roles in a prompt's tokens.

    Args:
        user: the tokens that begin a user's message.
        assistant: the tokens that begin an answer.
    """

    def __init__(self, user: Sequence[int], assistant: Sequence[int]) -> None:
        self._user = list(user)
        self._assistant = list(assistant)

    def find(self, tokens: list[int]) -> Roles:
        """Linear in the prompt's length, by C-speed scans for the markers' first tokens."""
        users = _positions(tokens, self._user)
        if not users:
            return Roles()
        answers = [at for at in _positions(tokens, self._assistant) if at > users[0]]
        # The last answer marker of a prompt is usually the one that asks for the next answer.
        if answers and answers[-1] + len(self._assistant) + 2 >= len(tokens):
            answers.pop()
        last = answers[-1] if answers else -1
        tail = next((at for at in users if at > last), None)
        return Roles(users[0], tail)


def make_role_finder(model_config: Any) -> RoleFinder | None:
    """Work out the markers of the model's chat template; None (with a log line) where it has none that can be
    told.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        user, assistant = _markers(tokenizer)
        return RoleFinder(tokenizer.encode(user, add_special_tokens=False), _encode(tokenizer, assistant))
    except Exception as error:
        logger.warning(
            "vllm_ext: rules by role (system, history, tail) will match nothing: "
            "the chat template's markers cannot be told (%s)",
            error,
        )
        return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _markers(tokenizer: Any) -> tuple[str, str]:
    """The texts that begin a user's message and an answer, without what may merge with what follows."""
    conversation = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _FIRST},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    template = chat_template()
    options = {} if template is None else {"chat_template": template}
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False, **options)
    places = [text.index(word) for word in (_SYSTEM, _FIRST, _ANSWER, _SECOND)]
    between = [
        text[start + len(word) : stop]
        for word, start, stop in zip((_SYSTEM, _FIRST, _ANSWER), places, places[1:], strict=False)
    ]
    user = _common_suffix(between[0], between[2])
    # An answer's marker is what its gap has beyond the end of the message before it.
    ending = _common_prefix(between[0], between[1])
    assistant = between[1][len(ending) :] or between[1]
    user = user[len(_common_prefix(ending, user)) :] or user
    user, assistant = user.rstrip(), assistant.rstrip()
    if not user or not assistant or user == assistant:
        raise ValueError("its messages look alike")
    return user, assistant


def _common_prefix(left: str, right: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    return left[: min(len(left), len(right)) if length is None else length]


def _common_suffix(left: str, right: str) -> str:
    return _common_prefix(left[::-1], right[::-1])[::-1]


def _positions(tokens: list[int], marker: list[int]) -> list[int]:
    found: list[int] = []
    at, length = -1, len(marker)
    try:
        while True:
            at = tokens.index(marker[0], at + 1)
            if tokens[at : at + length] == marker:
                found.append(at)
    except ValueError:
        return found
