"""`vllm serve MODEL --plugins vllm_ext --policy FILE`: tenants over HTTP, on the real model."""

from __future__ import annotations

import json
import time
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.conftest import ADMIN_KEY, BLOCK, GATEWAY_SECRET, KEYS, SALT_SECRET, SYSTEM, Live, policy

pytestmark = pytest.mark.e2e

ACME, GLOBEX, INITECH = KEYS["acme"], KEYS["globex"], KEYS["initech"]


def text() -> str:
    """A prompt that nobody has sent before, some hundred tokens long."""
    return f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 14


def whole_blocks(tokens: int) -> int:
    return (tokens - 1) // BLOCK * BLOCK


def chat(live: Live, key: str | None, messages: list[dict[str, str]], **options: object) -> tuple[int, int]:
    response = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **options}, key)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def reused_by_chat(live: Live, key: str | None, prompt: str) -> int:
    return chat(live, key, [{"role": "user", "content": prompt}])[1]


def reused_by_chat_stream(live: Live, key: str | None, prompt: str) -> int:
    body = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    response = live.post("/v1/chat/completions", body, key)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def reused_by_completion(live: Live, key: str | None, prompt: str) -> int:
    return live.complete(prompt, key)[1]


def reused_by_invocations(live: Live, key: str | None, prompt: str) -> int:
    response = live.post("/invocations", {"prompt": prompt, "max_tokens": 1}, key)
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def reused_by_responses(live: Live, key: str | None, prompt: str) -> int:
    response = live.post("/v1/responses", {"input": prompt, "max_output_tokens": 8}, key)
    return response.json()["usage"]["input_tokens_details"]["cached_tokens"]


def reused_by_messages(live: Live, key: str | None, prompt: str) -> int:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
    response = live.post("/v1/messages", body, headers={"x-api-key": key} if key else {})
    return response.json()["usage"]["cache_read_input_tokens"]


def reused_by_tokens_in(live: Live, key: str | None, prompt: str) -> int:
    ids = live.post("/tokenize", {"prompt": prompt}, key).json()["tokens"]
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 0}}
    before = live.metric("vllm_ext_reused_prompt_tokens_total")
    response = live.post("/inference/v1/generate", body, key)
    assert response.status_code == 200, response.text
    return int(live.metric("vllm_ext_reused_prompt_tokens_total") - before)


ROUTES = [
    reused_by_chat, reused_by_chat_stream, reused_by_completion, reused_by_invocations, reused_by_responses,
    reused_by_messages, reused_by_tokens_in,
]  # fmt: skip


@pytest.mark.parametrize("reused", ROUTES, ids=lambda route: route.__name__.removeprefix("reused_by_"))
def test_every_route_reuses_within_a_domain_and_not_across(fresh: Live, reused) -> None:
    prompt = text()
    assert reused(fresh, ACME, prompt) == 0
    warm = reused(fresh, ACME, prompt)
    assert warm >= 4 * BLOCK
    assert reused(fresh, GLOBEX, prompt) == 0
    assert reused(fresh, None, prompt) == 0
    assert reused(fresh, None, prompt) == 0, "isolated callers do not even share with themselves"
    assert reused(fresh, GLOBEX, prompt) == warm
    assert reused(fresh, ACME, prompt) == warm


def test_no_route_that_takes_a_prompt_is_forgotten(fresh: Live) -> None:
    """Under `reject`, every route of the server but the listed probes answers 401 to a stranger."""
    strict = policy()
    strict["tenancy"]["unknown"] = "reject"
    fresh.write_policy(strict)
    paths = fresh.request("GET", "/openapi.json").json()["paths"]
    opened = {}
    for path, operations in paths.items():
        for method in operations:
            response = fresh.request(method.upper(), path.replace("{", "").replace("}", ""), json={})
            if response.status_code != 401:
                opened[f"{method.upper()} {path}"] = response.status_code
    assert {path.split()[1] for path in opened} <= {
        "/health", "/ping", "/metrics", "/version", "/load",
        "/vllm_ext/v1/policy", "/vllm_ext/v1/policy/reload",
    }  # fmt: skip
    assert opened["GET /vllm_ext/v1/policy"] == opened["POST /vllm_ext/v1/policy/reload"] == 403
    assert len(paths) > 15


