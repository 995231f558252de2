"""KV reuse on the real engine never crosses a trust domain; on the V1 runner and on the V2 runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tenancy_helpers import BLOCK, FULL_BLOCKS, PROMPT, SECRET, Engine, policy_env
from tests.engine.v2 import RUNNERS, run_in_v1

pytestmark = pytest.mark.engine

SYSTEM = "You are a helpful assistant. Answer the question of the user in a short sentence. " * 3
ACME_SECRET_TEXT = (
    "Once upon a time there was a little server that kept the blocks of its cache in order. " * 4
)
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ACME_SECRET_TEXT}]


def isolation(model: str) -> dict[str, Any]:
    engine = Engine(model)
    reused = {
        "prefix caching": engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching,
        "acme cold": engine.reused("acme"),
        "acme warm": engine.reused("acme"),
    }
    acme = engine.seen[-1]
    stamp, salt = acme.sampling_params.extra_args["vllm_ext.stamp"], acme.cache_salt
    reused |= {
        "same domain": engine.reused("acme-eu"),
        "globex cold": engine.reused("globex"),
        "unknown": engine.reused(None),
        "unknown again": engine.reused(None),
        "own salt": engine.reused("acme", salt="mine"),
        "own salt again": engine.reused("acme", salt="mine"),
        "globex with acme's client salt": engine.reused("globex", salt="mine"),
        "globex with acme's derived salt": engine.reused("globex", salt=salt),
        "globex with acme's stamp": engine.reused("globex", **{"vllm_ext.stamp": stamp}),
        "unknown with acme's stamp": engine.reused(None, **{"vllm_ext.stamp": stamp}),
        "globex warm": engine.reused("globex"),
        "acme still warm": engine.reused("acme"),
    }
    return reused


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_repeat_hits_all_full_blocks_in_its_own_domain_and_none_elsewhere(
    runner: str, tiny_llama: str, tmp_path: Path
):
    reused = RUNNERS[runner](isolation, tiny_llama, env=policy_env(tmp_path))
    assert reused == {
        "prefix caching": True,
        "acme cold": 0,
        "acme warm": FULL_BLOCKS,
        "same domain": FULL_BLOCKS,
        "globex cold": 0,
        "unknown": 0,
        "unknown again": 0,
        "own salt": 0,
        "own salt again": FULL_BLOCKS,
        "globex with acme's client salt": 0,
        "globex with acme's derived salt": 0,
        "globex with acme's stamp": FULL_BLOCKS,  # its own blocks: it warmed them above, and stays globex
        "unknown with acme's stamp": 0,
        "globex warm": FULL_BLOCKS,
        "acme still warm": FULL_BLOCKS,
    }


def stolen_stamp(model: str) -> dict[str, Any]:
    """A front end that is not ours lets a client write into the fields that carry the stamp and the salt."""
    from vllm_ext_plugin import stamping

    engine = Engine(model)
    engine.reused("acme")
    acme = engine.seen[-1]
    stamp, salt = acme.sampling_params.extra_args["vllm_ext.stamp"], acme.cache_salt
    stamping.stamp = lambda *args, **kwargs: None
    result = {
        "stolen": engine.reused(None, salt=salt, **{"vllm_ext.stamp": stamp}),
        "no stamp": engine.reused(None, salt=salt),
        "junk": engine.reused(None, salt=salt, **{"vllm_ext.stamp": 7}),
        "nested junk": engine.reused(None, salt=salt, **{"vllm_ext.stamp": {"a": ["b"]}}),
        "says isolate": engine.reused(None, salt=salt, **{"vllm_ext.stamp": "isolate"}),
    }
    return {**result, "failures": dict(engine.scheduler.vllm_ext.tenancy.ruler.stamp_failures)}


def test_a_stolen_stamp_is_worth_nothing_on_another_request(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(stolen_stamp, tiny_llama, env=policy_env(tmp_path))
    failures = result.pop("failures")
    assert set(result.values()) == {0}
    assert failures == {"bad_mac": 1, "missing": 1, "malformed": 2}


def shared_prefix(model: str) -> dict[str, Any]:
    engine = Engine(model)
    tokenizer = engine.llm.get_tokenizer()
    head = tokenizer.apply_chat_template(CHAT[:1], tokenize=True, return_dict=False)
    _, cold = engine.chat_reused("acme", CHAT)
    other = [CHAT[0], {"role": "user", "content": "Translate the following sentence into French. " * 4}]
    return {
        "head": len(head),
        "acme cold": cold,
        "acme warm": engine.chat_reused("acme", CHAT),
        "globex, other question": engine.chat_reused("globex", other)[1],
        "umbrella, acme's own question": engine.chat_reused("umbrella", CHAT)[1],
        "umbrella, acme's question again": engine.chat_reused("umbrella", CHAT),
        "initech, not in the set": engine.chat_reused("initech", CHAT)[1],
        "unknown": engine.chat_reused(None, CHAT)[1],
        "unknown again": engine.chat_reused(None, CHAT)[1],
    }


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_registered_prefix_is_shared_up_to_its_last_whole_block(
    runner: str, tiny_llama: str, tmp_path: Path
):
    shared = [{"name": "assistant", "domains": ["acme", "globex", "umbrella"], "messages": CHAT[:1]}]
    env = policy_env(
        tmp_path, tenants={"acme": {}, "globex": {}, "umbrella": {}, "initech": {}}, shared_prefixes=shared
    )
    result = RUNNERS[runner](shared_prefix, tiny_llama, env=env)
    head = result["head"] // BLOCK * BLOCK
    prompt, warm = result["acme warm"]
    assert head >= BLOCK and result["head"] % BLOCK, (
        "the registered text must end inside a block for this test to mean something"
    )
    assert warm == (prompt - 1) // BLOCK * BLOCK > head
    assert result["acme cold"] == 0
    assert result["globex, other question"] == head
    assert result["umbrella, acme's own question"] == head, (
        "the registered blocks and not one of acme's private ones"
    )
    assert result["umbrella, acme's question again"] == [prompt, warm]
    assert result["initech, not in the set"] == result["unknown"] == result["unknown again"] == 0


TEXT = "Translate the following sentence into French, then count its words and letters. " * 9


def shared_text(model: str) -> dict[str, Any]:
    engine = Engine(model, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = published.append
    tokenizer = engine.llm.get_tokenizer()
    prompts = {
        who: tokenizer.encode(TEXT + f"What does {who} keep private? " * 4) for who in ("acme", "globex")
    }
    result: dict[str, Any] = {
        "text": len(tokenizer.encode(TEXT)),
        "cold": engine.reused("acme", prompts["acme"]),
        "globex": engine.reused("globex", prompts["globex"]),
        "globex, warm": engine.reused("globex", prompts["globex"]),
        "prompt": len(prompts["globex"]),
    }
    events = repr(published)
    result["events"] = "BlockStored" in events and engine.seen[-1].cache_salt in events
    result["secret in events"] = SECRET in events
    return result


def test_a_registered_text_is_shared_and_events_hold_no_secret(tiny_llama: str, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text(TEXT)
    shared = [{"name": "text", "domains": "all", "file": "prompt.txt"}]
    result = run_in_v1(shared_text, tiny_llama, env=policy_env(tmp_path, shared_prefixes=shared))
    head = result["text"] // BLOCK * BLOCK
    # The last token of the text may merge with what follows: then one block less is wholly inside.
    assert head >= 2 * BLOCK and result["globex"] in (head, head - BLOCK)
    assert result["cold"] == 0
    assert result["globex, warm"] == (result["prompt"] - 1) // BLOCK * BLOCK > head
    assert result["events"] and not result["secret in events"]


OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [/{{ m['role'] }}]{% endfor %}"


def templated(model: str, template: str) -> list[int]:
    from vllm import SamplingParams

    engine = Engine(model)

    def reused(tenant: str) -> int:
        params = SamplingParams(max_tokens=1, extra_args={"vllm_ext.tenant": tenant})
        return engine.llm.chat(CHAT, params, chat_template=template, use_tqdm=False)[0].num_cached_tokens

    return [reused("acme"), reused("globex")]


def test_the_servers_own_chat_template_renders_shared_prefixes(tiny_llama: str, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(OTHER_TEMPLATE)
    shared = [{"name": "assistant", "domains": "all", "messages": CHAT[:1]}]
    env = policy_env(tmp_path, shared_prefixes=shared)
    cold, with_template = run_in_v1(
        templated, tiny_llama, OTHER_TEMPLATE, env={**env, "VLLM_EXT_CHAT_TEMPLATE": str(template)}
    )
    assert cold == 0 and with_template >= BLOCK
    assert run_in_v1(templated, tiny_llama, OTHER_TEMPLATE, env=env) == [0, 0], "rendered by the model's own"


def reset_and_reuse(model: str) -> dict[str, Any]:
    engine = Engine(model)
    engine.reused("acme")
    warm = engine.reused("acme")
    engine.llm.reset_prefix_cache()
    return {"warm": warm, "after reset": engine.reused("acme"), "warm again": engine.reused("acme")}


def test_resetting_the_prefix_cache_still_works(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(reset_and_reuse, tiny_llama, env=policy_env(tmp_path))
    assert result == {"warm": FULL_BLOCKS, "after reset": 0, "warm again": FULL_BLOCKS}


def block_hashes(model: str, tenant: str, **options: Any) -> list[str]:
    engine = Engine(model, **options)
    engine.reused(tenant)
    return engine.last_hashes()


def test_equal_secrets_give_equal_hashes_and_nothing_else_does(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path)
    first = run_in_v1(block_hashes, tiny_llama, "acme", env=env)
    assert len(first) == FULL_BLOCKS // BLOCK and len(set(first)) == len(first)
    assert run_in_v1(block_hashes, tiny_llama, "acme", env=env) == first
    for other in (
        run_in_v1(
            block_hashes, tiny_llama, "acme", env={**env, "TEST_SALT_SECRET": "another secret, just as long"}
        ),
        run_in_v1(block_hashes, tiny_llama, "acme", env=env, revision="another-revision"),
        run_in_v1(block_hashes, tiny_llama, "globex", env=env),
    ):
        assert not set(other) & set(first)


def crashes(model: str) -> dict[str, Any]:
    from vllm_ext.tenancy.engine_side import EngineTenancy
    from vllm_ext.tenancy.salt import Salter
    from vllm_ext.tenancy.stamp import Stamper

    def boom(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug of ours")

    engine = Engine(model)
    result = {"cold": engine.reused("acme"), "warm": engine.reused("acme")}
    for owner, name in (
        (Salter, "domain_salt"),
        (Stamper, "stamp"),
        (Stamper, "verify"),
        (EngineTenancy, "rule"),
    ):
        original = getattr(owner, name)
        setattr(owner, name, boom)
        result[f"{name} fails"] = [engine.reused("acme"), engine.reused("acme")]
        setattr(owner, name, original)
    result["mended"] = engine.reused("acme")
    front_end = __import__("vllm_ext_plugin.front_end", fromlist=["latest"]).latest()
    return {
        **result,
        "front end errors": dict(front_end.faults.counts),
        "engine errors": dict(engine.scheduler.vllm_ext.faults.counts),
    }


def test_a_crash_in_our_code_isolates_the_request_and_nothing_more(tiny_llama: str, tmp_path: Path):
    result = run_in_v1(crashes, tiny_llama, env=policy_env(tmp_path))
    assert result == {
        "cold": 0,
        "warm": FULL_BLOCKS,
        "domain_salt fails": [0, 0],
        "stamp fails": [0, 0],
        "verify fails": [0, 0],
        "rule fails": [0, 0],
        "mended": FULL_BLOCKS,
        "front end errors": {"stamping": 4},
        "engine errors": {"salting": 6},
    }


def rejects(model: str) -> dict[str, Any]:
    from vllm_ext_plugin import stamping

    engine = Engine(model)
    said = {}
    for tenant in (None, "nobody"):
        try:
            engine.reused(tenant)
        except ValueError as error:
            said[str(tenant)] = str(error)
    stamp = stamping.stamp
    stamping.stamp = lambda *args, **kwargs: None
    unstamped = engine.output(None)
    stamping.stamp = stamp
    return {
        "said": said,
        "unstamped": [unstamped.outputs[0].finish_reason, list(unstamped.outputs[0].token_ids)],
        "afterwards": [engine.reused("acme"), engine.reused("acme")],
        "unfinished": engine.llm.llm_engine.get_num_unfinished_requests(),
        "free blocks": engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


@pytest.mark.parametrize("runner", RUNNERS)
def test_reject_refuses_in_python_and_in_the_engine_and_the_engine_lives_on(
    runner: str, tiny_llama: str, tmp_path: Path
):
    result = RUNNERS[runner](rejects, tiny_llama, env=policy_env(tmp_path, unknown="reject"))
    assert "vllm_ext.tenant" in result["said"]["None"]
    assert "acme" in result["said"]["nobody"]
    assert result["unstamped"] == ["error", []]
    assert result["afterwards"] == [0, FULL_BLOCKS]
    assert result["unfinished"] == 0
    assert result["free blocks"] == 255  # all but vLLM's null block


def public_rule(model: str) -> list[int]:
    engine = Engine(model)
    return [engine.reused(None), engine.reused(None), engine.reused("acme")]


def test_public_lets_the_unknown_share_among_themselves_only(tiny_llama: str, tmp_path: Path):
    assert run_in_v1(public_rule, tiny_llama, env=policy_env(tmp_path, unknown="public")) == [
        0,
        FULL_BLOCKS,
        0,
    ]


def pooling(model: str) -> list[int]:
    from vllm import PoolingParams

    engine = Engine(model, runner="pooling", convert="embed")

    def reused(tenant: str) -> int:
        params = PoolingParams(extra_kwargs={"vllm_ext.tenant": tenant})
        (output,) = engine.llm.embed([{"prompt_token_ids": PROMPT}], pooling_params=params, use_tqdm=False)
        return output.num_cached_tokens

    return [reused("acme"), reused("acme"), reused("globex"), reused("globex")]


def test_embeddings_are_isolated_too(tiny_llama: str, tmp_path: Path):
    assert run_in_v1(pooling, tiny_llama, env=policy_env(tmp_path)) == [0, FULL_BLOCKS, 0, FULL_BLOCKS]


def in_a_process_of_its_own(model: str) -> dict[str, Any]:
    import multiprocessing.context as contexts

    started = []
    for name in ("SpawnProcess", "ForkProcess"):
        original = getattr(contexts, name)._Popen

        def popen(process: Any, original: Any = original, name: str = name) -> Any:
            started.append(name.removesuffix("Process").lower())
            return original(process)

        getattr(contexts, name)._Popen = staticmethod(popen)
    engine = Engine(model)
    assert not hasattr(engine, "scheduler"), "the engine must run in a process of its own here"
    reused = [engine.reused("acme"), engine.reused("acme"), engine.reused("globex")]
    return {"reused": reused, "started": sorted(set(started))}


def test_the_plugin_is_live_in_an_engine_process_that_was_spawned(tiny_llama: str, tmp_path: Path):
    env = {
        **policy_env(tmp_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    result = run_in_v1(in_a_process_of_its_own, tiny_llama, env=env)
    assert result == {"reused": [0, FULL_BLOCKS, 0], "started": ["spawn"]}


def forked() -> dict[str, Any]:
    import multiprocessing
    import os

    from vllm.plugins import load_general_plugins

    from vllm_ext_plugin import register
    from vllm_ext_plugin.patching import patches

    load_general_plugins()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        load_general_plugins()
        register()
        theirs.send((os.getpid(), [str(patch) for patch in patches()]))

    process = context.Process(target=child)
    process.start()
    pid, inherited = ours.recv()
    process.join()
    return {
        "own process": pid != os.getpid(),
        "parent": [str(patch) for patch in patches()],
        "child": inherited,
    }


def test_the_plugin_is_live_in_a_forked_process(tmp_path: Path):
    """vLLM's CPU platform always spawns its engine, so here the fork is the test's own."""
    result = run_in_v1(forked, env=policy_env(tmp_path))
    assert result["own process"]
    assert result["child"] == result["parent"]
    assert any(name.endswith("EngineArgs.create_engine_config") for name in result["child"])


def image_keys(model: str) -> dict[str, Any]:
    """vLLM shares encoder outputs between all requests by this identifier."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    engine = Engine(model)
    extension = engine.scheduler.vllm_ext.tenancy
    enforce, found = extension._enforce, []

    def with_image(request: Any) -> Any:
        request.mm_features = [
            MultiModalFeatureSpec(None, "image", "picture-hash", PlaceholderRange(offset=64, length=32))
        ]
        ruling = enforce(request)
        found.append(request.mm_features[0].identifier)
        request.mm_features = []  # this model cannot see
        return ruling

    extension._enforce = with_image
    for tenant in ("acme", "acme", "globex"):
        engine.reused(tenant)
    return {"identifiers": found, "shared": extension.ruler.decisions["shared_prefix", "known"]}


