"""Which eviction policy the CPU offload tier gets."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext_plugin.retention import offload_config

pytestmark = pytest.mark.unit


def config(connector: str | None, extra: dict[str, Any] | None = None) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra or {})
    return SimpleNamespace(kv_transfer_config=transfer)


def test_the_tier_gets_our_policy_and_the_users_object_stays() -> None:
    given = config("OffloadingConnector", {"cpu_bytes_to_use": 1 << 30})
    users = given.kv_transfer_config
    before = copy.deepcopy(users)
    offload_config.choose(given)
    assert given.kv_transfer_config.kv_connector_extra_config == {
        "cpu_bytes_to_use": 1 << 30,
        "eviction_policy": "vllm_ext",
    }
    assert users == before
    assert offload_config.ours(given)


@pytest.mark.parametrize("chosen", ["lru", "arc", "vllm_ext"])
def test_what_the_user_chose_stays_and_is_told(chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    given = config("OffloadingConnector", {"eviction_policy": chosen})
    transfer = given.kv_transfer_config
    with caplog.at_level(logging.WARNING, logger="vllm_ext"):
        offload_config.choose(given)
    assert given.kv_transfer_config is transfer
    assert transfer.kv_connector_extra_config == {"eviction_policy": chosen}
    assert (repr(chosen) in caplog.text) is (chosen != "vllm_ext")


def test_inside_a_multi_connector_too() -> None:
    parts = [
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"eviction_policy": "arc"}},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"blocks_per_chunk": 4}},
    ]
    given = config("MultiConnector", {"connectors": parts})
    offload_config.choose(given)
    assert parts[2] == {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"blocks_per_chunk": 4},
    }
    assert offload_config.ours(given) == [{"blocks_per_chunk": 4, "eviction_policy": "vllm_ext"}]
    assert [extra["eviction_policy"] for extra in offload_config.cpu_tiers(given)] == ["arc", "vllm_ext"]


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        (None, {}),
        ("NixlConnector", {}),
        ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1}),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}),
        ("OffloadingConnector", {"spec_name": "Mine", "spec_module_path": "my.spec"}),
    ],
)
def test_others_are_left_alone(connector: str | None, extra: dict[str, Any]) -> None:
    given = config(connector, dict(extra))
    transfer = given.kv_transfer_config
    offload_config.choose(given)
    assert given.kv_transfer_config is transfer and transfer.kv_connector_extra_config == extra
    offload_config.choose(SimpleNamespace(kv_transfer_config=None))


@pytest.mark.parametrize(
    ("extra", "tokens"), [({}, 16), ({"blocks_per_chunk": 4}, 64), ({"block_size": 48}, 48)]
)
def test_a_chunk_is_as_long_as_vllm_makes_it(extra: dict[str, Any], tokens: int) -> None:
    assert offload_config.tokens_per_chunk(extra, 16) == tokens
