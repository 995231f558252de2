"""The retention section: what it can say, what is refused and where, what it means, what needs a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.policy import (
    ExplainRow,
    PolicyError,
    PolicySnapshot,
    PolicyStore,
    RetentionPolicy,
    explain_tenant,
    parse_policy,
)
from vllm_ext.policy.units import TokenSpan, parse_share, parse_span

pytestmark = pytest.mark.unit

TENANCY = """version: 1
tenancy:
  tenants: {acme: {domain: corp}, globex: {}, initech: {}}
  shared_prefixes: [{name: manual, domains: all, text: hello}]
"""
TEXT = (
    TENANCY
    + """retention:
  order: reuse
  default: {priority: 30, decoded_priority: 20}
  classes:
    system: {priority: 90, ttl: 1h}
    batch: {priority: 10, decoded_priority: 0}
    answers: {decoded_priority: 60, decoded_ttl: 90s}
  rules:
    - {class: system, shared_prefix: any}
    - {class: system, role: system, tenants: [acme]}
    - {class: default, tokens: 0..512, domains: [corp, public]}
    - {class: batch, tenants: [globex, unknown], models: [m], adapters: [a, b]}
    - {class: answers, role: decoded}
  tenants:
    acme: {min_share: 20%, max_share: 0.6}
    unknown: {max_share: 5%}
    "*": {max_share: 12.5 %}
  client_wishes:
    allow: clamped
    max_priority: 60
    max_ttl: 10m
    tenants: {acme: {max_priority: 80}, globex: {allow: never}}
