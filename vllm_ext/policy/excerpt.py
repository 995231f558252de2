"""A source line for an error message, with everything masked that might be a secret in the wrong place.

What is shown: names of fields and tenants, values of fields that are never secret, well-formed references,
punctuation. The rest is ``…``; comments are left out. A line of a file that is not valid YAML shows only
words that the schema knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from vllm_ext.policy.problems import Excerpt, Path, PolicyProblem, is_safe_name, is_secret_path
from vllm_ext.policy.references import KEY_PATTERN
from vllm_ext.policy.translate import VOCABULARY
from vllm_ext.policy.yaml_source import Node, YamlDocument

_MAX_WIDTH = 120
_REFERENCE = re.compile(KEY_PATTERN)
_WORD = re.compile(r"[^\s:,\[\]{}\"'?-]+(?:-[^\s:,\[\]{}\"']+)*|#.*")
_PUBLIC_FIELDS = {
    "version", "unknown", "domain", "domains", "replay_window", "max_body", "unlisted_tenants", "name",
    "role", "max_tenant_labels", "model_id", "file",
    "order", "class", "priority", "ttl", "decoded_priority", "decoded_ttl", "min_share", "max_share",
    "max_priority", "max_ttl", "allow",
}  # fmt: skip
_WORDS = VOCABULARY | {
    "reject", "isolate", "public", "own_domain", "all", "true", "false", "yes", "no", "on", "off", "null",
    "system", "history", "tail", "decoded", "user", "assistant", "developer", "lru", "reuse", "never",
    "clamped", "default", "any", "env", "file", "sha256", "0", "1",
}  # fmt: skip


def with_excerpt(problem: PolicyProblem, document: YamlDocument) -> PolicyProblem:
    """The problem with its source line, unless it concerns the whole file."""
    if problem.line is None or problem.column is None:
        return problem
    start, end = document.line_span(problem.line)
    wanted = problem.column - 1
    text, caret, position = "", None, 0
    for source, shown in _pieces(document, start, end):
        if caret is None and wanted < position + len(source):
            caret = len(text) + (wanted - position if source == shown else 0)
        text += shown
        position += len(source)
    caret = len(text) if caret is None else caret
    text = "".join(character if character.isprintable() else " " for character in text).rstrip()
    if len(text) > _MAX_WIDTH:
        cut = max(0, min(caret - _MAX_WIDTH // 2, len(text) - _MAX_WIDTH))
        text, caret = text[cut : cut + _MAX_WIDTH], caret - cut
    return replace(problem, excerpt=Excerpt(text, caret))


def _pieces(document: YamlDocument, start: int, end: int) -> Iterator[tuple[str, str]]:
    """The line cut into (what stands there, what is shown of it)."""
    position = start
    for node, shown in _scalars_in(document, start, end):
        left, right = max(node.start, position), min(node.end, end)
        if left < right:
            yield from _between(document.text[position:left])
            source = document.text[left:right]
            yield source, source if shown else "…"
            position = right
    yield from _between(document.text[position:end])


def _between(text: str) -> Iterator[tuple[str, str]]:
    """Text between scalars: punctuation and known words are shown, others masked, a comment is cut."""
    position = 0
    for match in _WORD.finditer(text):
        yield text[position : match.start()], text[position : match.start()]
        word = match[0]
        yield word, "" if word.startswith("#") else word if word in _WORDS else "…"
        position = match.end()
    yield text[position:], text[position:]


def _scalars_in(document: YamlDocument, start: int, end: int) -> list[tuple[Node, bool]]:
    """Scalars that touch the line, in order; one that is masked under any of its names is masked."""
    found: dict[tuple[int, int], tuple[Node, bool]] = {}
    for path, is_key, node in document.scalars():
        if node.start < end and node.end > start:
            place = (node.start, node.end)
            shown = _shown(path, is_key, node) and found.get(place, (node, True))[1]
            found[place] = (node, shown)
    return [found[place] for place in sorted(found)]


def _shown(path: Path, is_key: bool, node: Node) -> bool:
    if is_key:
        return is_safe_name(path)
    if is_secret_path(path):
        return _REFERENCE.fullmatch(node.value) is not None
    names = [part for part in path if isinstance(part, str)]
    return bool(names) and names[-1] in _PUBLIC_FIELDS
