"""YAML text to plain values, remembering where everything stood.

Only what a policy needs: mappings, lists, text, numbers, true/false, null; anchors, aliases and merge keys.
Built on PyYAML's events instead of its constructors, so that no tag can construct anything and aliases cannot
blow up. Lists become tuples, for the pydantic models are strict and frozen.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from vllm_ext.policy.problems import Path, PolicyProblem, Position, format_path

MAX_DEPTH = 32
MAX_VALUES = 200_000  # after aliases are expanded

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # what PyYAML counts as one
_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}
_INT = re.compile(r"[-+]?[0-9]{1,30}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_STANDARD_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")
}


@dataclass(slots=True)
class Node:
    """A piece of the document. ``value`` is a scalar's text, a list of nodes, or a list of (key, value)
    nodes."""

    kind: str  # "scalar" | "sequence" | "mapping"
    value: Any
    start: int  # offset in characters
    end: int
    plain: bool = False  # a scalar without quotes: may be a number, true/false, null


@dataclass(slots=True)
class YamlDocument:
    """The plain value, and the places of all its parts."""

    text: str
    value: Any = None
    problems: list[PolicyProblem] = field(default_factory=list)
    _line_starts: list[int] = field(default_factory=list)
    _keys: dict[Path, Node] = field(default_factory=dict)
    _values: dict[Path, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._line_starts = [0, *(match.end() for match in _LINE_BREAK.finditer(self.text))]

    def place(self, offset: int) -> Position:
        """Line and column, from 1, of a character offset."""
        line = bisect_right(self._line_starts, offset) - 1
        return Position(line + 1, offset - self._line_starts[line] + 1)

    def line_span(self, line: int) -> tuple[int, int]:
        """Start and end offsets of a line (from 1), without its line break."""
        start = self._line_starts[line - 1]
        match = _LINE_BREAK.search(self.text, start)
        return start, match.start() if match else len(self.text)

    def position(self, path: Path) -> Position | None:
        """Where ``path`` is said: its key, or the list item itself."""
        node = self._keys.get(path) or self._values.get(path)
        return self.place(node.start) if node else None

    def value_position(self, path: Path) -> Position | None:
        """Where to point for a wrong value: the scalar itself, for a mapping or list the key above it."""
        node = self._values.get(path)
        if node is not None and node.kind == "scalar" and node.end > node.start:
            return self.place(node.start)
        return self.position(path)

    def nearest_position(self, path: Path) -> Position:
        """As ``value_position``, for the closest part of ``path`` that the file has."""
        for length in range(len(path), 0, -1):
            if (found := self.value_position(path[:length])) is not None:
                return found
        return Position(1, 1)

    def raw(self, path: Path) -> str | None:
        """The text of a scalar as written (``off``, where the value is False)."""
        node = self._values.get(path)
        return node.value if node is not None and node.kind == "scalar" else None

    def positions(self) -> dict[Path, Position]:
        """``position`` of every path, for keeping when the text is not."""
        return {path: self.place(node.start) for path, node in (self._values | self._keys).items()}

    def __contains__(self, path: Path) -> bool:
        return path in self._values

    def scalars(self) -> Iterator[tuple[Path, bool, Node]]:
        """(path, is it a key, node) of every scalar that has been read."""
        for path, node in self._keys.items():
            yield path, True, node
        for path, node in self._values.items():
            if node.kind == "scalar":
                yield path, False, node


class _Stop(Exception):
    """A problem after which reading on makes no sense."""

    def __init__(self, offset: int, message: str, hint: str | None = None) -> None:
        self.offset, self.message, self.hint = offset, message, hint


def read_yaml(text: str) -> YamlDocument:
    """Read one YAML document. Never raises; what is wrong with it is in ``problems``."""
    document = YamlDocument(text)
    try:
        root = _Composer(text).document()
        if root is None or (root.kind == "scalar" and root.plain and root.value in _NULL):
            raise _Stop(0, "the policy is empty", "write at least `version: 1`")
        document.value = _Builder(document).build(root, ())
    except _Stop as stop:
        _add(document, stop.offset, (), stop.message, stop.hint)
    except yaml.reader.ReaderError as error:
        _add(
            document,
            error.position,
            (),
            f"character U+{_code(error.character):04X} is not allowed in YAML",
            None,
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        offset = min(mark.index, len(text)) if mark else 0
        message, hint = _syntax_message(error, text, offset)
        _add(document, offset, (), message, hint)
    except ValueError:  # PyYAML: \U escapes and %YAML directives out of range
        _add(document, 0, (), "not valid YAML: a number or escape is out of range", None)
    return document


def _add(document: YamlDocument, offset: int, path: Path, message: str, hint: str | None) -> None:
    line, column = document.place(offset)
    document.problems.append(PolicyProblem(line, column, format_path(path), message, hint))


def _code(character: int | str | bytes) -> int:
    return character if isinstance(character, int) else ord(character)


def _syntax_message(error: yaml.MarkedYAMLError, text: str, offset: int) -> tuple[str, str | None]:
    # PyYAML quotes what it stumbled over, which may be part of a key: keep its words, not its quotations.
    problem = re.sub(
        r"'[^']*'?.*|\(.*|<.*|, but found .*", "", (error.problem or "cannot be read").split("\n")[0]
    ).strip()
    line_start = max((match.end() for match in _LINE_BREAK.finditer(text, 0, offset)), default=0)
    indent = re.match(r"[ \t]*", text[line_start:])
    if (indent and "\t" in indent[0]) or text[offset : offset + 1] == "\t":
        return "YAML does not allow tabs for indentation", "use spaces"
    if problem.startswith("mapping values are not allowed"):
        return (
            "not valid YAML: a `:` where none can be",
            "put text with `: ` in it in quotes, and check the indentation",
        )
    if problem.startswith(("found character", "found unknown escape")):
        return "not valid YAML: a character that cannot stand here", "put the text in quotes"
    if problem.startswith("could not find expected"):
        return "not valid YAML: a name without its `:`", "write `name: value`"
    if problem.startswith("found unexpected end"):
        return "not valid YAML: the file ends inside quotes", "close them"
    if problem.startswith("expected"):
        return (
            f"not valid YAML: {_expected(error)}",
            "check the indentation, brackets and quotes above this place",
        )
    return f"not valid YAML: {problem or 'cannot be read'}", None


def _expected(error: yaml.MarkedYAMLError) -> str:
    match = re.match(r"expected (?:<([a-z ]+)>|'([\]},]+)'(?: or '([\]}]+)')?)", error.problem or "")
    if match is None:
        return "something is missing or misplaced here"
    if match[1]:
        return (
            f"this does not belong to the {'list or mapping' if 'block' in match[1] else 'document'} above it"
        )
    return "expected " + " or ".join(f"`{token}`" for token in match.groups()[1:] if token)


def _start(event: yaml.Event) -> int:
    return event.start_mark.index if event.start_mark else 0


def _end(event: yaml.Event) -> int:
    return event.end_mark.index if event.end_mark else 0


class _Composer:
    """Events to nodes. Aliases point to the node of their anchor; an anchor inside itself is refused."""

    def __init__(self, text: str) -> None:
        self._events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._anchors: dict[str, Node] = {}
        self._open: set[str] = set()

    def document(self) -> Node | None:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _Stop(
                        _start(event), "a policy is one YAML document", "remove the `---` and what follows"
                    )
                root = self._node(next(self._events), 0)
        return root

    def _node(self, event: yaml.Event, depth: int) -> Node:
        start = _start(event)
        if depth > MAX_DEPTH:
            raise _Stop(start, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent | yaml.MappingStartEvent)
        if event.tag not in (None, "!", *_STANDARD_TAGS):
            raise _Stop(start, "a policy takes no YAML tags of its own", "remove the `!…` or quote the text")
        if event.anchor:
            self._open.add(event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            plain = event.implicit[0] or (event.tag in _STANDARD_TAGS and not str(event.tag).endswith(":str"))
            if plain and (event.anchor or event.tag):  # the mark is before them, the text is at the end
                start = max(start, _end(event) - len(event.value))
            node = Node("scalar", event.value, start, _end(event), plain)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(following := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(following, depth + 1))
            node = Node("sequence", items, start, _end(following))
        else:
            pairs = []
            while not isinstance(following := next(self._events), yaml.MappingEndEvent):
                key = self._node(following, depth + 1)
                pairs.append((key, self._node(next(self._events), depth + 1)))
            node = Node("mapping", pairs, start, _end(following))
        if event.anchor:
            self._open.discard(event.anchor)
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        name = event.anchor or ""
        if name in self._open:
            raise _Stop(_start(event), "this alias refers to something that contains it")
        if name not in self._anchors:
            hint = "define the anchor with & above, or quote the text if it starts with *"
            raise _Stop(_start(event), "this alias (*) refers to no anchor", hint)
        return self._anchors[name]


class _Builder:
    """Nodes to plain values; fills the document's table of places, bounds what aliases can expand to."""

    def __init__(self, document: YamlDocument) -> None:
        self._document = document
        self._budget = MAX_VALUES

    def build(self, node: Node, path: Path) -> Any:
        self._budget -= 1
        if self._budget < 0 or len(path) > MAX_DEPTH:
            raise _Stop(node.start, "aliases expand to far too many values", "write the values out")
        self._document._values[path] = node
        if node.kind == "scalar":
            return plain_value(node.value) if node.plain else node.value
        if node.kind == "sequence":
            return tuple(self.build(item, (*path, index)) for index, item in enumerate(node.value))
        return self._mapping(node, path)

    def _mapping(self, node: Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        own: set[str] = set()
        for key_node, value_node in node.value:
            if _is_merge(key_node):
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in own:
                first = self._document.place(self._document._keys[(*path, key)].start)
                message = f"this key appears twice, first on line {first.line}"
                _add(self._document, key_node.start, path, message, "keep one of them")
                continue
            own.add(key)
            self._document._keys[(*path, key)] = key_node
            result[key] = self.build(value_node, (*path, key))
        for key_node, value_node in node.value:
            if _is_merge(key_node):
                self._merge(value_node, path, result)
        return result

    def _merge(self, node: Node, path: Path, result: dict[str, Any]) -> None:
        """``<<: *base`` or ``<<: [*a, *b]``: what is already there wins."""
        sources = node.value if node.kind == "sequence" else [node]
        for source in sources:
            if source.kind != "mapping":
                _add(
                    self._document,
                    source.start,
                    path,
                    "`<<` takes a mapping, or a list of mappings",
                    "as in <<: *base",
                )
                continue
            for key_node, value_node in source.value:
                if _is_merge(key_node):
                    if len(path) > MAX_DEPTH or self._budget < 0:
                        raise _Stop(key_node.start, "merged too deep", "write the values out")
                    self._budget -= 1
                    self._merge(value_node, path, result)
                elif (key := self._key(key_node, path)) is not None and key not in result:
                    self._document._keys[(*path, key)] = key_node
                    result[key] = self.build(value_node, (*path, key))

    def _key(self, node: Node, path: Path) -> str | None:
        if node.kind == "scalar":
            value = plain_value(node.value) if node.plain else node.value
            if isinstance(value, str):
                return value
            if node.value:
                kind = (
                    "a true/false word"
                    if isinstance(value, bool)
                    else "null"
                    if value is None
                    else "a number"
                )
                message = f"this name is {kind} to YAML, and a name must be text"
                _add(self._document, node.start, path, message, 'write it in quotes, as in "123"')
                return None
        _add(self._document, node.start, path, "a key must be text", "write a name before the `:`")
        return None


def _is_merge(node: Node) -> bool:
    return node.kind == "scalar" and node.plain and node.value == "<<"


def plain_value(text: str) -> Any:
    """An unquoted scalar's value.

    ``yes``, ``no``, ``on``, ``off`` are true/false words here as in YAML 1.1, so that they are refused where
    text is meant; dates, ``1:30`` and ``1_000`` are text as in YAML 1.2.
    """
    if text in _NULL:
        return None
    if text.isascii() and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def find(value: Any, pattern: tuple[str | None, ...]) -> Iterator[tuple[Path, Any]]:
    """Every (path, value) below ``value`` that matches; None is any key or index. Tolerates any shape."""
    if not pattern:
        yield (), value
        return
    head, rest = pattern[0], pattern[1:]
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if head is None or key == head]
    elif isinstance(value, tuple) and head is None:
        items = list(enumerate(value))
    for key, item in items:
        for path, found in find(item, rest):
            yield (key, *path), found