"""
)


def retention(text: str = TEXT) -> RetentionPolicy:
    section = parse_policy(text).policy.retention
    assert section is not None
    return section


def problems(section: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse_policy(TENANCY + section, source="p")
    return str(caught.value).splitlines()


def test_everything_that_the_section_can_say() -> None:
    section = retention()
    assert (section.order, section.default.priority, section.default.decoded) == ("reuse", 30, 20)
    assert section.classes["system"].ttl == 3600
    assert section.classes["answers"].decoded_ttl == 90
    assert [rule.class_name for rule in section.rules] == ["system", "system", "default", "batch", "answers"]
    assert section.rules[0].shared_prefix == "any"
    assert section.rules[2].tokens == TokenSpan(0, 512)
    assert section.rules[3].tenants == ("globex", "unknown")
    assert [section.share_of(tenant) for tenant in ("acme", "unknown", "initech")] == [
        section.tenants[name] for name in ("acme", "unknown", "*")
    ]
    assert section.tenants["acme"].min_share == 0.2
    assert section.tenants["*"].max_share == 0.125
    wishes = section.client_wishes
    assert wishes.bounds("acme", 30) == (True, 80, 600)
    assert wishes.bounds("initech", 30) == (True, 60, 600)
    assert wishes.bounds("globex", 30).allowed is False


def test_defaults_are_as_without_the_section() -> None:
    assert parse_policy("version: 1").policy.retention is None
    section = retention("version: 1\nretention: {}")
    assert (section.order, section.default.priority, section.default.decoded) == ("lru", 35, 35)
    assert (section.classes, section.rules, section.tenants, section.share_of("x")) == ({}, (), {}, None)
    assert section.client_wishes.bounds("x", 35) == (False, 35, 600)
    assert retention("version: 1\nretention: {default: {priority: 50}}").default.decoded == 50


def test_one_shared_prefix_may_be_named_without_a_list() -> None:
    text = TENANCY + "retention: {classes: {a: {priority: 1}}, rules: [{class: a, shared_prefix: manual}]}"
    assert retention(text).rules[0].shared_prefix == ("manual",)


@pytest.mark.parametrize(
    ("section", "place", "words"),
    [
        ("retention:", "p:5:1: retention", "section is empty"),
        ("retention: {order: lur}", "p:5:20: retention.order", "did you mean `lru`"),
        ("retention: {default: {priority: 101}}", "p:5:33:", "less than or equal to 100"),
        ("retention: {default: {priority: high}}", "p:5:33:", "whole number"),
        ("retention: {classes: {a: {}}}", "p:5:23: retention.classes.a", "says nothing"),
        ("retention: {classes: {a: {ttl: 1h, decoded_priority: 9}}}", "p:5:23:", "ttl without priority"),
        ("retention: {classes: {a: {priority: 9, prio: 1}}}", "p:5:40:", "did you mean `priority`"),
        ("retention: {classes: {a: {priority: 90, ttl: 31d}}}", "p:5:46:", "not a duration"),
        ("retention: {classes: {a: {priority: 90, ttl: 0}}}", "p:5:46:", "out of range"),
        ("retention: {classes: {a: {priority: 90, ttl: 721h}}}", "p:5:46:", "at most 720h"),
        ("retention: {classes: {default: {priority: 9}}}", "p:5:23:", "what no rule names"),
        ("retention: {classes: {all: {priority: 9}}}", "p:5:23:", "meaning of its own"),
        # After its ttl a block falls back to the default: a lower one would rise.
        ("retention: {classes: {a: {priority: 10, ttl: 1m}}}", "p:5:46:", "from 10 they would rise"),
        ("retention: {classes: {a: {priority: 35, ttl: 1m}}}", "p:5:46:", "not change"),
        (
            "retention: {default: {priority: 60}, classes: {a: {priority: 50, ttl: 1m}}}",
            "p:5:71: retention.classes.a.ttl",
            "above the default's 60",
        ),
        (
            "retention: {default: {decoded_priority: 50}, "
            "classes: {a: {decoded_priority: 40, decoded_ttl: 1m}}}",
            "p:5:95: retention.classes.a.decoded_ttl",
            "above the default's 50",
        ),
        ("retention: {rules: [{class: sytem}]}", "p:5:29:", "there is no class `sytem`"),
        (
            "retention: {classes: {system: {priority: 9}}, rules: [{class: sytem}]}",
            "p:5:63: retention.rules[0].class",
            "did you mean `system`",
        ),
        ("retention: {rules: [{role: system}]}", "p:5:21: retention.rules[0].class", "required"),
        ("retention: {rules: [{class: default, rolle: tail}]}", "p:5:38:", "did you mean `role`"),
        ("retention: {rules: [{class: default, role: sytem}]}", "p:5:44:", "did you mean `system`"),
        ("retention: {rules: [{class: default, tenants: []}]}", "p:5:38:", "matches nothing"),
        ("retention: {rules: [{class: default, tenants: [acmee]}]}", "p:5:48:", "did you mean `acme`"),
        ("retention: {rules: [{class: default, tenants: [hooli]}]}", "p:5:48:", "under `tenancy.tenants`"),
        ("retention: {rules: [{class: default, tenants: [public]}]}", "p:5:48:", "cannot be meant here"),
        ("retention: {rules: [{class: default, domains: [corpp]}]}", "p:5:48:", "did you mean `corp`"),
        ("retention: {rules: [{class: default, domains: [acme]}]}", "p:5:48:", "no tenant belongs to"),
        ("retention: {rules: [{class: default, shared_prefix: [manul]}]}", "p:5:54:", "mean `manual`"),
        ("retention: {rules: [{class: default, shared_prefix: 3}]}", "p:5:53:", "names of shared prefixes"),
        ("retention: {rules: [{class: default, tokens: 512}]}", "p:5:46:", "not a span"),
        ("retention: {rules: [{class: default, tokens: 9..9}]}", "p:5:46:", "no token is in this span"),
        ("retention: {rules: [{class: default, role: decoded, tokens: 0..9}]}", "p:5:21:", "decoded tokens"),
        (
            "retention: {classes: {a: {priority: 9}}, rules: [{class: a, role: decoded}]}",
            "p:5:58:",
            "says nothing about decoded blocks (give the class a decoded_priority)",
        ),
        (
            "retention: {classes: {a: {decoded_priority: 9}}, rules: [{class: a, role: tail}]}",
            "p:5:66:",
            "says nothing about prompt blocks (give the class a priority)",
        ),
        (
            "retention: {rules: [{class: default}, {class: default, role: tail}]}",
            "p:5:39: retention.rules[1]",
            "never reached: the rule on line 5",
        ),
        ("retention: {tenants: {acmee: {max_share: 5%}}}", "p:5:23:", "did you mean `acme`"),
        ("retention: {tenants: {acme: {}}}", "p:5:23: retention.tenants.acme", "no share is given"),
        ("retention: {tenants: {acme: {max_share: 60}}}", "p:5:41:", "not a share (write 20%"),
        ("retention: {tenants: {acme: {max_share: 1}}}", "p:5:41:", "not a share"),
        ("retention: {tenants: {acme: {max_share: 0}}}", "p:5:23:", "a max_share of nothing"),
        ("retention: {tenants: {acme: {max_share: 120%}}}", "p:5:41:", "not a share"),
        ("retention: {tenants: {acme: {min_share: 20%, max_share: 10%}}}", "p:5:23:", "below min_share"),
        ('retention: {tenants: {"*": {min_share: 1%}}}', "p:5:40:", "cannot be promised"),
        (
            "retention: {tenants: {acme: {min_share: 70%}, globex: {min_share: 40%}}}",
            "p:5:13: retention.tenants",
            "add up to 110 %",
        ),
        ("retention: {client_wishes: {allow: always}}", "p:5:36:", "must be `never` or `clamped`"),
        ("retention: {client_wishes: {tenants: {'*': {allow: never}}}}", "p:5:39:", "not a name"),
        ("retention: {client_wishes: {tenants: {hooli: {allow: never}}}}", "p:5:39:", "no tenant `hooli`"),
        ("retention: {client_wishes: {max_ttl: never}}", "p:5:38:", "not a duration"),
        ("max_share: 5%", "p:5:1:", "`max_share` belongs under `retention.tenants.NAME`"),
    ],
)
def test_refusals(section: str, place: str, words: str) -> None:
    found = "\n".join(problems(section))
    assert place in found, found
    assert words in found, found


def test_all_problems_at_once() -> None:
    found = problems(
        """retention:
  order: fifo
  classes: {a: {priority: 10, ttl: 1m}}
  rules: [{class: b}, {class: a, tenants: [nobody]}]
  tenants: {acme: {max_share: 60}}
