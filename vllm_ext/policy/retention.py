"""The ``retention`` section's shape: which cached blocks are kept when room is needed.

The vocabulary is TensorRT-LLM's: ranges of tokens, a priority from 0 (goes first) to 100 with 35 as the
ordinary one, an optional time after which the range is ordinary again, and separate values for decoded
blocks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from vllm_ext.policy.fields import (
    NAME_PATTERN,
    RESERVED_NAMES,
    Name,
    Priority,
    Section,
    Share,
    Span,
    Text,
    Ttl,
    is_valid_name,
    problem,
    without_null,
)

DEFAULT_CLASS = "default"
"""The class of what no rule names. Rules may give it, to except something from the rules below them."""
UNKNOWN = "unknown"
"""In a list of tenants: whoever no key and no gateway vouches for."""
EVERY_OTHER = "*"
"""Under ``retention.tenants``: each tenant that has no line of its own."""
DOMAIN_WORDS = ("public", "isolated")
"""In a list of domains: those of unknown callers."""

PROMPT_ROLES = ("system", "history", "tail")


def _or_words(words: tuple[str, ...]) -> Any:
    """A name, or one of some words that cannot be names."""

    def validate(value: str) -> str:
        if value in words or (is_valid_name(value) and value not in RESERVED_NAMES):
            return value
        if value in RESERVED_NAMES:
            raise problem(f"`{value}` cannot be meant here", f"a declared name, or {' or '.join(words)}")
        raise problem("not a name", "1 to 128 letters, digits and . _ : - are allowed")

    others = sorted(RESERVED_NAMES - set(words))
    schema = {"anyOf": [{"enum": list(words)}, {"pattern": NAME_PATTERN, "not": {"enum": others}}]}
    return AfterValidator(validate), WithJsonSchema({"type": "string", **schema})


TenantRef = Annotated[str, *_or_words((UNKNOWN,))]
TenantOrRest = Annotated[str, *_or_words((UNKNOWN, EVERY_OTHER))]
DomainRef = Annotated[str, *_or_words(DOMAIN_WORDS)]


_T = TypeVar("_T")


def _class_name(value: str) -> str:
    if value == DEFAULT_CLASS:
        raise problem(
            "`default` is the class of what no rule names", "write its values under `default` above"
        )
    return value


def _prefixes(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, str):
        return value if value == "any" else (value,)
    if not isinstance(value, tuple):
        raise problem("expected names of shared prefixes, or the word any", "write any, or [name, name]")
    return value


def _not_empty(value: _T) -> _T:
    if value == ():
        raise problem("an empty list matches nothing", "fill it, or remove the line")
    return value


def _list_schema(schema: dict[str, Any]) -> None:
    without_null(schema)
    schema["minItems"] = 1


_List = (AfterValidator(_not_empty), Field(json_schema_extra=_list_schema))
_Optional = Field(json_schema_extra=without_null)


class RetentionDefault(Section):
    """What nothing else says."""

    priority: Priority = 35
    """0 goes first, 100 last. Also what a class falls back to when its ttl has run out."""

    decoded_priority: Annotated[Priority | None, _Optional] = None
    """The same for blocks of decoded tokens. Default: as `priority`."""

    @property
    def decoded(self) -> int:
        """The priority of decoded blocks."""
        return self.priority if self.decoded_priority is None else self.decoded_priority


def _class_schema(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"required": ["priority"]}, {"required": ["decoded_priority"]}]
    schema["dependentRequired"] = {"ttl": ["priority"], "decoded_ttl": ["decoded_priority"]}


class RetentionClass(Section):
    """How well some blocks are kept, and for how long."""

    model_config = ConfigDict(json_schema_extra=_class_schema)

    priority: Annotated[Priority | None, _Optional] = None
    """0 goes first, 100 last. Default: the default's."""

    ttl: Annotated[Ttl | None, _Optional] = None
    """How long, as in 10m; afterwards the default's priority holds. Only with a priority above that. Left
    out: for good."""

    decoded_priority: Annotated[Priority | None, _Optional] = None
    """The same for blocks of decoded tokens. Default: the default's."""

    decoded_ttl: Annotated[Ttl | None, _Optional] = None
    """How long `decoded_priority` holds."""

    @model_validator(mode="after")
    def _says_something(self) -> RetentionClass:
        if self.priority is None and self.decoded_priority is None:
            raise problem("the class says nothing", "give it a priority or a decoded_priority")
        for ttl, priority in (("ttl", "priority"), ("decoded_ttl", "decoded_priority")):
            if getattr(self, ttl) is not None and getattr(self, priority) is None:
                raise problem(f"{ttl} without {priority}", f"add `{priority}:`")
        return self