def test_several_prompts_and_samples_of_one_call_share(fresh: Live) -> None:
    prompt = text()
    tokens, reused = fresh.complete([prompt, prompt])
    assert reused == whole_blocks(tokens // 2), "one call is one identity, also where it is isolated"
    assert fresh.complete(prompt)[1] == 0
    before = fresh.metric("vllm_ext_reused_prompt_tokens_total", domain="(isolated)")
    tokens, _ = fresh.complete(text(), n=3)
    grown = fresh.metric("vllm_ext_reused_prompt_tokens_total", domain="(isolated)") - before
    assert grown >= whole_blocks(tokens), "the samples of one call share its prompt"


def test_client_salts_narrow_and_forged_fields_gain_nothing(fresh: Live) -> None:
    prompt = text()
    fresh.complete(prompt, ACME, cache_salt="mine")
    tokens, reused = fresh.complete(prompt, ACME, cache_salt="mine")
    assert reused == whole_blocks(tokens)
    assert fresh.complete(prompt, ACME)[1] == 0
    forged = [
        {"cache_salt": "mine"},
        {"vllm_xargs": {"vllm_ext.tenant": "acme"}},
        {"vllm_xargs": {"vllm_ext.stamp": "A" * 80 + "." + "0" * 64}},
        {"headers": {"x-vllm-ext-tenant": "acme"}},
        {
            "headers": {
                "x-vllm-ext-tenant": "acme",
                "x-vllm-ext-timestamp": "1",
                "x-vllm-ext-signature": "v1=" + "0" * 64,
            }
        },
    ]
    for attempt in forged:
        assert fresh.complete(prompt, None, **attempt)[1] == 0, attempt
    cold = [fresh.complete(prompt, GLOBEX, **attempt)[1] for attempt in forged]
    # From its second own request without a client salt on, globex finds what it has computed itself.
    assert cold[:2] == [0, 0] and set(cold[2:]) == {reused}


def test_shared_prefix_over_chat(fresh: Live) -> None:
    head = len(
        fresh.post(
            "/tokenize", {"messages": [{"role": "system", "content": SYSTEM}], "add_generation_prompt": False}
        ).json()["tokens"]
    )
    shared = head // BLOCK * BLOCK
    assert shared >= BLOCK and head % BLOCK
    question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text()}]
    chat(fresh, ACME, question)
    tokens, reused = chat(fresh, ACME, question)
    assert reused == whole_blocks(tokens) > shared
    assert chat(fresh, GLOBEX, question)[1] == shared
    assert chat(fresh, INITECH, question)[1] == 0
    assert chat(fresh, None, question)[1] == 0


def test_gateway_header(fresh: Live) -> None:
    path, prompt = "/v1/completions", text()
    body = json.dumps({"model": "smollm2", "prompt": prompt, "max_tokens": 1}).encode()

    def send(headers: dict[str, str]) -> int:
        response = fresh.request("POST", path, content=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    fresh.complete(prompt, ACME)
    warm = whole_blocks(fresh.complete(prompt, ACME)[0])
    once = fresh.signed("acme", path, body)
    assert send(once) == warm
    assert send(once) == 0, "a replayed signature is worth nothing"
    assert send(fresh.signed("acme", path, body, timestamp=time.time() - 60)) == 0
    assert send(fresh.signed("acme", path, body + b" ")) == 0
    assert send({**fresh.signed("globex", path, body), "x-vllm-ext-tenant": "acme"}) == 0
    assert send(fresh.signed("someone-new", path, body)) == 0
    assert send(fresh.signed("someone-new", path, body)) == warm, "an unlisted tenant has a domain of its own"
    too_long = b"{" + b" " * 70_000 + b"}"
    assert (
        fresh.request(
            "POST", path, content=too_long, headers=fresh.signed("acme", path, too_long)
        ).status_code
        == 413
    )


def test_reject_answers_401_in_the_shape_of_openai(fresh: Live) -> None:
    strict = policy()
    strict["tenancy"]["unknown"] = "reject"
    assert fresh.write_policy(strict).json()["outcome"] == "reloaded"
    response = fresh.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert response.status_code == 401
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "authentication_error"
    assert (
        fresh.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, "not-a-key-of-anybody").status_code
        == 401
    )
    assert fresh.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, ACME).status_code == 200
    assert fresh.metric("vllm_ext_rejected_requests_total", reason="unknown_key") >= 1
    crashed = fresh.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 1}, ACME, headers={"x-test-crash": "1"}
    )
    assert crashed.status_code == 500 and crashed.json()["error"]["code"] == "internal_error"