"""
    )
    assert len(found) == 6


@pytest.mark.parametrize(
    "shares", [("20%", "30%", "50%"), ("0.1", "0.2", "0.7"), ("33.3%", "33.3%", "33.4%")]
)
def test_floors_may_take_up_the_whole_pool(shares: tuple[str, ...]) -> None:
    lines = ", ".join(
        f"{name}: {{min_share: {share}}}"
        for name, share in zip(("acme", "globex", "initech"), shares, strict=True)
    )
    assert len(retention(TENANCY + f"retention: {{tenants: {{{lines}}}}}").tenants) == 3


# -- units


@pytest.mark.parametrize(
    ("text", "share"), [("20%", 0.2), ("12.5 %", 0.125), ("100%", 1), ("0%", 0), (0.25, 0.25), (0, 0)]
)
def test_shares(text: object, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "101%", "-1%", "1e1%", "20", "²%", 1, 1.0, -0.1, True, None, 20])
def test_what_is_no_share(text: object) -> None:
    with pytest.raises(ValueError, match="write 20%"):
        parse_share(text)


@pytest.mark.parametrize(
    ("text", "in_100", "in_3"),
    [
        ("0..16", (0, 16), (0, 3)),
        ("16..", (16, 100), None),
        ("..16", (0, 16), (0, 3)),
        ("-16..", (84, 100), (0, 3)),
        ("-16..-8", (84, 92), None),
        ("10..-10", (10, 90), None),
        ("-200..5", (0, 5), (0, 3)),
    ],
)
def test_spans(text: str, in_100: tuple[int, int], in_3: tuple[int, int] | None) -> None:
    span = parse_span(text)
    assert span.within(100) == in_100
    start, stop = span.within(3)
    assert ((start, stop) if start < stop else None) == in_3
    assert parse_span(str(span)) == span


@pytest.mark.parametrize(
    "text",
    ["", "..", "5", "5..5", "9..3", "-3..-3", "-3..-9", "..0", "-0..", "1...2", "a..b", "٣..٤", 5, None],
)
def test_what_is_no_span(text: object) -> None:
    with pytest.raises(ValueError, match="span"):
        parse_span(text)


@given(st.integers(-300, 300), st.none() | st.integers(-300, 300), st.integers(0, 300))
def test_a_span_picks_what_a_python_slice_picks(start: int, stop: int | None, size: int) -> None:
    first, last = TokenSpan(start, stop).within(size)
    assert list(range(max(0, first), max(first, last))) == list(range(size))[start:stop]


# -- reload

BASE = "version: 1\nretention:\n  order: lru\n  classes: {a: {priority: 9}}\n"


@pytest.mark.parametrize(
    ("text", "outcome", "words"),
    [
        (
            BASE.replace("lru", "reuse"),
            "refused",
            ":3:3: retention.order: the order changed from lru to reuse",
        ),
        ("version: 1", "refused", ":2:1: retention: the section was removed"),
        (BASE.replace("9", "8"), "reloaded", ""),
        (BASE + "  rules: [{class: a}]\n", "reloaded", ""),
        (BASE + "  tenants: {unknown: {max_share: 5%}}\n", "reloaded", ""),
        (BASE + "  client_wishes: {allow: clamped}\n", "reloaded", ""),
        (BASE.replace("  order: lru\n", ""), "reloaded", ""),
    ],
)
def test_reload(tmp_path: Path, text: str, outcome: str, words: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(BASE)
    store = PolicyStore(file)
    file.write_text(text)
    result = store.reload()
    assert result.outcome == outcome
    assert words in result.message
    assert ("restart" in result.message) == (outcome == "refused")


def test_the_section_cannot_be_added_while_the_server_runs(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\n")
    store = PolicyStore(file)
    file.write_text(BASE.replace("version: 1", "version: 1\ntenancy: {}"))
    message = store.reload().message
    assert ":3:1: retention: the section was added" in message
    assert ":2:1: tenancy: the section was added" in message


# -- explain


def values(rows: list[ExplainRow], setting: str) -> list[tuple[str, int | None]]:
    return [
        (row.value, row.position.line if row.position else None) for row in rows if row.setting == setting
    ]


def load(text: str = TEXT) -> PolicySnapshot:
    return parse_policy(text)


def test_explain_a_tenant() -> None:
    rows = explain_tenant(load(), "acme")
    assert values(rows, "eviction order") == [("reuse: what is likely to come back is kept", 6)]
    assert values(rows, "kept") == [
        ("shared prefix any: class system, priority 90 for 1h", 13),
        ("the system part: class system, priority 90 for 1h", 14),
        ("tokens 0..512: class default, priority 30", 15),
        ("decoded tokens: class answers, decoded 60 for 90s", 17),
        ("everything else: class default, priority 30, decoded 20", 7),
    ]
    assert values(rows, "share of the KV blocks") == [
        ("others leave it 20%, above 60% its own blocks go first", 19)
    ]
    assert values(rows, "clients' wishes") == [("heard, priority up to 80 for up to 10m", 26)]


def test_explain_others() -> None:
    rows = explain_tenant(load(), "globex")
    assert ("model m and adapter a or b: class batch, priority 10, decoded 0", 16) in values(rows, "kept")
    assert values(rows, "share of the KV blocks") == [("above 12.5% its own blocks go first", 21)]
    assert values(rows, "clients' wishes") == [("not heard", 26)]
    stranger = explain_tenant(load(), "hooli")
    assert values(stranger, "share of the KV blocks") == [("above 5% its own blocks go first", 20)]
    assert [line for _, line in values(stranger, "kept")] == [13, 16, 17, 7]


def test_explain_says_nothing_without_the_section() -> None:
    assert values(explain_tenant(load(TENANCY), "acme"), "eviction order") == []
