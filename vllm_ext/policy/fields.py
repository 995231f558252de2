"""The kinds of value that a policy's fields hold: names, references, quantities, and what is said of a wrong
one.

Models are strict (no ``"1"`` for 1), closed (unknown keys are errors) and frozen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from vllm_ext.policy.references import (
    KEY_PATTERN,
    SECRET_PATTERN,
    Reference,
    ReferenceProblem,
    parse_key_reference,
    parse_secret_reference,
)
from vllm_ext.policy.units import (
    DURATION_PATTERN,
    SHARE_PATTERN,
    SIZE_PATTERN,
    SPAN_PATTERN,
    TokenSpan,
    parse_duration,
    parse_share,
    parse_size,
    parse_span,
)

NAME_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
RESERVED_NAMES = frozenset({"all", "isolated", "other", "public", "unknown"})
"""Words with a meaning of their own in policies and metrics; nothing that a policy lists bears one."""

MAX_REPLAY_WINDOW = 3600.0
MAX_TTL = 30 * 24 * 3600.0
_T = TypeVar("_T")
_NAME = re.compile(NAME_PATTERN.strip("^$"))


def problem(message: str, hint: str = "") -> PydanticCustomError:
    """A validation error with a hint, taken apart again by ``translate``."""
    return PydanticCustomError("policy", "{message}", {"message": message, "hint": hint})


def is_valid_name(name: str) -> bool:
    """Whether a tenant or trust domain can be called so at all."""
    return _NAME.fullmatch(name) is not None


def _checked_name(value: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise problem("not a name", "1 to 128 letters, digits and . _ : - are allowed")
    if value in RESERVED_NAMES:
        raise problem(f"`{value}` has a meaning of its own and cannot be a name", "choose another")
    return value


def _reference(parse: Callable[[object], Reference]) -> Callable[[object], Reference]:
    def validate(value: object) -> Reference:
        try:
            return parse(value)
        except ReferenceProblem as error:
            raise problem(error.message, error.hint) from None

    return validate


def _quantity(parse: Callable[[object], _T]) -> Callable[[object], _T]:
    def validate(value: object) -> _T:
        try:
            return parse(value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            raise problem(message, hint) from None

    return validate


def _replay_window(value: float) -> float:
    if not 0 < value <= MAX_REPLAY_WINDOW:
        raise problem("out of range", "more than 0, at most 1h")
    return value


def _ttl(value: float) -> float:
    if not 0 < value <= MAX_TTL:
        raise problem("out of range", "more than 0, at most 720h")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise problem("the text is empty", "write the text, or remove the field")
    return value


def whole_section(value: object) -> object:
    """Refuses `name:` with nothing after it."""
    if value is None:
        raise problem("the section is empty", "write `{}` after it for the defaults, or remove the line")
    return value


def without_null(schema: dict[str, Any]) -> None:
    """Absent is allowed, an empty section is not: say so to editors."""
    choices = [choice for choice in schema.pop("anyOf", []) if choice.get("type") != "null"]
    schema.update(choices[0] if len(choices) == 1 else {"anyOf": choices})
    schema.pop("default", None)


Name = Annotated[
    str, AfterValidator(_checked_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})
]
KeyRef = Annotated[
    Reference,
    PlainValidator(_reference(parse_key_reference)),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": KEY_PATTERN}),
]
SecretRef = Annotated[
    Reference,
    PlainValidator(_reference(parse_secret_reference)),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": SECRET_PATTERN}),
]


def _duration_schema(maximum: float) -> WithJsonSchema:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": maximum}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": DURATION_PATTERN}]})


Duration = Annotated[
    float,
    BeforeValidator(_quantity(parse_duration)),
    AfterValidator(_replay_window),
    _duration_schema(MAX_REPLAY_WINDOW),
]
Ttl = Annotated[
    float, BeforeValidator(_quantity(parse_duration)), AfterValidator(_ttl), _duration_schema(MAX_TTL)
]
Priority = Annotated[int, Field(ge=0, le=100)]
Share = Annotated[
    float,
    BeforeValidator(_quantity(parse_share)),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": SHARE_PATTERN},
            ]
        }
    ),
]
Span = Annotated[
    TokenSpan,
    PlainValidator(_quantity(parse_span)),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": SPAN_PATTERN}),
]
Size = Annotated[
    int,
    BeforeValidator(_quantity(parse_size)),
    Field(gt=0),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
Text = Annotated[str, AfterValidator(_not_blank), WithJsonSchema({"type": "string", "minLength": 1})]


class Section(BaseModel):
    """What all parts of a policy are made of."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )
