"""A vLLM `Request` -> what retention needs to know of it: share group, protections, why it stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from vllm_ext.cache.free_blocks import DEFAULT, EVERYBODY_ELSE, Protection, Share
from vllm_ext.cache.grant import Grant
from vllm_ext.cache.order import Arrival
from vllm_ext.cache.retention import Classifier, RequestShape, Retention
from vllm_ext.cache.wishes import XARGS_KEY, Wish, parse_wish, wish_from_hints
from vllm_ext.policy.retention import UNKNOWN, RetentionPolicy
from vllm_ext.tenancy.identity import UNKNOWN_TENANT, Identity
from vllm_ext_plugin.block_hashes import SHARED_NAME, SPLIT
from vllm_ext_plugin.request_facts import extra_args, session_ends, stop_of
from vllm_ext_plugin.retention.roles import RoleFinder, Roles

VIEW = "_vllm_ext_retention_view"

MAX_GROUPS = 1024
"""Share groups made for tenants that only `*` names; later ones go without a share of their own."""


class RequestView:
    """What retention knows of one request while it is in the engine.

    Attributes:
        group: share group that its new blocks belong to.
        plain: every block has the default protection.
        tenant: the tenant's name, for metrics; `tenant_number` is its number there, -1 before it is known.
        admitted: it has got slots once.
        arrival: what the order noted when it came; None before.
        num_shared_blocks: leading blocks wholly inside a registered shared prefix: they belong to nobody.
    """

    __slots__ = (
        "_runs", "admitted", "arrival", "boosted", "group", "num_prompt_blocks", "num_shared_blocks", "plain",
        "tenant", "tenant_number",
    )  # fmt: skip

    def __init__(
        self,
        group: int,
        runs: list[tuple[int, Grant]],
        num_prompt_blocks: int,
        tenant: str,
        num_shared_blocks: int = 0,
    ) -> None:
        self.group = group
        self.tenant = tenant
        self.tenant_number = -1
        self.admitted = False
        self.num_prompt_blocks = num_prompt_blocks
        self.num_shared_blocks = num_shared_blocks
        self.arrival: Arrival | None = None
        self._runs = runs
        self.plain = len(runs) == 1 and runs[0][1] == _PLAIN
        self.boosted = any(grant.ttl is not None for _, grant in runs)

    def protections(self, start: int, stop: int, now: float) -> list[tuple[int, int, Protection]]:
        """Of the request's blocks `start` to `stop`, as (start, stop, protection) of neighbours. A time to
        live counts from `now`.
        """
        if self.plain:
            return [(start, stop, DEFAULT)]
        found = []
        for end, grant in self._runs:
            if end > start:
                end = min(end, stop)
                found.append((start, end, _protection(grant, now)))
                start = end
            if start >= stop:
                break
        return found

    def protection(self, index: int, now: float) -> Protection:
        """Of the request's block number `index`."""
        return self.protections(index, index + 1, now)[0][2]


def _protection(grant: Grant, now: float) -> Protection:
    if grant.ttl is None:
        return Protection(grant.priority)
    return Protection(grant.base, grant.priority, now + grant.ttl)


EVER = 1 << 60
_PLAIN = Grant.for_good(DEFAULT.base)


