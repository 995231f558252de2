"""Classes for a request's tokens and blocks, against an oracle that looks at each token alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.cache.grant import Grant
from vllm_ext.cache.retention import Classifier, RequestShape, Retention, RetentionRange
from vllm_ext.cache.wishes import Wish, WishRange, follow
from vllm_ext.policy import RetentionPolicy, RetentionRule, parse_policy

pytestmark = pytest.mark.unit

TEXT = """version: 1
tenancy:
  unknown: public
  tenants: {acme: {domain: corp}, globex: {}}
  shared_prefixes: [{name: manual, domains: all, text: x}, {name: greeting, domains: all, text: y}]
retention:
  default: {priority: 35, decoded_priority: 20}
  classes:
    system: {priority: 90, ttl: 1h}
    head: {priority: 80}
    batch: {priority: 10, decoded_priority: 0}
    answers: {decoded_priority: 60, decoded_ttl: 2m}
  rules:
    - {class: head, shared_prefix: manual}
    - {class: system, role: system, tenants: [acme]}
    - {class: batch, tenants: [globex, unknown]}
    - {class: answers, role: decoded, models: [big]}
    - {class: default, role: history, adapters: [lora]}
    - {class: head, tokens: -8.., domains: [corp]}
  client_wishes: {allow: clamped, max_priority: 60, max_ttl: 10m, tenants: {globex: {allow: never}}}
