"""Hot reload: what swaps, what is kept, what is refused, and what is noticed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_ext.policy import PolicyError, PolicyStore, ReloadResult
from vllm_ext.policy.watching import PolicyWatcher

pytestmark = pytest.mark.unit

BASE = "version: 1\ntenancy:\n  salt_secret: file:salt\n  tenants:\n    acme: {}\n"
SALT = "salt-secret-0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "salt").write_text(SALT)
    path = tmp_path / "policy.yaml"
    path.write_text(BASE)
    return path


@pytest.fixture
def store(file: Path) -> Iterator[PolicyStore]:
    store = PolicyStore(file)
    yield store
    store.stop()


def tenants(store: PolicyStore) -> list[str]:
    tenancy = store.current.policy.tenancy
    assert tenancy is not None
    return list(tenancy.tenants)


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def test_reload_swaps_and_tells(store: PolicyStore, file: Path) -> None:
    swaps: list[tuple[str, str]] = []
    results: list[ReloadResult] = []
    store.on_swap.append(lambda old, new: swaps.append((old.digest, new.digest)))
    store.on_result.append(results.append)
    before = store.current
    file.write_text(BASE + "    globex: {}\n")
    result = store.reload()
    assert (result.outcome, result.digest, store.generation) == ("reloaded", store.current.digest, 1)
    assert tenants(store) == ["acme", "globex"]
    assert before.policy.tenancy is not None
    assert list(before.policy.tenancy.tenants) == ["acme"]
    assert swaps == [(before.digest, store.current.digest)]
    assert results == [result]


def test_unchanged(store: PolicyStore) -> None:
    before = store.current
    assert store.reload().outcome == "unchanged"
    assert store.current is before
    assert store.generation == 0


@pytest.mark.parametrize("text", ["", "version: 1\ntenancy: {unknwon: x}", "version: [", None])
def test_invalid_keeps_the_old_one(
    store: PolicyStore, file: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    before = store.current
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with caplog.at_level(logging.WARNING, "vllm_ext.policy"):
        result = store.reload()
        store.reload()
    assert (result.outcome, result.digest) == ("invalid", before.digest)
    assert store.current is before
    assert result.message == store.last_error
    assert str(file) in result.message
    assert len(caplog.records) == 1, "the same error is logged once"
    caplog.clear()
    file.write_text(BASE)
    with caplog.at_level(logging.INFO, "vllm_ext.policy"):
        mended = store.reload()
        store.reload()
    assert (mended.outcome, store.last_error) == ("unchanged", None)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == mended.message
    assert mended.message == f"policy file is sound again, {before.digest[:12]} in force"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("globex: {}", "treasury: {}"), "+1 tenant treasury, -1 tenant globex"),
        (("unknown: isolate", "unknown: reject"), "unknown: isolate -> reject"),
        (("{class: low}", "{class: low, tenants: [acme]}"), "retention rules changed"),
        (("priority: 9", "priority: 8"), "retention classes changed"),
        (("max_share: 50%", "max_share: 60%"), "retention shares changed"),
        (("allow: never", "allow: clamped"), "retention client wishes changed"),
        (("retention:\n", "retention:\n  default: {priority: 40}\n"), "retention default changed"),
        (("acme: {}", "acme: {domain: corp}"), "domain of acme: acme -> corp"),
        (("acme: {}", f"acme: {{api_keys: ['sha256:{'7' * 64}']}}"), "API keys of acme changed"),
        (("replay_window: 30s", "replay_window: 1m"), "gateway.replay_window: 30.0 s -> 60.0 s"),
        (("file:gate", "file:gate2"), "gateway.secret changed"),
        (("  gateway: {secret: file:gate, replay_window: 30s}\n", ""), "gateway removed"),
        (("text: hi", "text: ho"), "shared prefix greeting changed"),
        (("name: greeting", "name: hail"), "+1 shared prefix hail, -1 shared prefix greeting"),
        (("trusted_connectors: [A]", "trusted_connectors: []"), "trusted_connectors changed"),
        (("admin: {}", f"admin: {{api_keys: ['sha256:{'7' * 64}']}}"), "admin keys changed"),
        (("metrics: {}", "metrics: {max_tenant_labels: 7}"), "metrics.max_tenant_labels: 100 -> 7"),
        (("version: 1", "version: 1  # one"), "comments or layout only"),
        (
            ("globex: {}", ", ".join(f"t{index}: {{}}" for index in range(7))),
            "+7 tenants t0 t1 t2 t3 t4 and 2 more, -1 tenant globex",
        ),
    ],
)
def test_a_reload_says_what_changed(
    tmp_path: Path, change: tuple[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = """version: 1