def test_a_crash_while_identifying_isolates_and_is_counted(fresh: Live) -> None:
    prompt = text()
    fresh.complete(prompt, ACME)
    before = fresh.metric("vllm_ext_internal_errors_total", part="identity")
    for _ in range(2):
        assert fresh.complete(prompt, ACME, headers={"x-test-crash": "1"})[1] == 0
    assert fresh.metric("vllm_ext_internal_errors_total", part="identity") == before + 2
    assert (
        fresh.metric("vllm_ext_isolation_decisions_total", decision="isolated", reason="internal_error") >= 2
    )
    tokens, reused = fresh.complete(prompt, ACME)
    assert reused == whole_blocks(tokens)


def test_policy_reload_over_http(fresh: Live) -> None:
    assert fresh.request("GET", "/vllm_ext/v1/policy").status_code == 403
    assert fresh.request("GET", "/vllm_ext/v1/policy", ACME).status_code == 403
    state = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
    assert state["last_error"] is None and state["tenancy"]["tenants"] == {name: name for name in KEYS}
    assert [engine["digest"] for engine in state["engines"]] == [state["digest"]]

    changed = policy()
    changed["tenancy"]["tenants"]["newcomer"] = {"domain": "acme", "api_keys": ["env:VLLM_EXT_SALT_SECRET"]}
    known = fresh.write_policy(changed)
    assert known.status_code == 400 and "this key would hold the secret" in known.json()["message"]
    changed["tenancy"]["tenants"]["newcomer"] = {"domain": "acme"}
    assert fresh.write_policy(changed).json()["outcome"] in ("reloaded", "unchanged")
    state = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
    assert state["tenancy"]["tenants"]["newcomer"] == "acme"
    assert [engine["digest"] for engine in state["engines"]] == [state["digest"]]

    broken = fresh.write_policy('{"version": 1, "tenancy": {"unknwon": "isolate"}}')
    assert broken.status_code == 400 and "unknown" in broken.json()["message"]
    after = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
    assert after["digest"] == state["digest"] and "unknwon" in after["last_error"]
    assert fresh.metric("vllm_ext_policy_last_reload_successful") == 0
    assert fresh.metric("vllm_ext_policy_reloads_total", outcome="invalid") >= 1

    secret = policy()
    secret["tenancy"]["salt_secret"] = "env:VLLM_EXT_GATEWAY_SECRET"
    del secret["tenancy"]["gateway"]  # one secret for both would be invalid
    refused = fresh.write_policy(secret)
    assert refused.status_code == 400 and refused.json()["outcome"] == "refused"
    assert "tenancy.salt_secret" in refused.json()["message"]
    prompt = text()
    fresh.complete(prompt, ACME)
    tokens, reused = fresh.complete(prompt, ACME)
    assert reused == whole_blocks(tokens), "the old policy goes on serving"


def test_a_policy_that_only_the_engine_refuses_changes_nothing_anywhere(fresh: Live) -> None:
    """The chat template runs in the engine: a prefix that it refuses must not leave the front end ahead."""
    bad = policy()
    bad["tenancy"]["unknown"] = "reject"
    bad["tenancy"]["shared_prefixes"] = [
        {"name": "bad", "domains": "all", "messages": [{"role": "developer", "content": "x"}]}
    ]
    before = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
    refused = fresh.write_policy(bad)
    assert refused.status_code == 409 and "roles like this are refused" in refused.json()["message"]
    time.sleep(3)  # for the watchers
    after = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
    assert after["digest"] == before["digest"] == after["engines"][0]["digest"]
    assert "refused" in after["last_error"]
    assert fresh.metric("vllm_ext_policy_last_reload_successful") == 0
    assert fresh.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_changed_file_is_noticed_without_being_told(fresh: Live) -> None:
    changed = policy()
    changed["tenancy"]["tenants"]["watched"] = {}
    fresh.policy_path.write_text(json.dumps(changed))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY).json()
        if "watched" in state["tenancy"]["tenants"] and all(
            e["digest"] == state["digest"] for e in state["engines"]
        ):
            return
        time.sleep(0.2)
    pytest.fail(f"not noticed: {state}")