"""
DEFAULT = Grant.for_good(35)


def policy(text: str = TEXT) -> RetentionPolicy:
    section = parse_policy(text).policy.retention
    assert section is not None
    return section


CLASSIFIER = Classifier(policy())


def shown(retention: Retention) -> list[tuple[int, int, str, int | None]]:
    return [(one.start, one.end, one.class_name, one.rule) for one in retention.ranges]


def test_the_first_rule_that_fits_gives_the_class() -> None:
    shape = RequestShape(
        100, "acme", "corp", system_end=40, tail_start=90, shared_tokens=32, shared_name="manual"
    )
    assert shown(CLASSIFIER.classify(shape)) == [
        (0, 32, "head", 0),
        (32, 40, "system", 1),
        (40, 92, "default", None),
        (92, 100, "head", 5),
    ]
    grants = [one.grant for one in CLASSIFIER.classify(shape).ranges]
    assert grants == [Grant(80, None, 80), Grant(90, 3600, 35), DEFAULT, Grant(80, None, 80)]


def test_a_rule_without_places_takes_the_prompt_and_what_is_decoded() -> None:
    retention = CLASSIFIER.classify(RequestShape(10, "globex", "globex"))
    assert shown(retention) == [(0, 10, "batch", 2)]
    assert retention.decoded == RetentionRange(10, 10, Grant.for_good(0), "batch", 2)


def test_unknown_callers_and_their_domain() -> None:
    assert shown(CLASSIFIER.classify(RequestShape(10, domain="(public)"))) == [(0, 10, "batch", 2)]
    section = policy(TEXT.replace("domains: [corp]", "domains: [public]").replace(", unknown]", "]"))
    shape = RequestShape(10, domain="(public)")
    assert shown(Classifier(section).classify(shape)) == [(0, 2, "default", None), (2, 10, "head", 5)]
    assert shown(Classifier(section).classify(replace(shape, domain="(isolated)"))) == [
        (0, 10, "default", None)
    ]


def test_decoded_tokens_have_values_of_their_own() -> None:
    shape = RequestShape(10, "acme", "corp", model="big")
    assert CLASSIFIER.classify(shape).decoded == RetentionRange(10, 10, Grant(60, 120, 20), "answers", 3)
    assert CLASSIFIER.classify(replace(shape, model="small")).decoded == RetentionRange(
        10, 10, Grant.for_good(20), "default", None
    )


def test_parts_of_the_chat_that_are_not_known_have_no_class() -> None:
    shape = RequestShape(50, "acme", "corp", adapter="lora")
    assert shown(CLASSIFIER.classify(shape)) == [(0, 42, "default", None), (42, 50, "head", 5)]
    only_tail = replace(shape, tail_start=30)
    assert (0, 30, "default", 4) not in shown(CLASSIFIER.classify(only_tail))
    both = replace(shape, system_end=10, tail_start=30)
    assert shown(CLASSIFIER.classify(both))[:2] == [(0, 10, "system", 1), (10, 30, "default", 4)]


def test_another_shared_prefix_is_not_the_named_one() -> None:
    shape = RequestShape(64, "acme", "corp", shared_tokens=32, shared_name="greeting")
    assert shown(CLASSIFIER.classify(shape))[0] == (0, 56, "default", None)
    anyone = Classifier(policy(TEXT.replace("shared_prefix: manual", "shared_prefix: any")))
    assert shown(anyone.classify(shape))[0] == (0, 32, "head", 0)


def test_without_a_section_all_is_ordinary_and_no_wish_is_heard() -> None:
    shape = RequestShape(20, "acme", wish=Wish((WishRange(0, None, 0, None),), 0))
    retention = Classifier(None).classify(shape)
    assert shown(retention) == [(0, 20, "default", None)]
    assert retention.per_block(16, 3) == [DEFAULT] * 3
    assert retention.wish_reasons == ("not_allowed",)


def test_an_empty_prompt() -> None:
    retention = CLASSIFIER.classify(RequestShape(0, "acme"))
    assert (retention.ranges, retention.per_block(16, 2)) == ((), [Grant.for_good(20)] * 2)


# -- blocks


def test_a_block_gets_the_strongest_of_what_touches_it() -> None:
    shape = RequestShape(100, "acme", "corp", model="big", system_end=20, tail_start=90)
    assert CLASSIFIER.classify(shape).per_block(16, 8) == [
        Grant(90, 3600, 35),
        Grant(90, 3600, 35),  # tokens 16..20 are the system prompt
        *[DEFAULT] * 3,
        Grant(80, None, 80),  # 92..100 from the end
        Grant(80, None, 80),  # 96..100 and decoded tokens
        Grant(60, 120, 20),
    ]


def test_of_equal_priorities_the_longer_ttl_and_always_the_higher_base() -> None:
    assert Grant(90, 60, 35).stronger(Grant(90, 3600, 35)) == Grant(90, 3600, 35)
    assert Grant(90, 60, 35).stronger(Grant(90, None, 90)) == Grant(90, None, 90)
    assert Grant(90, 60, 35).stronger(Grant.for_good(50)) == Grant(90, 60, 50)
    assert Grant.for_good(50).stronger(Grant(90, 60, 35)) == Grant(90, 60, 50)


# -- wishes


def test_a_wish_changes_what_it_may_and_says_what_it_may_not() -> None:
    wish = Wish(
        (WishRange(0, 50, 100, 60.0), WishRange(60, 70, 5, None), WishRange(80, None, 50, 5000.0)), 40, 1.0
    )
    shape = RequestShape(
        100, "acme", "corp", system_end=40, shared_tokens=32, shared_name="manual", wish=wish
    )
    retention = CLASSIFIER.classify(shape)
    assert [(one.start, one.end, one.grant, one.wished) for one in retention.ranges] == [
        (0, 32, Grant(80, None, 80), False),  # a shared prefix is not one client's
        (32, 40, Grant(90, 60, 35), True),  # the class's own priority, as long as asked
        (40, 50, Grant(60, 60, 35), True),
        (50, 60, DEFAULT, False),
        (60, 70, Grant.for_good(5), True),
        (70, 80, DEFAULT, False),
        (80, 92, Grant(50, 600, 35), True),
        (92, 100, Grant.for_good(50), True),  # below the class's 80, which is for good
    ]
    assert retention.decoded.grant == Grant(40, 1.0, 20)
    assert set(retention.wish_reasons) == {"shared_prefix", "priority_clamped", "ttl_clamped", "ttl_dropped"}


def test_wishes_of_a_tenant_whose_clients_are_not_heard() -> None:
    shape = RequestShape(10, "globex", wish=Wish((WishRange(0, None, 60, None),), 60))
    retention = CLASSIFIER.classify(shape)
    assert shown(retention) == [(0, 10, "batch", 2)]
    assert (retention.decoded.grant, retention.wish_reasons) == (Grant.for_good(0), ("not_allowed",))


# -- against the oracle

_NAMES = st.sampled_from(["acme", "globex"])


@st.composite
def sections(draw: st.DrawFn) -> RetentionPolicy:
    classes = {}
    for name in ("a", "b", "c"):
        priority, decoded = draw(st.integers(0, 100)), draw(st.none() | st.integers(0, 100))
        classes[name] = {"priority": priority}
        if priority > 35 and draw(st.booleans()):
            classes[name]["ttl"] = draw(st.integers(1, 9))
        if decoded is not None:
            classes[name]["decoded_priority"] = decoded
    rules = []
    for _ in range(draw(st.integers(0, 6))):
        rule: dict[str, object] = {"class": draw(st.sampled_from(["a", "b", "c", "default"]))}
        kind = draw(st.sampled_from(["whole", "role", "tokens", "shared", "decoded", "mixed"]))
        if kind in ("role", "mixed"):
            rule["role"] = draw(st.sampled_from(["system", "history", "tail"]))
        if kind in ("tokens", "mixed"):
            start = draw(st.integers(-40, 40))
            rule["tokens"] = f"{start}..{draw(st.integers(41, 60))}" if draw(st.booleans()) else f"{start}.."
        if kind == "shared":
            rule["shared_prefix"] = draw(st.sampled_from(["any", ("p",), ("p", "q")]))
        if kind == "decoded":
            rule["role"] = "decoded"
        if draw(st.booleans()):
            rule["tenants"] = tuple(draw(st.lists(_NAMES, min_size=1, max_size=2, unique=True)))
        rules.append(rule)
    bounds = {
        "allow": "clamped",
        "max_priority": draw(st.integers(0, 100)),
        "max_ttl": draw(st.integers(1, 9)),
    }
    document = {"classes": classes, "rules": tuple(rules), "client_wishes": bounds}
    return RetentionPolicy.model_validate(document)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    places = sorted(draw(st.sets(st.integers(0, 70), max_size=8)))
    ranges = [
        WishRange(start, end, draw(st.integers(0, 100)), draw(st.none() | st.floats(0.1, 20)))
        for start, end in zip(places[::2], places[1::2], strict=False)
    ]
    return Wish(tuple(ranges), draw(st.none() | st.integers(0, 100)), None)


SHAPES = st.builds(
    RequestShape,
    st.integers(0, 64),
    tenant=_NAMES,
    system_end=st.none() | st.integers(0, 70),
    tail_start=st.none() | st.integers(0, 70),
    shared_tokens=st.integers(0, 64),
    shared_name=st.sampled_from(["p", "q", "r"]),
    wish=st.none() | wishes(),
)


def class_of(section: RetentionPolicy, shape: RequestShape, token: int) -> tuple[str, int | None]:
    """The class of one prompt token, rule by rule, straight from the words of the documentation."""

    def holds(rule: RetentionRule) -> bool:
        size, system, tail = shape.num_prompt_tokens, shape.system_end, shape.tail_start
        in_system = system is not None and token < system
        in_tail = tail is not None and token >= tail and not in_system
        in_history = system is not None and tail is not None and not in_system and not in_tail
        parts = {None: True, "system": in_system, "history": in_history, "tail": in_tail, "decoded": False}
        if rule.tenants is not None and shape.tenant not in rule.tenants:
            return False
        if rule.tokens is not None and token not in range(size)[rule.tokens.start : rule.tokens.stop]:
            return False
        if rule.shared_prefix is not None:
            named = rule.shared_prefix == "any" or shape.shared_name in rule.shared_prefix
            if not named or token >= shape.shared_tokens:
                return False
        return parts[rule.role]

    for index, rule in enumerate(section.rules):
        if holds(rule):
            return rule.class_name, index
    return "default", None


def grant_of(section: RetentionPolicy, shape: RequestShape, token: int) -> Grant:
    values = section.classes.get(class_of(section, shape, token)[0])
    own = DEFAULT
    if values is not None and values.priority is not None:
        own = Grant(values.priority, values.ttl, 35 if values.ttl is not None else values.priority)
    for asked in shape.wish.ranges if shape.wish is not None else ():
        if asked.start <= token < (asked.end or 0) and token >= shape.shared_tokens:
            return follow(asked.priority, asked.ttl, own, section.client_wishes.bounds(shape.tenant, 35))[0]
    return own


@settings(max_examples=400, deadline=None)
@given(sections(), SHAPES)
def test_ranges_are_what_each_token_gets(section: RetentionPolicy, shape: RequestShape) -> None:
    retention = Classifier(section).classify(shape)
    place = 0
    for one in retention.ranges:
        assert one.start == place < one.end
        place = one.end
        for token in range(one.start, one.end):
            assert (one.class_name, one.rule) == class_of(section, shape, token)
            assert one.grant == grant_of(section, shape, token)
    assert place == shape.num_prompt_tokens
    assert all(one.grant.priority >= one.grant.base for one in (*retention.ranges, retention.decoded))


@settings(max_examples=400, deadline=None)
@given(sections(), SHAPES, st.integers(1, 20), st.integers(0, 80))
def test_blocks_are_the_strongest_of_their_tokens(
    section: RetentionPolicy, shape: RequestShape, block_size: int, num_blocks: int
) -> None:
    retention = Classifier(section).classify(shape)
    tokens = [grant_of(section, shape, token) for token in range(shape.num_prompt_tokens)]
    tokens += [retention.decoded.grant] * (block_size * num_blocks - len(tokens))
    expected = []
    for block in range(num_blocks):
        inside = tokens[block * block_size : (block + 1) * block_size]
        priority = max(grant.priority for grant in inside)
        ttls = [math.inf if g.ttl is None else g.ttl for g in inside if g.priority == priority]
        ttl = None if max(ttls) == math.inf else max(ttls)
        expected.append(Grant(priority, ttl, max(grant.base for grant in inside)))
    assert retention.per_block(block_size, num_blocks) == expected