tenancy:
  unknown: isolate
  tenants: {acme: {}, globex: {}}
  trusted_connectors: [A]
  gateway: {secret: file:gate, replay_window: 30s}
  shared_prefixes: [{name: greeting, domains: all, text: hi}]
retention:
  classes: {low: {priority: 9}}
  rules: [{class: low}]
  tenants: {acme: {max_share: 50%}}
  client_wishes: {allow: never}
admin: {}
metrics: {}
"""
    for name in ("gate", "gate2"):
        (tmp_path / name).write_text(f"{name}-secret-0123456789")
    file = tmp_path / "p.yaml"
    file.write_text(text)
    store = PolicyStore(file)
    before = store.current.digest
    assert change[0] in text
    file.write_text(text.replace(*change))
    with caplog.at_level(logging.INFO, "vllm_ext.policy"):
        result = store.reload()
    assert result.outcome == "reloaded", result.message
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, result.message)
    digests = f"{store.current.digest[:12]} in force, before it {before[:12]}"
    assert result.message == f"policy reloaded: {digests}: {words}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: 1\n", ":2:1: tenancy: the section was removed"),
        (BASE.replace("file:salt", "file:salt2"), ":3:3: tenancy.salt_secret: the reference changed"),
        (BASE.replace("  salt_secret: file:salt\n", ""), ":3:3: tenancy.salt_secret: the reference changed"),
        (BASE + "  model_id: m\n", ":6:3: tenancy.model_id: the model identity changed"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(
    store: PolicyStore, file: Path, text: str, words: str
) -> None:
    (file.parent / "salt2").write_text(SALT)
    before = store.current
    file.write_text(text)
    result = store.reload()
    assert result.outcome == "refused"
    assert words in result.message
    assert "restart" in result.message
    assert store.current is before
    assert store.last_error == result.message


def test_tenancy_cannot_be_added(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("version: 1")
    store = PolicyStore(file)
    file.write_text("version: 1\ntenancy: {}")
    assert "the section was added" in store.reload().message


def test_another_value_behind_the_salt_secret_is_refused_and_not_told(store: PolicyStore, file: Path) -> None:
    (file.parent / "salt").write_text("another-secret-0123456789")
    result = store.reload()
    assert result.outcome == "refused"
    assert "the value behind file:salt changed" in result.message
    assert "another-secret" not in result.message
    assert SALT not in result.message
    assert store.current.salt_secret == SALT.encode()


def test_a_rotated_key_behind_a_reference_is_reloaded(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("old-key-0123456789")
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\ntenancy: {tenants: {a: {api_keys: [file:key]}}}")
    store = PolicyStore(file)
    before = store.current
    (tmp_path / "key").write_text("new-key-0123456789")
    assert store.reload().outcome == "reloaded"
    assert store.current.key_digests != before.key_digests
    assert store.current.digest == before.digest


def test_apply_takes_the_given_text(store: PolicyStore, file: Path) -> None:
    assert store.apply(BASE + "    globex: {}\n").outcome == "reloaded"
    assert tenants(store) == ["acme", "globex"]
    assert store.apply("version: 0").outcome == "invalid"
    assert file.read_text() == BASE


def test_check_changes_nothing(store: PolicyStore) -> None:
    results: list[ReloadResult] = []
    store.on_result.append(results.append)
    before = store.current
    assert store.check(BASE + "    globex: {}\n").outcome == "reloaded"
    assert store.check("version: 0").outcome == "invalid"
    assert store.current is before
    assert (results, store.generation, store.last_error) == ([], 0, None)


def test_a_validator_refuses(store: PolicyStore, file: Path) -> None:
    def refuse(new: object) -> None:
        raise ValueError("not on this model")

    store.validators.append(refuse)
    file.write_text(BASE + "    globex: {}\n")
    result = store.reload()
    assert result.outcome == "refused"
    assert "not on this model" in result.message
    assert tenants(store) == ["acme"]


def test_callbacks_that_fail_stop_nothing(store: PolicyStore, file: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    called: list[object] = []
    store.on_swap += [fail, lambda old, new: called.append(new)]
    store.on_result.append(fail)
    file.write_text(BASE + "    globex: {}\n")
    assert store.reload().outcome == "reloaded"
    assert called == [store.current]


def test_construction_fails_loudly(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such file"):
        PolicyStore(tmp_path / "missing.yaml")


def test_without_a_file_the_default_is_in_force() -> None:
    store = PolicyStore(None)
    store.start_watching()
    assert store.reload().outcome == "unchanged"
    assert store.current.policy.tenancy is not None
    assert store.apply("version: 1\ntenancy: {unknown: reject}").outcome == "reloaded"
    store.stop()


def test_readers_see_whole_snapshots_while_it_swaps(store: PolicyStore) -> None:
    texts = [BASE, BASE.replace("acme: {}", "acme: {domain: x}") + "    globex: {domain: x}\n"]
    torn: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            snapshot = store.current
            assert snapshot.policy.tenancy is not None
            names = list(snapshot.policy.tenancy.tenants)
            if (snapshot.domain_of("acme") == "x") != (names == ["acme", "globex"]):
                torn.append(names)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        assert store.apply(texts[(turn + 1) % 2]).outcome == "reloaded"
    done.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert store.generation == 60


# -- watching


def test_watch_notices_a_change_and_a_replacement(store: PolicyStore, file: Path) -> None:
    store.start_watching()
    store.start_watching()  # a second time is no second thread
    file.write_text(BASE + "    globex: {}\n")
    eventually(lambda: tenants(store) == ["acme", "globex"])
    new = file.with_suffix(".new")
    new.write_text(BASE + "    initech: {}\n")
    os.replace(new, file)
    eventually(lambda: tenants(store) == ["acme", "initech"])


def test_watch_survives_an_invalid_file(store: PolicyStore, file: Path) -> None:
    store.start_watching()
    file.write_text("version: [")
    eventually(lambda: store.last_error is not None)
    assert tenants(store) == ["acme"]
    file.write_text(BASE + "    globex: {}\n")
    eventually(lambda: tenants(store) == ["acme", "globex"])
    assert store.last_error is None


def test_watch_survives_a_name_that_no_file_can_have(
    store: PolicyStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt written under `file:` instead of `text:`: looking for it raises, and must not end the
    watch.
    """
    monkeypatch.setattr("vllm_ext.policy.watching.POLL_SECONDS", 0.2)
    store.start_watching()
    long = "a prompt of many words " * 20
    file.write_text(BASE + f"  shared_prefixes: [{{name: p, domains: all, file: '{long}'}}]\n")
    eventually(lambda: store.last_error is not None)
    time.sleep(0.5)
    file.write_text(BASE + "    globex: {}\n")
    eventually(lambda: tenants(store) == ["acme", "globex"])