def _rule_schema(schema: dict[str, Any]) -> None:
    decoded = {"properties": {"role": {"const": "decoded"}}, "required": ["role"]}
    places = {"anyOf": [{"required": ["tokens"]}, {"required": ["shared_prefix"]}]}
    schema["not"] = {"allOf": [decoded, places]}


class RetentionRule(Section):
    """Gives a class to the tokens for which all its conditions hold, unless an earlier rule did."""

    model_config = ConfigDict(json_schema_extra=_rule_schema)

    class_name: Annotated[Name, Field(alias="class")]
    """One of `classes`, or default."""

    tenants: Annotated[tuple[TenantRef, ...] | None, *_List] = None
    """Requests of these tenants; `unknown` is whoever nobody vouches for."""

    domains: Annotated[tuple[DomainRef, ...] | None, *_List] = None
    """Requests of these trust domains; also `public` and `isolated`."""

    models: Annotated[tuple[Text, ...] | None, *_List] = None
    """Requests for these models, by the name that the server gives them."""

    adapters: Annotated[tuple[Text, ...] | None, *_List] = None
    """Requests with these LoRA adapters, by name."""

    role: Annotated[Literal["system", "history", "tail", "decoded"] | None, _Optional] = None
    """A part of the conversation: the system prompt, the finished turns, what follows the last answer, or
    the tokens that the model decodes."""

    tokens: Annotated[Span | None, _Optional] = None
    """Prompt tokens by number, as in 0..512 (without token 512), or -256.. for the last 256."""

    shared_prefix: Annotated[
        Literal["any"] | tuple[Name, ...] | None,
        BeforeValidator(_prefixes),
        AfterValidator(_not_empty),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "pattern": NAME_PATTERN},
                    {"type": "array", "items": {"type": "string", "pattern": NAME_PATTERN}, "minItems": 1},
                ]
            }
        ),
    ] = None
    """The head of a prompt that is a registered shared prefix: a name, a list of names, or `any`."""

    @property
    def is_for_places(self) -> bool:
        """Whether it picks tokens of the prompt rather than whole requests."""
        return self.tokens is not None or self.shared_prefix is not None or self.role in PROMPT_ROLES

    @model_validator(mode="after")
    def _can_hold(self) -> RetentionRule:
        if self.role == "decoded" and self.is_for_places:
            raise problem(
                "decoded tokens are never in `tokens` or in a shared prefix", "remove it, or the role"
            )
        return self


def _share_schema(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"required": ["min_share"]}, {"required": ["max_share"]}]


class TenantShare(Section):
    """A tenant's part of the KV blocks. Both bounds yield when nobody else wants the room."""

    model_config = ConfigDict(json_schema_extra=_share_schema)

    min_share: Annotated[Share | None, _Optional] = None
    """Others do not evict the tenant below this, as in 20%, while they have any other victim."""

    max_share: Annotated[Share | None, _Optional] = None
    """Above this, as in 60%, the tenant's own blocks are evicted first."""

    @model_validator(mode="after")
    def _fits(self) -> TenantShare:
        if self.min_share is None and self.max_share is None:
            raise problem("no share is given", "give a min_share, a max_share or both")
        if self.max_share == 0:
            raise problem(
                "a max_share of nothing", "more than 0; to cache nothing of a tenant's, give it a class"
            )
        if self.max_share is not None and self.min_share is not None and self.max_share < self.min_share:
            raise problem("max_share is below min_share", "raise the one or lower the other")
        return self


