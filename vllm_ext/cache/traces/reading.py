"""What the readers share: JSON with places, and fields of the right type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_ext.cache.traces.trace import TraceError


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: cannot read the trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text (byte {error.start})") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """``file:line`` and the object on it, for every line that is not empty."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, as_object(_parse(line, place), place)


def json_file(path: Path) -> dict[str, Any]:
    return as_object(_parse(read_text(path), str(path)), str(path))


def _parse(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{place}: not JSON: {error}") from error


def as_object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{place}: expected a JSON object, found {_kind(value)}")
    return value


def number(record: dict[str, Any], field: str, place: str, default: float | None = None) -> float:
    """A finite number; `default` (where there is one) if the field is absent or null."""
    value = record.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise TraceError(f"{place}: {field}: expected a number, found {_kind(value)}")
    return float(value)


def items(record: dict[str, Any], field: str, place: str, kinds: type | tuple[type, ...]) -> list[Any]:
    """A list whose items are all of `kinds`; empty if the field is absent or null."""
    value = record.get(field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise TraceError(f"{place}: {field}: expected a list, found {_kind(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise TraceError(f"{place}: {field}[{index}]: {_kind(item)} is not allowed here")
    return value


def word(record: dict[str, Any], field: str, place: str) -> str | None:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise TraceError(f"{place}: {field}: expected a string, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false"}.get(
        type(value), f"the number {value}"
    )
