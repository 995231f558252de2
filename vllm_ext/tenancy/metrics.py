"""Prometheus metrics of tenancy. They appear in vLLM's own `/metrics`.

Every name that this pillar exports is created here and nowhere else.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from vllm_ext.engine_totals import EngineTotals
from vllm_ext.labels import LabelCap
from vllm_ext.tenancy.identity import Identity

TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

REJECTION_REASONS = (
    "no_credentials", "unknown_key", "conflicting_keys", "unlisted_tenant", "malformed_header",
    "no_tenant_named", "bad_signature", "outside_window", "replayed", "replay_memory_full", "internal_error",
)  # fmt: skip
STAMP_FAILURES = ("missing", "malformed", "bad_mac", "other_version", "other_session")


class TenancyMetrics:
    """All series, created once per process.

    Args:
        registry: Prometheus registry; the default one is what vLLM serves.
        tenants: label values kept for tenants.
        domains: label values kept for trust domains.
    """

    def __init__(self, tenants: LabelCap, domains: LabelCap, registry: CollectorRegistry = REGISTRY) -> None:
        self.tenants = tenants
        self.domains = domains
        who = ("tenant", "domain")
        self._requests = Counter(
            "vllm_ext_requests",
            "Requests that reached the engine (each prompt and each of n samples is one), by who asked and "
            "which rule said so.",
            (*who, "identified_by"),
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "vllm_ext_prompt_tokens",
            "Prompt tokens of requests whose prefill finished.",
            who,
            registry=registry,
        )
        self._reused_tokens = Counter(
            "vllm_ext_reused_prompt_tokens",
            "Prompt tokens that came from the prefix cache instead of being computed.",
            who,
            registry=registry,
        )
        self._reused_per_request = Histogram(
            "vllm_ext_request_reused_prompt_tokens",
            "Reused prompt tokens per request.",
            who,
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._h_tokens = Histogram(
            "vllm_ext_request_h_tokens",
            "H_tokens per request: reused prompt tokens / prompt tokens, 0 to 1.",
            who,
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        self._decisions = Counter(
            "vllm_ext_isolation_decisions",
            "How the engine salted a request's blocks (declared, unlisted, shared_prefix, public, isolated, "
            "rejected) and why.",
            ("decision", "reason"),
            registry=registry,
        )
        self._rejections = Counter(
            "vllm_ext_rejected_requests",
            "Requests answered 401 by the policy's `unknown: reject` (or 500, when our own code failed).",
            ("reason",),
            registry=registry,
        )
        self._stamp_failures = Counter(
            "vllm_ext_stamp_failures",
            "Requests that reached the engine without a genuine stamp of the front end.",
            ("reason",),
            registry=registry,
        )

        # A series that appears with its first event is missed by `increase()`: these begin at 0.
        for counter, values in (
            (self._rejections, REJECTION_REASONS),
            (self._stamp_failures, STAMP_FAILURES),
        ):
            for value in values:
                counter.labels(value)

    def request_admitted(self, identity: Identity) -> None:
        self._requests.labels(*self._who(identity), identity.identified_by.value).inc()

    def prefill_finished(self, identity: Identity, prompt_tokens: int, reused_tokens: int) -> None:
        who = self._who(identity)
        self._prompt_tokens.labels(*who).inc(prompt_tokens)
        self._reused_tokens.labels(*who).inc(reused_tokens)
        self._reused_per_request.labels(*who).observe(reused_tokens)
        if prompt_tokens > 0:
            self._h_tokens.labels(*who).observe(reused_tokens / prompt_tokens)

    def request_rejected(self, reason: str) -> None:
        self._rejections.labels(reason).inc()

    def register(self, totals: EngineTotals) -> None:
        """Take over what the engine process counts for us."""
        totals.count("decisions", 2, lambda labels, by: self._decisions.labels(*labels).inc(by))
        totals.count("stamp_failures", 1, lambda labels, by: self._stamp_failures.labels(*labels).inc(by))

    def _who(self, identity: Identity) -> tuple[str, str]:
        return self.tenants(identity.tenant), self.domains(identity.domain.label)
