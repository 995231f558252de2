"""Which retention class the tokens of a request get.

The policy's rules, the registered shared prefixes and the client's wish go in, ranges of tokens come out.
Pure, and cheap enough to run in the scheduler for every request: what depends only on who asks is worked out
once and kept, and every condition on places is one interval, so a rule is one interval, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from vllm_ext.cache.grant import Grant
from vllm_ext.cache.wishes import Wish, WishReason, follow
from vllm_ext.policy import RetentionPolicy, RetentionRule, WishBounds
from vllm_ext.policy.retention import DEFAULT_CLASS, UNKNOWN
from vllm_ext.policy.units import TokenSpan
from vllm_ext.tenancy.identity import UNKNOWN_TENANT

REMEMBERED_CALLERS = 1024
"""Combinations of tenant, domain, model, adapter and shared prefix whose rules are kept worked out."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the rules look at.

    Attributes:
        num_prompt_tokens: length of the prompt.
        tenant: label as in metrics, `(unknown)` for a caller that nobody vouched for.
        domain: the trust domain's label, `(public)` and `(isolated)` included.
        model: the served name.
        adapter: the LoRA adapter's name.
        system_end: tokens [0, system_end) are the system prompt; None: not known.
        tail_start: tokens from here on follow the last answer; None: not known.
        shared_tokens: tokens [0, shared_tokens) are the registered shared prefix `shared_name`.
        wish: what the client asks for, as `parse_wish` gives it.
    """

    num_prompt_tokens: int
    tenant: str = UNKNOWN_TENANT
    domain: str = ""
    model: str = ""
    adapter: str | None = None
    system_end: int | None = None
    tail_start: int | None = None
    shared_tokens: int = 0
    shared_name: str | None = None
    wish: Wish | None = None


class RetentionRange(NamedTuple):
    """Tokens [start, end) of a prompt.

    `rule` is an index into the policy's rules, None for the default; `wished`: changed by the client's wish.
    """

    start: int
    end: int
    grant: Grant
    class_name: str
    rule: int | None
    wished: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """The classes of one request.

    Attributes:
        num_prompt_tokens: length of the prompt.
        ranges: sorted, without gaps or overlaps, over the whole prompt.
        decoded: for the tokens after it; its `start` is the prompt's length, its `end` means nothing.
        wish_reasons: why the client's wish was not followed as asked.
    """

    num_prompt_tokens: int
    ranges: tuple[RetentionRange, ...]
    decoded: RetentionRange
    wish_reasons: tuple[WishReason, ...] = ()

    def per_block(self, block_size: int, num_blocks: int) -> list[Grant]:
        """What each of the request's first `num_blocks` blocks gets: the strongest of what its tokens get.

        The block in which the prompt ends holds decoded tokens, too.
        """
        grants: list[Grant] = []
        for start, end, grant, *_ in self.ranges:
            first, stop = start // block_size, -(-end // block_size)
            if first < len(grants):
                grants[first] = grants[first].stronger(grant)
            if stop >= num_blocks:
                stop = num_blocks
            grants.extend([grant] * (stop - len(grants)))
            if len(grants) == num_blocks and end >= num_blocks * block_size:
                return grants
        first, decoded = self.num_prompt_tokens // block_size, self.decoded.grant
        if first < len(grants):
            grants[first] = grants[first].stronger(decoded)
        grants.extend([decoded] * (num_blocks - len(grants)))
        return grants


class _Placed(NamedTuple):
    """A rule that some tokens of a caller's prompts may meet."""

    role: str | None
    tokens: TokenSpan | None
    in_shared: bool
    grant: Grant
    class_name: str
    rule: int

    def interval(self, shape: RequestShape) -> tuple[int, int]:
        """The tokens that meet it; empty when the second is not larger."""
        size = shape.num_prompt_tokens
        start, stop = (0, size) if self.tokens is None else self.tokens.within(size)
        if self.in_shared:
            stop = min(stop, shape.shared_tokens)
        if self.role is not None:
            first, last = _role(self.role, shape)
            start, stop = max(start, first), min(stop, last)
        return start, stop


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rules that one kind of caller can meet."""

    placed: tuple[_Placed, ...]
    decoded: tuple[Grant, str, int | None]
    bounds: WishBounds


class Classifier:
    """Gives requests their retention classes. Make a new one when the policy changes.

    Args:
        policy: the `retention` section; None: everything has priority 35, and no wish is heard.
    """

    def __init__(self, policy: RetentionPolicy | None) -> None:
        self.policy = policy or RetentionPolicy()
        default = self.policy.default
        self._default = Grant.for_good(default.priority)
        self._decoded_default = Grant.for_good(default.decoded)
        self._plan = lru_cache(REMEMBERED_CALLERS)(self._make_plan)

    def classify(self, shape: RequestShape) -> Retention:
        """The classes of one request's tokens."""
        plan = self._plan(shape.tenant, shape.domain, shape.model, shape.adapter, shape.shared_name)
        size = shape.num_prompt_tokens
        if plan.placed:
            ranges = self._paint(plan.placed, shape)
        else:
            ranges = [RetentionRange(0, size, self._default, DEFAULT_CLASS, None)] if size else []
        decoded = RetentionRange(size, size, *plan.decoded)
        if shape.wish is None:
            return Retention(size, tuple(ranges), decoded)
        if not plan.bounds.allowed:
            return Retention(size, tuple(ranges), decoded, ("not_allowed",))
        reasons: dict[WishReason, None] = {}
        ranges = _wished(ranges, shape, shape.wish, plan.bounds, reasons)
        if shape.wish.decoded_priority is not None:
            asked = shape.wish.decoded_priority, shape.wish.decoded_ttl
            grant, why = follow(*asked, decoded.grant, plan.bounds)
            reasons.update(dict.fromkeys(why))
            decoded = decoded._replace(grant=grant, wished=grant != decoded.grant)
        return Retention(size, tuple(ranges), decoded, tuple(reasons))

    def _paint(self, rules: Iterable[_Placed], shape: RequestShape) -> list[RetentionRange]:
        """Each rule takes what earlier ones have left."""
        found: list[RetentionRange] = []
        gaps = [(0, shape.num_prompt_tokens)] if shape.num_prompt_tokens else []
        for rule in rules:
            if not gaps:
                break
            start, stop = rule.interval(shape)
            if start >= stop:
                continue
            left = []
            for first, last in gaps:
                begin, end = max(first, start), min(last, stop)
                if begin >= end:
                    left.append((first, last))
                    continue
                found.append(RetentionRange(begin, end, rule.grant, rule.class_name, rule.rule))
                if first < begin:
                    left.append((first, begin))
                if end < last:
                    left.append((end, last))
            gaps = left
        found += [RetentionRange(first, last, self._default, DEFAULT_CLASS, None) for first, last in gaps]
        found.sort(key=_start)
        return found

    def _make_plan(
        self, tenant: str, domain: str, model: str, adapter: str | None, shared_name: str | None
    ) -> _Plan:
        tenant = UNKNOWN if tenant == UNKNOWN_TENANT else tenant
        domain = domain.strip("()")  # of (public) and (isolated); names hold no parentheses
        placed: list[_Placed] = []
        decoded: tuple[Grant, str, int | None] | None = None
        for index, rule in enumerate(self.policy.rules):
            if not _meets(rule, tenant, domain, model, adapter, shared_name):
                continue
            if rule.role != "decoded":
                grant = self._grant(rule.class_name)
                in_shared = rule.shared_prefix is not None
                placed.append(_Placed(rule.role, rule.tokens, in_shared, grant, rule.class_name, index))
            if decoded is None and not rule.is_for_places:
                decoded = self._decoded_grant(rule.class_name), rule.class_name, index
        bounds = self.policy.client_wishes.bounds(tenant, self.policy.default.priority)
        return _Plan(tuple(placed), decoded or (self._decoded_default, DEFAULT_CLASS, None), bounds)

    def _grant(self, name: str) -> Grant:
        values = self.policy.classes.get(name)
        if values is None or values.priority is None:
            return self._default
        return _as_grant(values.priority, values.ttl, self._default)

    def _decoded_grant(self, name: str) -> Grant:
        values = self.policy.classes.get(name)
        if values is None or values.decoded_priority is None:
            return self._decoded_default
        return _as_grant(values.decoded_priority, values.decoded_ttl, self._decoded_default)