def test_metrics_count_tokens_by_tenant_and_labels_are_bounded(fresh: Live) -> None:
    prompt = text()

    def counted() -> dict[str, float]:
        names = ("requests", "prompt_tokens", "reused_prompt_tokens")
        return {
            name: fresh.metric(f"vllm_ext_{name}_total", tenant="initech", domain="initech") for name in names
        }

    before = counted()
    tokens, _ = fresh.complete(prompt, INITECH)
    _, reused = fresh.complete(prompt, INITECH)
    after = counted()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"requests": 2, "prompt_tokens": 2 * tokens, "reused_prompt_tokens": reused}
    assert fresh.metric("vllm_ext_request_h_tokens_count", tenant="initech") >= 2
    assert fresh.metric("vllm_ext_request_reused_prompt_tokens_sum", tenant="initech") >= reused

    path, body = "/v1/completions", json.dumps({"model": "smollm2", "prompt": "x", "max_tokens": 1}).encode()
    for number in range(20):
        headers = fresh.signed(f"flood-{number}", path, body)
        assert fresh.request("POST", path, content=body, headers=headers).status_code == 200
    series = [
        line
        for line in fresh.request("GET", "/metrics").text.splitlines()
        if line.startswith("vllm_ext_requests_total")
    ]
    assert sum("flood-" in line for line in series) <= 5
    assert any('tenant="other"' in line for line in series)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {"model": st.just("smollm2"), "max_tokens": st.just(1)},
    optional={
        "prompt": st.one_of(st.text(max_size=40), json_values),
        "messages": json_values,
        "cache_salt": json_values,
        "vllm_xargs": st.one_of(
            json_values,
            st.fixed_dictionaries({"vllm_ext.stamp": json_values}, optional={"vllm_ext.tenant": json_values}),
        ),
        "n": st.one_of(st.integers(-1, 3), json_values),
    },
)
bodies = st.one_of(st.binary(max_size=60), fields.map(lambda body: json.dumps(body).encode()))
header_values = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=60
)
headers = st.dictionaries(
    st.sampled_from(
        [
            "authorization",
            "x-api-key",
            "x-vllm-ext-tenant",
            "x-vllm-ext-timestamp",
            "x-vllm-ext-signature",
            "x-request-id",
        ]
    ),
    header_values.map(lambda value: value.strip().encode("latin-1")),
    max_size=4,
)
paths = st.sampled_from(
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/invocations",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
    ]
)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(path=paths, body=bodies, sent=headers)
def fuzz(live: Live, path: str, body: bytes, sent: dict[str, bytes]) -> None:
    raw = [(name.encode(), value) for name, value in {**sent, "content-type": b"application/json"}.items()]
    response = live.client.post(path, content=body, headers=raw)
    live.answers.append(str(response.headers) + response.text)
    assert response.status_code < 600
    if response.status_code == 401:
        raise AssertionError("nobody is rejected under `isolate`")


def test_the_server_survives_500_malformed_requests(fresh: Live) -> None:
    fuzz(fresh)
    assert fresh.request("GET", "/health").status_code == 200
    prompt = text()
    fresh.complete(prompt, ACME)
    tokens, reused = fresh.complete(prompt, ACME)
    assert reused == whole_blocks(tokens)
    assert fresh.metric("vllm_ext_stamp_failures_total") == 0, (
        "every request that came over HTTP carried our own stamp"
    )


def test_zz_no_secret_ever_left_the_server(fresh: Live) -> None:
    """Last in the file on purpose: looks through the log and through every answer of the tests before."""
    fresh.request("GET", "/metrics")
    fresh.request("GET", "/vllm_ext/v1/policy", ADMIN_KEY)
    for form in ("text", "json"):
        assert fresh.request("GET", f"/server_info?config_format={form}", ACME).status_code == 200
    assert fresh.server.log is not None
    told = "\n".join([*fresh.answers, fresh.server.log.read_text(errors="replace")])
    for secret in (SALT_SECRET, GATEWAY_SECRET, *KEYS.values(), ADMIN_KEY):
        assert secret not in told
    assert "Added request" in told, "request logging was on, so this test could fail"
