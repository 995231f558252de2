"""The policy file's shape. What a field means to an operator stands here, and reaches their editor as JSON
Schema.

Models are strict (no ``"1"`` for 1), closed (unknown keys are errors) and frozen. Positions, references to
files and variables, and what one field asks of another are the business of ``checks``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from vllm_ext.policy.fields import (
    NAME_PATTERN,
    RESERVED_NAMES,
    Duration,
    KeyRef,
    Name,
    SecretRef,
    Section,
    Size,
    Text,
    problem,
    whole_section,
    without_null,
)
from vllm_ext.policy.retention import RetentionPolicy, retention_json_schema
from vllm_ext.policy.telemetry import TelemetryPolicy


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise problem("this vllm-ext reads version 1 of the policy format", "write `version: 1`")
    return value


def _domains(value: object) -> object:
    if not isinstance(value, tuple) and value != "all":
        raise problem("expected a list of trust domains, or the word all", "write [name, name] or all")
    return value


Version = Annotated[Literal[1], BeforeValidator(_version)]


class TenantPolicy(Section):
    """One tenant: how it is recognised and whom it shares with."""

    domain: Name | None = None
    """Trust domain: tenants in one domain may reuse each other's cached prefixes. Default: the tenant's own
    name."""

    api_keys: tuple[KeyRef, ...] = ()
    """API keys that identify this tenant: sha256:DIGEST (see `vllm-ext policy digest`), env:NAME or
    file:PATH."""


class GatewayPolicy(Section):
    """A trusted gateway that authenticates users itself and signs the tenant's name into a header."""

    secret: SecretRef
    """The secret shared with the gateway, at least 16 bytes: env:NAME or file:PATH."""

    replay_window: Duration = 30.0
    """How old, or how far ahead, a signature's timestamp may be, as in 30s; at most 1h."""

    max_body: Size = 64 * 1024 * 1024
    """The largest request body whose digest is checked, as in 64MiB."""

    unlisted_tenants: Literal["own_domain", "unknown"] = "own_domain"
    """A signed tenant that `tenants` does not list: a domain of its own, or the rule for the unknown."""


class Message(Section):
    """One chat message of a shared prefix."""

    role: Literal["system", "developer", "user", "assistant"]
    """Who speaks."""

    content: Text
    """What is said, exactly as clients send it."""


def _one_form_schema(schema: dict[str, Any]) -> None:
    schema["oneOf"] = [{"required": [form]} for form in ("text", "file", "messages")]


class SharedPrefixPolicy(Section):
    """A prompt that holds nothing private: its cached blocks are shared among several trust domains."""

    model_config = ConfigDict(json_schema_extra=_one_form_schema)

    name: Name
    """A name of its own, for logs and metrics."""

    domains: Annotated[
        Literal["all"] | tuple[Name, ...],
        BeforeValidator(_domains),
        WithJsonSchema(
            {
                "anyOf": [
                    {"const": "all"},
                    {"type": "array", "items": {"type": "string", "pattern": NAME_PATTERN}, "minItems": 1},
                ]
            }
        ),
    ]
    """The trust domains that share it, or `all`: every known tenant's domain, never public or isolated
    requests."""

    text: Annotated[Text | None, Field(json_schema_extra=without_null)] = None
    """The prompt's beginning as plain text (for completions)."""

    file: Annotated[Text | None, Field(json_schema_extra=without_null)] = None
    """A UTF-8 file with that text; a relative path starts at this file's folder."""

    messages: Annotated[tuple[Message, ...] | None, Field(json_schema_extra=without_null)] = None
    """The first messages of a chat; the model's chat template is applied."""

    @model_validator(mode="after")
    def _one_form(self) -> SharedPrefixPolicy:
        forms = [form for form in ("text", "file", "messages") if getattr(self, form) is not None]
        if len(forms) != 1:
            given = f"here are {' and '.join(forms)}" if forms else "here is none"
            raise problem(f"exactly one of text, file and messages is needed, {given}", "keep one")
        if self.messages == () or self.domains == ():
            raise problem("an empty list shares nothing", "fill it, or remove the shared prefix")
        return self