class Requests:
    """Reads requests by the policy in force.

    Args:
        policy: the `retention` section.
        block_size: tokens per block.
        uniform: give all blocks of a request one class (several KV cache groups share the pool).
        model: the served name.
        identity_of: who a request belongs to, as the engine believes it.
        roles: finds system prompt and tail; None where no rule asks for them.
        tool_tokens: ids that only a tool call holds, to tell why a turn stopped.
        block_key: (block hash, group 0) -> the key under which the pool caches it.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        block_size: int,
        uniform: bool,
        model: str,
        identity_of: Callable[[Any], Identity | None],
        roles: RoleFinder | None,
        tool_tokens: frozenset[int],
        block_key: Callable[[Any], Hashable],
    ) -> None:
        self.block_size = block_size
        self.uniform = uniform
        self.model = model
        self.identity_of = identity_of
        self.roles = roles
        self.tool_tokens = tool_tokens
        self.block_key = block_key
        self.groups: dict[str, int] = {}
        """Tenant (as the policy spells it) -> share group."""
        self.names: dict[int, str] = {EVERYBODY_ELSE: "other"}
        self.wishes: Counter[str] = Counter()
        """Why clients' wishes were not followed as asked; `heard` counts all that could be read."""
        self.use(policy)

    def use(self, policy: RetentionPolicy) -> None:
        """Take a reloaded policy over. Requests in the engine keep the classes they have."""
        self.policy = policy
        self.classifier = Classifier(policy)
        default = policy.default
        one_for_all = not policy.rules and default.priority == default.decoded
        self._every = [(EVER, Grant.for_good(default.priority))] if one_for_all else None

    def view(self, request: Any) -> RequestView:
        """The request's view, made on first sight."""
        view: RequestView | None = request.__dict__.get(VIEW)
        if view is None:
            view = request.__dict__[VIEW] = self._make_view(request)
        return view

    def missed(self, request: Any, hits: int) -> list[Hashable]:
        """Keys of the prompt's blocks behind its `hits` cached ones."""
        if self.uniform:
            return []
        stop = request.num_prompt_tokens // self.block_size
        return [self.block_key(block_hash) for block_hash in request.block_hashes[hits:stop]]

    def departure(self, request: Any, now: float) -> dict[str, Any]:
        """The facts of a `Departure` that are the request's own; `request` None where vLLM does not say."""
        if request is None:
            return {"num_prompt": 1 << 60, "arrival": Arrival(now)}
        view = self.view(request)
        session = getattr(request, "session_id", None)
        # A session id is the client's word: it means something within its own trust domain only.
        identity = self.identity_of(request)
        owner = hash((identity.domain if identity else None, session)) or 1 if session else 0
        return {
            "num_prompt": view.num_prompt_blocks,
            "arrival": view.arrival or Arrival(now),
            "stop": stop_of(request, self.tool_tokens),
            "owner": owner,
            "ended": session_ends(extra_args(request)),
        }

    def shares(self, num_blocks: int) -> dict[int, Share]:
        """Each known group's share of the pool, in blocks."""
        found = {}
        for name, group in self.groups.items():
            share = self.policy.share_of(name)
            if share is not None:
                maximum = float("inf") if share.max_share is None else share.max_share * num_blocks
                found[group] = Share(int((share.min_share or 0) * num_blocks), maximum)
        return found

    def group_of(self, tenant: str) -> int:
        """The share group of a tenant's label; made on first sight where the policy gives it a share."""
        name = UNKNOWN if tenant == UNKNOWN_TENANT else tenant
        group = self.groups.get(name)
        if group is None:
            if self.policy.share_of(name) is None:
                return EVERYBODY_ELSE
            if name not in self.policy.tenants and len(self.groups) >= MAX_GROUPS:
                return EVERYBODY_ELSE
            group = self.groups[name] = len(self.groups) + 1
            self.names[group] = name
        return group

    def _make_view(self, request: Any) -> RequestView:
        identity = self.identity_of(request)
        tenant = identity.tenant if identity else UNKNOWN_TENANT
        wish = self._wish(request)
        split = request.__dict__.get(SPLIT)
        shared = split.start // self.block_size if split is not None else 0
        prompt_blocks = request.num_prompt_tokens // self.block_size
        if wish is None and self._every is not None:
            return RequestView(self.group_of(tenant), self._every, prompt_blocks, tenant, shared)
        tokens = request.prompt_token_ids
        roles = self.roles.find(tokens) if self.roles is not None and tokens else Roles()
        lora = request.lora_request
        retention = self.classifier.classify(
            RequestShape(
                num_prompt_tokens=request.num_prompt_tokens,
                tenant=tenant,
                domain=identity.domain.label if identity else "",
                model=self.model,
                adapter=lora.lora_name if lora is not None else None,
                system_end=roles.system_end,
                tail_start=roles.tail_start,
                shared_tokens=split.start if split is not None else 0,
                shared_name=request.__dict__.get(SHARED_NAME),
                wish=wish,
            )
        )
        if retention.wish_reasons:
            self.wishes.update(retention.wish_reasons)
        runs = block_runs(retention, self.block_size)
        if self.uniform:
            strongest = runs[0][1]
            for _, grant in runs:
                strongest = strongest.stronger(grant)
            runs = [(EVER, strongest)]
        return RequestView(self.group_of(tenant), runs, prompt_blocks, tenant, shared)

    def _wish(self, request: Any) -> Wish | None:
        asked = extra_args(request).get(XARGS_KEY)
        hints = getattr(request, "kv_hints", None)
        if asked is None and hints is None:
            return None
        wish, reasons = parse_wish(asked)
        if wish is None and hints is not None:
            wish, reasons = wish_from_hints(
                [(action.action_type, action.action_version, action.payload) for action in hints.actions]
            )
        self.wishes.update(reasons)
        if wish is not None:
            self.wishes["heard"] += 1
        return wish


def block_runs(retention: Retention, block_size: int) -> list[tuple[int, Grant]]:
    """What the blocks of a request get: (first block behind the run, grant), the last one to `EVER`. As
    `Retention.per_block` has it, without a step per block.
    """
    runs: list[tuple[int, Grant]] = []
    parts = [(part.start // block_size, -(-part.end // block_size), part.grant) for part in retention.ranges]
    parts.append((retention.num_prompt_tokens // block_size, EVER, retention.decoded.grant))
    for first, stop, grant in parts:
        reached = runs[-1][0] if runs else 0
        if first < reached:  # both have tokens in the block before
            before = runs[-1][1]
            both = before.stronger(grant)
            if both != before:
                start = runs[-2][0] if len(runs) > 1 else 0
                runs[-1:] = [(reached - 1, before)] if start < reached - 1 else []
                _extend(runs, reached, both)
        if stop > reached:
            _extend(runs, stop, grant)
    return runs


def _extend(runs: list[tuple[int, Grant]], stop: int, grant: Grant) -> None:
    if runs and runs[-1][1] == grant:
        runs[-1] = (stop, grant)
    else:
        runs.append((stop, grant))
