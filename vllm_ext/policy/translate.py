"""pydantic's errors as policy problems: our words, the file's lines, the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vllm_ext.policy.problems import Path, PolicyProblem, format_path, is_secret_path
from vllm_ext.policy.schema import Policy
from vllm_ext.policy.yaml_source import YamlDocument

MAX_HOMES = 2
"""How many places a hint names for a key that stands in the wrong one."""

_TYPES = {
    "model_type": ("expected a mapping", "indented `name: value` lines, or `{}` for the defaults"),
    "dict_type": ("expected a mapping", "indented `name: value` lines, or `{}` for none"),
    "tuple_type": ("expected a list", "one `- item` a line, or [item, item]"),
    "string_type": ("expected text", None),
    "int_type": ("expected a whole number", None),
    "float_type": ("expected a number", None),
    "bool_type": ("expected true or false", None),
}


def translate(error: ValidationError, document: YamlDocument) -> Iterator[PolicyProblem]:
    """Every error of one validation, each at its place in the file."""
    for details in error.errors(include_input=False, include_url=False):
        if str(details["loc"][-1:]).startswith('("literal['):
            continue  # one branch of a word or a list; the other branch says what is wrong with the list
        yield _problem(details, document)


def at(document: YamlDocument, path: Path, message: str, hint: str | None = None) -> PolicyProblem:
    """A problem with the value at ``path``."""
    line, column = document.nearest_position(path)
    return PolicyProblem(line, column, format_path(path), message, hint or None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """``did you mean …?`` when something close is known."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def _problem(details: ErrorDetails, document: YamlDocument) -> PolicyProblem:
    path = _path(details["loc"], document)
    kind, context = details["type"], details.get("ctx", {})
    if kind == "policy":
        place = document.position(path) if details["loc"][-1:] == ("[key]",) else None
        problem = at(document, path, context["message"], context["hint"])
        return (
            problem if place is None else PolicyProblem(*place, problem.field, problem.message, problem.hint)
        )
    if kind == "extra_forbidden":
        return _unknown_key(path, document)
    if kind == "missing":
        line, column = document.position(path[:-1]) or (1, 1)
        hint = "write `version: 1` at the top" if path == ("version",) else f"add `{path[-1]}:`"
        return PolicyProblem(line, column, format_path(path), "required, but missing", hint)
    raw = None if is_secret_path(path) else document.raw(path)
    if kind == "literal_error":
        return at(
            document,
            path,
            f"must be {context['expected'].replace(chr(39), '`')}",
            _word_hint(path, raw, context),
        )
    if kind in _TYPES:
        message, advice = _TYPES[kind]
        if kind == "string_type" and raw:
            advice = "to YAML this is a number or a true/false word: write it in quotes"
        return at(document, path, message if raw != "" else f"{message}, here is nothing", advice)
    return at(document, path, details["msg"].replace("Input should be", "must be"))


def _path(loc: tuple[int | str, ...], document: YamlDocument) -> Path:
    """The location without what pydantic adds to it: names of union branches, ``[key]``."""
    path: Path = ()
    for index, part in enumerate(loc):
        if (*path, part) in document:
            path = (*path, part)
        elif index == len(loc) - 1 and part != "[key]":
            path = (*path, part)  # a missing field
    return path


def _word_hint(path: Path, raw: str | None, context: dict[str, Any]) -> str | None:
    if raw is None:
        return None
    if path[-1] == "unknown" and raw.lower() in ("off", "no", "false"):
        return f"`{raw}` is a true/false word to YAML; for one cache for all unknown write `public`"
    return nearest(raw, [word.strip("' ") for word in context["expected"].replace(" or ", ",").split(",")])


def _unknown_key(path: Path, document: YamlDocument) -> PolicyProblem:
    line, column = document.position(path) or (1, 1)
    name, parent = str(path[-1]), path[:-1]
    if is_secret_path(parent):
        return PolicyProblem(line, column, format_path(parent), "unknown key")
    known = fields_at(parent)
    hint = _home_hint(name) or nearest(name, known)
    if hint is None and (elsewhere := difflib.get_close_matches(name, sorted(_HOMES), n=1, cutoff=0.8)):
        hint = _home_hint(elsewhere[0])
    hint = hint or (f"known here: {', '.join(known)}" if known else None)
    return PolicyProblem(line, column, format_path(path), "unknown key", hint)


def _home_hint(name: str) -> str | None:
    nearest_first = sorted(_HOMES.get(name, []), key=len)[:MAX_HOMES]
    homes = " or ".join(f"`{format_path(home)}`" if home else "the top level" for home in nearest_first)
    return f"`{name}` belongs under {homes}" if homes else None


def fields_at(path: Path) -> list[str]:
    """The keys that the schema knows at a path of the document; empty where names are free."""
    annotation: Any = Policy
    for part in path:
        model = _model(annotation)
        annotation = _item(annotation) if model is None else _fields(model).get(str(part))
    model = _model(annotation)
    return list(_fields(model)) if model else []


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """Key in the file -> annotation."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]
    # `X | None` is X; `dict[str, X]` and `tuple[X, ...]` are not.
    return models[0] if models and type(None) in get_args(annotation) else None


def _item(annotation: Any) -> Any:
    for arg in get_args(annotation):
        if _model(arg) is not None:
            return arg
        if get_args(arg) and (inner := _item(arg)) is not None:
            return inner
    return None


def _homes(annotation: Any, path: Path) -> Iterator[tuple[str, Path]]:
    model = _model(annotation)
    if model is None:
        if (item := _item(annotation)) is not None:
            yield from _homes(item, (*path, "NAME" if getattr(annotation, "__origin__", None) is dict else 0))
        return
    for name, inner in _fields(model).items():
        yield name, path
        yield from _homes(inner, (*path, name))


_HOMES: dict[str, list[Path]] = {}
for _name, _home in _homes(Policy, ()):
    _HOMES.setdefault(_name, []).append(_home)

VOCABULARY = frozenset(_HOMES)
"""All keys that the schema knows, anywhere: words that are safe to repeat."""