class TenantWishes(Section):
    """What one tenant's clients may ask for, where it differs."""

    allow: Annotated[Literal["never", "clamped"] | None, _Optional] = None
    """Whether they are heard. Default: as for all."""

    max_priority: Annotated[Priority | None, _Optional] = None
    """The highest priority that they can give. Default: as for all."""

    max_ttl: Annotated[Ttl | None, _Optional] = None
    """How long it can last. Default: as for all."""


class WishBounds(NamedTuple):
    """What the clients of one tenant may ask for."""

    allowed: bool
    max_priority: int
    max_ttl: float
    """Seconds that a raised priority may last."""


class ClientWishes(Section):
    """What clients may ask for in `vllm_xargs`."""

    allow: Literal["never", "clamped"] = "never"
    """never: what they ask is ignored. clamped: heard, within the bounds below. Counted either way, and never
    an error."""

    max_priority: Annotated[Priority | None, _Optional] = None
    """The highest priority that a client can give its blocks. Default: the default's priority, so that
    clients can only lower."""

    max_ttl: Ttl = 600.0
    """How long a raised priority can last, as in 10m."""

    tenants: dict[TenantRef, TenantWishes] = Field(default_factory=dict)
    """Tenants for whom something else holds."""

    def bounds(self, tenant: str, default_priority: int) -> WishBounds:
        """What holds for a tenant (``unknown`` for callers that nobody vouches for)."""
        own = self.tenants.get(tenant, TenantWishes())
        priority = self.max_priority if own.max_priority is None else own.max_priority
        return WishBounds(
            (own.allow or self.allow) == "clamped",
            default_priority if priority is None else priority,
            self.max_ttl if own.max_ttl is None else own.max_ttl,
        )


class RetentionPolicy(Section):
    """Which cached blocks are kept when room is needed."""

    order: Literal["lru", "reuse"] = "lru"
    """Among blocks of one priority: lru (exactly vLLM's own order) or reuse (learns from traffic what comes
    back). Needs a restart to change."""

    default: RetentionDefault = RetentionDefault()
    """What holds for tokens that no rule names."""

    classes: dict[Annotated[Name, AfterValidator(_class_name)], RetentionClass] = Field(default_factory=dict)
    """Priorities by name, for the rules."""

    rules: tuple[RetentionRule, ...] = ()
    """Which tokens get which class: for each token, the first rule whose conditions all hold."""

    tenants: dict[TenantOrRest, TenantShare] = Field(default_factory=dict)
    """Parts of the KV blocks by tenant; `*` is each tenant without a line of its own, `unknown` all unknown
    callers together."""

    client_wishes: ClientWishes = ClientWishes()
    """What clients may ask for."""

    def share_of(self, tenant: str) -> TenantShare | None:
        """The share of a tenant (``unknown`` for callers that nobody vouches for); None: no bounds."""
        return self.tenants.get(tenant) or self.tenants.get(EVERY_OTHER)


def retention_json_schema(definitions: dict[str, Any]) -> None:
    """Adds to JSON Schema definitions what pydantic leaves out: which names are allowed."""
    names = {"pattern": NAME_PATTERN}
    words = {
        ("RetentionPolicy", "classes"): RESERVED_NAMES | {DEFAULT_CLASS},
        ("RetentionPolicy", "tenants"): RESERVED_NAMES - {UNKNOWN},
        ("ClientWishes", "tenants"): RESERVED_NAMES - {UNKNOWN},
    }
    for (model, field), refused in words.items():
        schema: dict[str, Any] = {**names, "not": {"enum": sorted(refused)}}
        if (model, field) == ("RetentionPolicy", "tenants"):
            schema = {"anyOf": [{"const": EVERY_OTHER}, schema]}
        definitions[model]["properties"][field]["propertyNames"] = schema
    for field in ("default", "client_wishes"):
        definitions["RetentionPolicy"]["properties"][field].pop("default")  # it would hold nulls
    definitions["RetentionRule"]["properties"]["shared_prefix"].pop("default")
