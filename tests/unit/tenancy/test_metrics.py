from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from vllm_ext.engine_totals import EngineTotals
from vllm_ext.labels import OTHER, LabelCap
from vllm_ext.tenancy.identity import IdentifiedBy, Identity, TrustDomain
from vllm_ext.tenancy.metrics import TenancyMetrics

pytestmark = pytest.mark.unit


@given(st.lists(st.text(max_size=3)), st.integers(0, 5))
def test_at_most_limit_names_beside_the_listed_ones(asked: list[str], limit: int) -> None:
    cap = LabelCap(limit, listed=["acme"])
    labels = {cap(name) for name in asked}
    plain = {label for label in labels if not (label.startswith("(") and label.endswith(")"))}
    assert len(plain - {OTHER}) <= limit
    assert cap("acme") == ("acme" if limit else OTHER)


def test_a_name_keeps_its_label() -> None:
    cap = LabelCap(1)
    assert [cap("a"), cap("b"), cap("a")] == ["a", OTHER, "a"]


def metrics() -> tuple[TenancyMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return TenancyMetrics(LabelCap(9), LabelCap(9), registry), registry


def test_tokens_and_ratio_per_request() -> None:
    made, registry = metrics()
    acme = Identity("acme", TrustDomain.declared("shop"), IdentifiedBy.API_KEY, "known")
    made.request_admitted(acme)
    made.prefill_finished(acme, 200, 150)
    made.prefill_finished(acme, 0, 0)
    who = {"tenant": "acme", "domain": "shop"}
    assert registry.get_sample_value("vllm_ext_requests_total", {**who, "identified_by": "api_key"}) == 1
    assert registry.get_sample_value("vllm_ext_prompt_tokens_total", who) == 200
    assert registry.get_sample_value("vllm_ext_reused_prompt_tokens_total", who) == 150
    assert registry.get_sample_value("vllm_ext_request_h_tokens_sum", who) == 0.75
    assert registry.get_sample_value("vllm_ext_request_h_tokens_count", who) == 1


def test_isolated_domains_are_one_label() -> None:
    made, registry = metrics()
    for _ in range(50):
        made.request_admitted(Identity.isolated("no_credentials"))
    labels = {"tenant": "(unknown)", "domain": "(isolated)", "identified_by": "unknown_rule"}
    assert registry.get_sample_value("vllm_ext_requests_total", labels) == 50


@given(st.lists(st.integers(0, 20), min_size=1, max_size=10))
def test_engine_totals_never_run_backwards_and_survive_a_restart(totals: list[int]) -> None:
    made, registry = metrics()
    engine = EngineTotals()
    made.register(engine)
    expected, last, shown = 0, 0, 0.0
    for total in totals:
        engine.update(0, {"stamp_failures": [(["missing"], float(total))], "unheard_of": [([], 1.0)]})
        expected += total - last if total >= last else total
        last = total
        value = registry.get_sample_value("vllm_ext_stamp_failures_total", {"reason": "missing"}) or 0.0
        assert value >= shown
        shown = value
    assert shown == expected
