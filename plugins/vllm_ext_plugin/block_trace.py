"""Records what the engine's requests did to its KV blocks, for `vllm-ext replay`.

Two places of vLLM's scheduler are enough: where a request is scheduled for the first time (its prompt's
blocks have just been looked up), and where it leaves.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_ext.cache.recorder import Finished, Recorder
from vllm_ext.engine_totals import Report
from vllm_ext.labels import LabelCap
from vllm_ext.policy import PolicySnapshot, PolicyStore
from vllm_ext.tenancy.identity import UNKNOWN_TENANT
from vllm_ext_plugin.faults import Faults
from vllm_ext_plugin.request_facts import extra_args, session_ends, stop_of, tool_call_tokens
from vllm_ext_plugin.tenancy_feature import identity_of

ARRIVAL = "_vllm_ext_first_scheduled"

logger = logging.getLogger("vllm_ext")


class BlockTrace:
    """One engine's recorder, on while the policy names a file.

    Args:
        config: vLLM's configuration.
        store: the engine process' own copy of the policy.
        hash_block_size: tokens per hashed block.
        faults: counts our own exceptions.
    """

    def __init__(self, config: Any, store: PolicyStore, hash_block_size: int, faults: Faults) -> None:
        self._model_config = config.model_config
        self._rank = getattr(config.parallel_config, "data_parallel_rank", 0)
        self._block_size = hash_block_size
        self._store = store
        self._faults = faults
        self._key = _trace_key(store.current)
        self._label = LabelCap(0)
        self._tool_tokens: frozenset[int] | None = None
        self._past: Counter[str] = Counter()
        self._recorder: Recorder | None = None
        store.validators.append(self._check)
        store.on_swap.append(self._swapped)
        self._use(store.current)

    @property
    def on(self) -> bool:
        return self._recorder is not None and not self._recorder.broken

    def scheduled(self, requests: dict[str, Any], output: Any) -> None:
        """A step was scheduled. Args: requests: the scheduler's, by id. output: vLLM's `SchedulerOutput`."""
        if self._recorder is None or not output.scheduled_new_reqs:
            return
        try:
            now = time.time()
            for new in output.scheduled_new_reqs:
                request = requests.get(new.req_id)
                if request is not None:
                    request.__dict__.setdefault(ARRIVAL, now)
        except Exception:
            self._faults.caught("block_trace")

    def finished(self, request: Any) -> None:
        """The request leaves. One that never ran, or came before the trace was on, is left out."""
        recorder = self._recorder
        if recorder is None or ARRIVAL not in request.__dict__:
            return
        try:
            recorder.record(self._facts(request))
        except Exception:
            self._faults.caught("block_trace")
            self._past["failed"] += 1

    def _facts(self, request: Any) -> Finished:
        hashes, size = request.block_hashes, self._block_size
        # The last token of a prompt is always computed: a block that ends with it is filled, not looked up.
        looked_up = (request.num_prompt_tokens - 1) // size
        # The last token that was decoded has no KV yet.
        filled = min(request.num_computed_tokens, request.num_tokens - 1) // size
        identity = identity_of(request)
        session = getattr(request, "session_id", None)
        domain = identity.domain.label if identity else ""
        return Finished(
            arrival=request.__dict__[ARRIVAL],
            finish=time.time(),
            prompt=hashes[: min(looked_up, filled)],
            output=hashes[min(looked_up, filled) : filled],
            output_tokens=request.num_output_tokens,
            tenant=self._label(identity.tenant if identity else UNKNOWN_TENANT),
            session=f"{domain}\0{session}".encode() if session else None,
            stop=stop_of(request, self._tool_tokens or frozenset()),
            ended=session_ends(extra_args(request)),
        )

    def totals(self) -> Report:
        """Running totals for the front end's Prometheus counters."""
        counts = self._past + self._counts()
        return {"block_trace_requests": [([outcome], float(count)) for outcome, count in counts.items()]}

    def gauges(self) -> Report:
        """Present values for the front end's Prometheus gauges."""
        return {"block_trace_on": [([], float(self.on))]}

    def close(self) -> None:
        """Write what waits and end."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()
            self._past += Counter(written=recorder.written, dropped=recorder.dropped, failed=recorder.failed)

    def _counts(self) -> Counter[str]:
        recorder = self._recorder
        if recorder is None:
            return Counter()
        return Counter(written=recorder.written, dropped=recorder.dropped, failed=recorder.failed)

    def _check(self, snapshot: PolicySnapshot) -> None:
        problem = trace_problem(snapshot, self._store)
        if problem is not None:
            raise ValueError(problem)

    def _swapped(self, old: PolicySnapshot, new: PolicySnapshot) -> None:
        if old.policy.telemetry != new.policy.telemetry:
            self.close()
            self._use(new)
        else:
            self._keep_labels(new)

    def _use(self, snapshot: PolicySnapshot) -> None:
        self._keep_labels(snapshot)
        path = trace_path(snapshot, self._store)
        if path is None:
            return
        telemetry = snapshot.policy.telemetry
        assert telemetry is not None
        if self._rank:
            path = path.with_name(f"{path.name}.engine{self._rank}")
        if self._tool_tokens is None:
            self._tool_tokens = tool_call_tokens(self._model_config)
        try:
            self._recorder = Recorder(path, telemetry.max_size, self._key, self._block_size)
        except OSError as error:
            self._faults.caught("block_trace")
            logger.error("vllm_ext: the block trace is off: %s: %s", path, error.strerror)
            return
        logger.info("vllm_ext: block trace of finished requests in %s", path)

    def _keep_labels(self, snapshot: PolicySnapshot) -> None:
        tenancy = snapshot.policy.tenancy
        self._label.keep(tenancy.tenants if tenancy else (), snapshot.policy.metrics.max_tenant_labels)


def trace_path(snapshot: PolicySnapshot, store: PolicyStore) -> Path | None:
    """The trace's file, absolute; None: no trace."""
    telemetry = snapshot.policy.telemetry
    folder = store.path.parent if store.path is not None else Path()
    return None if telemetry is None else telemetry.trace_path(folder)


def trace_problem(snapshot: PolicySnapshot, store: PolicyStore) -> str | None:
    """Why the trace cannot be written, if it is plain to see: one sentence with the remedy."""
    path = trace_path(snapshot, store)
    if path is None:
        return None
    if not path.parent.is_dir():
        return f"telemetry.block_trace: there is no folder {path.parent}: make it"
    if path.is_dir():
        return f"telemetry.block_trace: {path} is a folder: name a file in it"
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        return f"telemetry.block_trace: {path} cannot be written by this user: choose another place"
    return None


def _trace_key(snapshot: PolicySnapshot) -> bytes:
    """With a salt secret the same in all processes that know it, so that their traces can be put together."""
    from vllm_ext_plugin.engine_config import salt_secret

    if snapshot.policy.tenancy is None:
        return secrets.token_bytes(32)
    return hmac.digest(salt_secret(snapshot), b"vllm_ext/block-trace/1", "sha256")