def test_encoder_cache_keys_carry_the_domain(tiny_llama: str, tmp_path: Path):
    acme, again, globex = run_in_v1(image_keys, tiny_llama, env=policy_env(tmp_path))["identifiers"]
    assert acme == again != globex
    assert acme.endswith(":picture-hash") and globex.endswith(":picture-hash")


def reload_in_place(model: str, policy: str) -> dict[str, Any]:
    import json

    path = Path(policy)
    body = json.loads(path.read_text())
    engine = Engine(model)
    from vllm_ext_plugin.front_end import latest

    stores = (latest().store, engine.scheduler.vllm_ext.store)
    result: dict[str, Any] = {"before": [engine.reused("acme"), engine.reused("acme")]}

    def change(text: str) -> list[str]:
        path.write_text(text)
        return [store.reload().outcome for store in stores]

    body["tenancy"]["tenants"]["initech"] = {"domain": "acme"}
    result["new tenant"] = change(json.dumps(body))
    result["in acme's domain"] = engine.reused("initech")
    result["broken"] = change("tenancy: [")
    result["kept"] = engine.reused("initech")
    other = json.loads(json.dumps(body))
    other["tenancy"]["salt_secret"] = "env:PATH"
    result["other secret"] = change(json.dumps(other))
    result["kept again"] = engine.reused("acme")
    bad = json.loads(json.dumps(body))
    bad["tenancy"]["shared_prefixes"] = [
        {"name": "p", "domains": "all", "messages": [{"role": "system", "content": "x"}]}
    ]
    extension = engine.scheduler.vllm_ext
    tenancy = extension.tenancy
    build, tenancy._build = (
        tenancy._build,
        lambda snapshot: (_ for _ in ()).throw(ValueError("the template refuses")),
    )
    path.write_text(json.dumps(bad))
    refused = extension.store.reload()
    tenancy._build = build
    result["engine cannot build"] = [refused.outcome, "the template refuses" in refused.message]
    result["kept once more"] = engine.reused("acme")
    return result


def test_a_reload_swaps_whole_policies_and_a_bad_one_changes_nothing(tiny_llama: str, tmp_path: Path):
    env = policy_env(tmp_path)
    result = run_in_v1(reload_in_place, tiny_llama, env["VLLM_EXT_POLICY"], env=env)
    assert result.pop("before") == [0, FULL_BLOCKS]
    # The watcher may come first and leave nothing to change.
    assert set(result.pop("new tenant")) <= {"reloaded", "unchanged"}
    assert result == {
        "in acme's domain": FULL_BLOCKS,
        "broken": ["invalid", "invalid"],
        "kept": FULL_BLOCKS,
        "other secret": ["refused", "refused"],
        "kept again": FULL_BLOCKS,
        "engine cannot build": ["refused", True],
        "kept once more": FULL_BLOCKS,
    }
