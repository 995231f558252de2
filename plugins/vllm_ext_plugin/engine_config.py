"""`EngineArgs.create_engine_config`, wrapped: puts our scheduler in, and refuses what would undo the
policy.
"""

from __future__ import annotations

import logging
import os
import secrets
from functools import partial
from typing import Any

from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext_plugin import seams
from vllm_ext_plugin.activation import EPHEMERAL_SECRET_ENV, POLICY_ENV, log_like_vllm
from vllm_ext_plugin.retention import offload_config

SCHEDULER = "vllm_ext_plugin.scheduler.make_scheduler"

# Connectors that key what they store or send by block hash (which holds the salt) or move one request's
# blocks to its own peer.
SALTED_CONNECTORS = frozenset(
    {
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "MooncakeStoreConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "MoRIIOConnector",
        "DecodeBenchConnector",
    }
)
TOKEN_HASHING_CONNECTORS = frozenset({"ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1"})

logger = logging.getLogger("vllm_ext")


class StartRefused(ValueError):
    """The policy and the engine's options contradict each other; the text says which and how to mend it."""


def with_policy(original: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_ext_plugin import operations
        from vllm_ext_plugin.block_trace import trace_problem

        config = original(self, *args, **kwargs)
        log_like_vllm()  # vLLM sets its logging up no earlier than in there
        store = PolicyStore(policy_path())
        policy = store.current.policy
        headless = bool(kwargs.get("headless") or (len(args) > 1 and args[1]))
        problems = start_refusals(config, store.current, headless)
        if (problem := trace_problem(store.current, store)) is not None:
            problems.append(problem)
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise StartRefused(f"vllm_ext refuses to start under this policy:\n{listed}")
        if policy.is_for_the_engine:
            _install_scheduler(config)
            operations.install(store)
        else:
            operations.uninstall()
        if policy.retention is not None:
            offload_config.choose(config)
        if policy.tenancy is not None:
            _install_tenancy(config, store)
        else:
            _uninstall_tenancy()
        _tell(config, store)
        return config

    return create_engine_config


def policy_path() -> str | None:
    return os.environ.get(POLICY_ENV) or None


def salt_secret(snapshot: PolicySnapshot) -> bytes:
    """The policy's secret, or this server's ephemeral one.

    Raises:
        StartRefused: neither is there (an engine process that was not started by a front end of ours).
    """
    if snapshot.salt_secret is not None:
        return snapshot.salt_secret
    ephemeral = os.environ.get(EPHEMERAL_SECRET_ENV)
    if ephemeral is None:
        raise StartRefused(
            "no salt secret: set tenancy.salt_secret in the policy "
            "(a random one reaches only the processes that this server starts)"
        )
    return bytes.fromhex(ephemeral)


def _install_tenancy(config: Any, store: PolicyStore) -> None:
    from vllm_ext_plugin import front_end

    if store.current.salt_secret is None and EPHEMERAL_SECRET_ENV not in os.environ:
        os.environ[EPHEMERAL_SECRET_ENV] = secrets.token_hex(32)
        tenancy = store.current.policy.tenancy
        if tenancy is not None and (tenancy.tenants or tenancy.gateway):
            logger.warning(
                "tenancy.salt_secret is not set: salts come from a random secret and change at every start. "
                "Set it to keep prefix caches shared between replicas and KV tiers valid across restarts."
            )
    front_end.install(config, store)


def _uninstall_tenancy() -> None:
    from vllm_ext_plugin import front_end

    front_end.uninstall()


def _tell(config: Any, store: PolicyStore) -> None:
    """One line in the log: what is in force. Names and counts, no secrets."""
    from vllm_ext import __version__
    from vllm_ext_plugin import cpu_sampling

    snapshot = store.current
    tenancy, retention = snapshot.policy.tenancy, snapshot.policy.retention
    if tenancy is None:
        told = ["no tenancy"]
    else:
        told = [
            f"{len(tenancy.tenants)} tenants in {len(snapshot.domains)} trust domains",
            f"{len(tenancy.shared_prefixes)} shared prefixes",
            f"unknown: {tenancy.unknown}",
            f"gateway {'on' if tenancy.gateway else 'off'}",
            f"salt secret {tenancy.salt_secret or 'random'}",
        ]
    told.append(f"retention {retention.order}" if retention is not None else "no retention")
    logger.info(
        "vllm_ext %s: policy %s (%s): %s", __version__, snapshot.source, snapshot.digest[:12], ", ".join(told)
    )
    if store.path is None:
        logger.warning(
            "no policy file was named: under the built-in default all requests share one prefix cache, as in "
            "stock vLLM (name a file with --policy or %s)",
            POLICY_ENV,
        )
    if config.speculative_config is not None:
        logger.info("CPU sampling under speculation (vLLM issue 55005): %s", cpu_sampling.mend())


def _install_scheduler(config: Any) -> None:
    chosen = config.scheduler_config.scheduler_cls
    if not _is_ours(chosen):
        # A scheduler that the user (or vLLM, for diffusion models) chose becomes the base class of ours.
        config.scheduler_config.scheduler_cls = (
            SCHEDULER if chosen is None else partial(_make_scheduler_on, _importable(chosen))
        )


def start_refusals(config: Any, snapshot: PolicySnapshot, headless: bool = False) -> list[str]:
    """What in vLLM's configuration contradicts the policy: one sentence each, with the remedy."""
    problems = []
    if snapshot.policy.tenancy is not None:
        problems += _tenancy_refusals(config, snapshot, headless)
    problems += _seam_refusals(config, snapshot)
    if snapshot.policy.retention is not None and "HiSparseConnector" in _connectors(
        config.kv_transfer_config
    ):
        problems.append(
            "HiSparse depends on which blocks are evicted last, so the retention section cannot be used "
            "with it: remove one of the two"
        )
    return problems


def _seam_refusals(config: Any, snapshot: PolicySnapshot) -> list[str]:
    """What this vLLM lacks of what the policy's other sections need; salting's needs are checked before."""
    telemetry = snapshot.policy.telemetry
    wanted = set()
    if snapshot.policy.retention is not None:
        wanted.add("retention")
        policies = [
            extra.get("eviction_policy", offload_config.POLICY) for extra in offload_config.cpu_tiers(config)
        ]
        if offload_config.POLICY in policies:
            wanted.add("offload")
    if telemetry is not None and telemetry.block_trace is not None:
        wanted.add("block_trace")
    if not wanted:
        return []
    return [
        f"{problem} (remove that section, or use a supported vLLM)"
        for problem in seams.check()
        if problem.breaking and problem.seam.feature in wanted
    ]


def _tenancy_refusals(config: Any, snapshot: PolicySnapshot, headless: bool) -> list[str]:
    """What would let KV cross trust domains past the salt."""
    tenancy = snapshot.policy.tenancy
    assert tenancy is not None
    problems = []
    if "xxhash" in str(config.cache_config.prefix_caching_hash_algo):
        problems.append(
            "--prefix-caching-hash-algo xxhash is not collision resistant, so a tenant could forge another's "
            "block hash: use sha256"
        )
    for connector in _connectors(config.kv_transfer_config):
        if connector in TOKEN_HASHING_CONNECTORS:
            problems.append(
                f"KV connector {connector} looks KV up by tokens without the salt, across trust domains: "
                "use OffloadingConnector, SimpleCPUOffloadConnector or MooncakeStoreConnector"
            )
        elif connector not in SALTED_CONNECTORS and connector not in tenancy.trusted_connectors:
            problems.append(
                f"KV connector {connector} is not known to key KV by block hash; if it does (and so honours "
                "cache_salt), list it under tenancy.trusted_connectors"
            )
    if getattr(config.speculative_config, "method", None) == "suffix":
        problems.append(
            "speculative method `suffix` keeps one tree of all tenants' answers and drafts from it for "
            "everyone: use `ngram`"
        )
    if snapshot.salt_secret is None and (headless or _spans_nodes(config.parallel_config)):
        problems.append(
            "engines on several nodes need the same salt secret: set tenancy.salt_secret in the policy"
        )
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("0", ""):
        problems.append(
            "with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION clients choose the engine's request ids, and two "
            "equal ones end it: unset the variable"
        )
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if getattr(multimodal, "mm_processor_cache_gb", 0):
        problems.append(
            "the multimodal processor cache is shared by all tenants, and a client may name an entry by an "
            "id of its choice: set --mm-processor-cache-gb 0"
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("0", ""):
        problems.append("the Rust front end cannot identify tenants: unset VLLM_USE_RUST_FRONTEND")
    return problems


def _spans_nodes(parallel: Any) -> bool:
    size, local = getattr(parallel, "data_parallel_size", 1), getattr(parallel, "data_parallel_size_local", 1)
    return bool(size > 1 and local < size) or getattr(parallel, "nnodes", 1) > 1


def _connectors(transfer: Any) -> list[str]:
    """Names of all KV connectors in use, those inside a MultiConnector included."""
    name = getattr(transfer, "kv_connector", None)
    if not name:
        return []
    if name != "MultiConnector":
        return [name]
    parts = (transfer.kv_connector_extra_config or {}).get("connectors", [])
    return [part.get("kv_connector", "(unnamed)") if isinstance(part, dict) else str(part) for part in parts]


def _is_ours(scheduler_cls: Any) -> bool:
    return scheduler_cls == SCHEDULER or (
        isinstance(scheduler_cls, partial) and scheduler_cls.func is _make_scheduler_on
    )


def _make_scheduler_on(base: str, **kwargs: Any) -> Any:
    from vllm_ext_plugin.scheduler import make_scheduler

    return make_scheduler(base=base, **kwargs)


def _importable(scheduler_cls: Any) -> str:
    """The dotted path of a user's scheduler, so that the engine process can import it too."""
    if isinstance(scheduler_cls, str):
        return scheduler_cls
    if isinstance(scheduler_cls, type) and "<locals>" not in scheduler_cls.__qualname__:
        return f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    raise StartRefused(
        f"--scheduler-cls {scheduler_cls!r} cannot be combined with vllm_ext: "
        "give a class that can be imported by name"
    )