def test_whoever_follows_may_ask_to_be_called_again(
    store: PolicyStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ext.policy.watching.POLL_SECONDS", 0.1)
    calls: list[int] = []

    def follow() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("the engine did not answer")
        store.reload()

    store.start_watching(follow)
    file.write_text(BASE + "    globex: {}\n")
    eventually(lambda: tenants(store) == ["acme", "globex"])


def test_the_watcher_reports_what_is_news_only(store: PolicyStore, file: Path) -> None:
    """`on_result` feeds a counter: routine is not counted, and one bad edit is counted once."""
    results: list[str] = []
    looks: list[bool] = []
    follow = store._follow

    def counted() -> None:
        follow()
        looks.append(True)

    store._follow = counted  # type: ignore[method-assign]
    store.on_result.append(lambda result: results.append(result.outcome))

    def looked_after(change: Callable[[], object], times: int = 1) -> None:
        seen = len(looks)
        change()
        eventually(lambda: len(looks) >= seen + times)

    (file.parent / "prompts").mkdir()
    looked_after(store.start_watching)
    looked_after(lambda: os.utime(file, (1, 1)))
    assert results == []
    bad = BASE + "  shared_prefixes: [{name: p, domains: all, file: prompts/p.txt}]\n"
    looked_after(lambda: file.write_text(bad), times=2)  # the second with the missing file's folder
    assert results == ["invalid"], "the same mistake, though another set of files is watched"
    looked_after(lambda: os.utime(file, (1, 1)))
    assert results == ["invalid"]
    looked_after(lambda: file.write_text(BASE))
    eventually(lambda: store.last_error is None)
    assert results == ["invalid", "unchanged"]
    file.write_text(BASE + "    globex: {}\n")
    eventually(lambda: store.generation == 1)
    eventually(lambda: results == ["invalid", "unchanged", "reloaded"])


def test_the_watcher_does_not_repeat_what_a_post_has_reported(store: PolicyStore, file: Path) -> None:
    results: list[str] = []
    store.on_result.append(lambda result: results.append(result.outcome))
    file.write_text("version: [")
    store.report(store.check(store.read()))
    store._follow()
    assert results == ["invalid"]
    store.reload()
    store.report(store.check(store.read()))
    assert results == ["invalid"] * 3, "whoever asks is told each time"
    file.write_text(BASE)
    store.apply(BASE)
    store._follow()
    assert store.apply(BASE).message == store.reload().message == "nothing has changed"
    assert results == ["invalid"] * 3 + ["unchanged"] * 3


def test_watch_follows_a_config_map_swap(tmp_path: Path) -> None:
    """As the kubelet does it: file -> ..data/file, ..data -> ..TIMESTAMP, ..data is replaced by a rename."""

    def publish(version: str, text: str) -> None:
        (tmp_path / version).mkdir()
        (tmp_path / version / "policy.yaml").write_text(text)
        (tmp_path / "..data_tmp").symlink_to(version)
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    publish("..1", "version: 1\ntenancy: {tenants: {one: {}}}")
    (tmp_path / "policy.yaml").symlink_to("..data/policy.yaml")
    store = PolicyStore(tmp_path / "policy.yaml")
    store.start_watching()
    try:
        for turn in ("two", "three"):
            publish(f"..{turn}", f"version: 1\ntenancy: {{tenants: {{{turn}: {{}}}}}}")
            eventually(lambda turn=turn: tenants(store) == [turn])  # type: ignore[misc]
    finally:
        store.stop()


def test_watch_follows_referenced_files_in_other_folders(tmp_path: Path) -> None:
    for folder in ("policy", "prompts", "later"):
        (tmp_path / folder).mkdir()
    prompt = tmp_path / "prompts" / "p.txt"
    prompt.write_text("first")
    file = tmp_path / "policy" / "p.yaml"
    text = "version: 1\ntenancy: {shared_prefixes: [{name: p, domains: all, file: ../%s/p.txt}]}"
    file.write_text(text % "prompts")
    store = PolicyStore(file)
    store.start_watching()
    try:
        prompt.write_text("second")
        eventually(lambda: store.current.shared_texts["p"] == "second")
        file.write_text(text % "later")  # names a file that is not there yet
        eventually(lambda: store.last_error is not None)
        (tmp_path / "later" / "p.txt").write_text("third")
        eventually(lambda: store.current.shared_texts["p"] == "third")
    finally:
        store.stop()


def test_stamps_find_what_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import watchfiles

    def broken(*_: object, **__: object) -> Iterator[object]:
        raise OSError("inotify watch limit reached")

    monkeypatch.setattr(watchfiles, "watch", broken)
    file = tmp_path / "p.yaml"
    file.write_text("1")
    calls: list[str] = []
    watcher = PolicyWatcher(file, tuple, lambda: calls.append(file.read_text()), poll_seconds=0.05)
    watcher.start()
    try:
        file.write_text("22")
        eventually(lambda: calls[-1:] == ["22"])
        time.sleep(0.3)
        assert calls.count("22") == 1, "a file that stays as it is is read once"
    finally:
        watcher.stop()


def test_stop_ends_the_thread(store: PolicyStore, file: Path) -> None:
    store.start_watching()
    store.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-ext-policy-watch"]
    file.write_text(BASE + "    globex: {}\n")
    time.sleep(0.3)
    assert tenants(store) == ["acme"]
