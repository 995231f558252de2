"""Prometheus metrics of tenancy and of the policy itself. They appear in vLLM's own `/metrics`.

Every name that this pillar exports is created here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_ext.tenancy.identity import Identity

OTHER = "other"
TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

REJECTION_REASONS = (
    "no_credentials", "unknown_key", "conflicting_keys", "unlisted_tenant", "malformed_header",
    "bad_signature", "outside_window", "replayed", "replay_memory_full", "internal_error",
)  # fmt: skip
STAMP_FAILURES = ("missing", "malformed", "bad_mac", "other_version")
RELOAD_OUTCOMES = ("reloaded", "unchanged", "invalid", "refused")
PARTS = ("identity", "stamping", "metrics", "engine_salting", "engine_hashing")


class LabelCap:
    """Bounds the number of distinct label values: the first `limit` that ask are kept, later ones become
    `other`.

    Names the policy lists are kept whatever comes, so a flood of unlisted names cannot hide a listed tenant.
    """

    def __init__(self, limit: int, always: Iterable[str] = ()) -> None:
        self._limit = limit
        self._always = frozenset(always)
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        if value in self._always or value in self._seen or (value.startswith("(") and value.endswith(")")):
            return value
        with self._lock:
            if len(self._seen) < self._limit:
                self._seen.add(value)
                return value
        return OTHER

    def keep(self, always: Iterable[str], limit: int) -> None:
        """Take over a reloaded policy's names and limit; label values that already exist stay."""
        self._always = frozenset(always)
        self._limit = limit


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
        self._reloads = Counter(
            "vllm_ext_policy_reloads",
            "Attempts to change the policy at run time (reloaded, unchanged, invalid, refused).",
            ("outcome",),
            registry=registry,
        )
        self._policy_ok = Gauge(
            "vllm_ext_policy_last_reload_successful",
            "1 while the policy in force is the one on disk; 0 after a reload that was invalid or refused.",
            registry=registry,
            multiprocess_mode="min",
        )
        self._policy_time = Gauge(
            "vllm_ext_policy_loaded_timestamp_seconds",
            "When the policy in force was loaded (Unix time).",
            registry=registry,
            multiprocess_mode="max",
        )
        self._errors = Counter(
            "vllm_ext_internal_errors",
            "Exceptions inside this plugin that were caught, by part. Identity and salting then isolate.",
            ("part",),
            registry=registry,
        )

        # A series that appears with its first event is missed by `increase()`: these begin at 0.
        for counter, values in (
            (self._rejections, REJECTION_REASONS),
            (self._stamp_failures, STAMP_FAILURES),
            (self._reloads, RELOAD_OUTCOMES),
            (self._errors, PARTS),
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

    def policy_result(self, outcome: str) -> None:
        self._reloads.labels(outcome).inc()
        self._policy_ok.set(1 if outcome in ("reloaded", "unchanged") else 0)

    def policy_loaded(self, when: float) -> None:
        self._policy_ok.set(1)
        self._policy_time.set(when)

    def internal_error(self, part: str) -> None:
        self._errors.labels(part).inc()

    def engine_totals_grew(self, kind: str, labels: tuple[str, ...], by: float) -> None:
        """Add what the engine process counted since it was last asked. Kinds: those of `ENGINE_COUNTERS`."""
        counter = {
            "decisions": self._decisions,
            "stamp_failures": self._stamp_failures,
            "errors": self._errors,
        }[kind]
        counter.labels(*labels).inc(by)

    def _who(self, identity: Identity) -> tuple[str, str]:
        return self.tenants(identity.tenant), self.domains(identity.domain.label)


ENGINE_COUNTERS: Mapping[str, int] = {"decisions": 2, "stamp_failures": 1, "errors": 1}
"""Counters that the engine process keeps for us, and their number of labels."""


class EngineTotals:
    """Turns the engine's running totals into increments, so that a counter here never runs backwards.

    A total that shrank means that the engine process was replaced: its count starts anew.
    """

    def __init__(self, metrics: TenancyMetrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[int, str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()

    def update(self, engine_index: int, totals: Mapping[str, Iterable[tuple[Iterable[str], float]]]) -> None:
        """Args: totals: kind -> pairs of (label values, running total), as one engine reports them."""
        with self._lock:
            for kind, entries in totals.items():
                for labels, total in entries:
                    key = (engine_index, kind, tuple(labels))
                    last = self._last.get(key, 0.0)
                    self._last[key] = total
                    grown = total - last if total >= last else total
                    if kind in ENGINE_COUNTERS and grown > 0:
                        self._metrics.engine_totals_grew(kind, key[2], grown)