class TenancyPolicy(Section):
    """Who is asking, and who may reuse whose cached prefixes."""

    salt_secret: SecretRef | None = None
    """Secret (at least 16 bytes) behind all cache salts: env:NAME or file:PATH. Same on all replicas. Left
    out: random at each server start. Needs a restart to change."""

    unknown: Literal["reject", "isolate", "public"] = "isolate"
    """A request that no key and no gateway vouches for: reject (401), isolate (shares with no one) or public
    (shares with all others that are unknown)."""

    model_id: Text | None = None
    """Stands for the model's name, revision and tokenizer in the salts, for replicas that load one model from
    different paths. Needs a restart to change."""

    tenants: dict[Name, TenantPolicy] = Field(default_factory=dict)
    """The known tenants, by name."""

    trusted_connectors: tuple[Text, ...] = ()
    """KV connectors, by class name, that the operator knows to key KV by block hash. Those that vllm_ext
    knows need no entry; any other is refused at start, since it might hand KV across trust domains."""

    gateway: Annotated[
        GatewayPolicy | None, BeforeValidator(whole_section), Field(json_schema_extra=without_null)
    ] = None
    """Trust tenants named in a header that a gateway has signed."""

    shared_prefixes: tuple[SharedPrefixPolicy, ...] = ()
    """Prompts that hold nothing private and are shared across trust domains."""


class AdminPolicy(Section):
    """Who may look at the policy and reload it over HTTP."""

    api_keys: tuple[KeyRef, ...] = ()
    """Keys for /vllm_ext/v1/policy; without any, those routes answer 403. Not the key of a tenant."""


class MetricsPolicy(Section):
    """Prometheus metrics."""

    max_tenant_labels: Annotated[int, Field(ge=1, le=100_000)] = 100
    """How many tenants get a label value of their own; the others are counted together as `other`."""


class Policy(Section):
    """Policy for the vllm_ext plugin of vLLM."""

    version: Version
    """The version of this format. Always 1."""

    tenancy: Annotated[
        TenancyPolicy | None, BeforeValidator(whole_section), Field(json_schema_extra=without_null)
    ] = None
    """Tenants, trust domains and what they share. Without this section vLLM's cache is shared by all."""

    retention: Annotated[
        RetentionPolicy | None, BeforeValidator(whole_section), Field(json_schema_extra=without_null)
    ] = None
    """Which cached blocks are kept when room is needed. Without this section vLLM's own order."""

    telemetry: Annotated[
        TelemetryPolicy | None, BeforeValidator(whole_section), Field(json_schema_extra=without_null)
    ] = None
    """What the server writes down about itself, for `vllm-ext replay`."""

    admin: AdminPolicy = AdminPolicy()
    """Who may look at the policy and reload it over HTTP."""

    metrics: MetricsPolicy = MetricsPolicy()
    """Prometheus metrics."""

    @property
    def is_for_the_engine(self) -> bool:
        """Whether some section asks for our scheduler; without one vLLM runs as if we were not there."""
        return (self.tenancy or self.retention or self.telemetry) is not None


def policy_json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a policy file, for editors and `jsonschema`."""
    schema = Policy.model_json_schema()
    tenants = schema["$defs"]["TenancyPolicy"]["properties"]["tenants"]
    tenants["propertyNames"] = {"pattern": NAME_PATTERN, "not": {"enum": sorted(RESERVED_NAMES)}}
    retention_json_schema(schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_one_line(schema)}


def _one_line(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: " ".join(value.split())
            if key == "description" and isinstance(value, str)
            else _one_line(value)
            for key, value in schema.items()
        }
    return [_one_line(item) for item in schema] if isinstance(schema, list) else schema