def _as_grant(priority: int, ttl: float | None, default: Grant) -> Grant:
    return Grant.for_good(priority) if ttl is None else Grant(priority, ttl, default.priority)


def _start(one: RetentionRange) -> int:
    return one.start


def _role(role: str, shape: RequestShape) -> tuple[int, int]:
    """The tokens of a part of the conversation; none where its bounds are not known."""
    system, tail, size = shape.system_end, shape.tail_start, shape.num_prompt_tokens
    if role == "system":
        return 0, system or 0
    if tail is None:
        return 0, 0
    if role == "tail":
        return max(tail, system or 0), size
    return (0, 0) if system is None else (system, tail)


def _meets(
    rule: RetentionRule, tenant: str, domain: str, model: str, adapter: str | None, shared_name: str | None
) -> bool:
    """Whether the rule's conditions on the request as a whole hold."""
    return (
        (rule.tenants is None or tenant in rule.tenants)
        and (rule.domains is None or domain in rule.domains)
        and (rule.models is None or model in rule.models)
        and (rule.adapters is None or adapter in rule.adapters)
        and (rule.shared_prefix in (None, "any") or shared_name in (rule.shared_prefix or ()))
    )


def _wished(
    ranges: list[RetentionRange],
    shape: RequestShape,
    wish: Wish,
    bounds: WishBounds,
    reasons: dict[WishReason, None],
) -> list[RetentionRange]:
    """The ranges, cut where the wish begins and ends, with what it changes.

    A registered shared prefix is not one client's to change: its blocks serve others.
    """
    found: list[RetentionRange] = []
    remaining = iter(wish.ranges)
    asked = next(remaining, None)
    for own in ranges:
        at, end, grant, name, rule, _ = own
        while at < end:
            while asked is not None and asked.end is not None and asked.end <= at:
                asked = next(remaining, None)
            if asked is None or asked.start >= end:
                found.append(own if at == own.start else RetentionRange(at, end, grant, name, rule))
                break
            if at < asked.start:
                found.append(RetentionRange(at, asked.start, grant, name, rule))
                at = asked.start
            stop = end if asked.end is None else min(end, asked.end)
            given = grant
            if at < shape.shared_tokens:
                reasons["shared_prefix"] = None
                stop = min(stop, shape.shared_tokens)
            else:
                given, why = follow(asked.priority, asked.ttl, grant, bounds)
                reasons.update(dict.fromkeys(why))
            found.append(RetentionRange(at, stop, given, name, rule, given != grant))
            at = stop
    return found
