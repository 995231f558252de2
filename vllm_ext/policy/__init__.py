"""The operator's policy: a YAML file, checked, loaded into one immutable snapshot, reloaded while the server
runs.

Start at ``schema`` for what a policy says; ``loading`` makes a ``PolicySnapshot`` of it, ``PolicyStore``
keeps the current one, ``explain`` tells what it means for a tenant.
"""

from __future__ import annotations

from vllm_ext.policy.explain import explain_tenant
from vllm_ext.policy.loading import default_snapshot, load_policy, parse_policy
from vllm_ext.policy.problems import PolicyError, PolicyProblem, Position
from vllm_ext.policy.references import Reference, key_digest
from vllm_ext.policy.retention import (
    ClientWishes,
    RetentionClass,
    RetentionDefault,
    RetentionPolicy,
    RetentionRule,
    TenantShare,
    TenantWishes,
    WishBounds,
)
from vllm_ext.policy.rows import ExplainRow
from vllm_ext.policy.schema import (
    AdminPolicy,
    GatewayPolicy,
    Message,
    MetricsPolicy,
    Policy,
    SharedPrefixPolicy,
    TenancyPolicy,
    TenantPolicy,
    policy_json_schema,
)
from vllm_ext.policy.snapshot import PolicySnapshot
from vllm_ext.policy.store import PolicyStore, ReloadResult
from vllm_ext.policy.telemetry import TelemetryPolicy

__all__ = [
    "AdminPolicy",
    "ClientWishes",
    "ExplainRow",
    "GatewayPolicy",
    "Message",
    "MetricsPolicy",
    "Policy",
    "PolicyError",
    "PolicyProblem",
    "PolicySnapshot",
    "PolicyStore",
    "Position",
    "Reference",
    "ReloadResult",
    "RetentionClass",
    "RetentionDefault",
    "RetentionPolicy",
    "RetentionRule",
    "SharedPrefixPolicy",
    "TelemetryPolicy",
    "TenancyPolicy",
    "TenantPolicy",
    "TenantShare",
    "TenantWishes",
    "WishBounds",
    "default_snapshot",
    "explain_tenant",
    "key_digest",
    "load_policy",
    "parse_policy",
    "policy_json_schema",
]
