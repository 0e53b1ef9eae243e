"""Configurations: names and defaults of the contract, one clear error for what cannot work."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import (
    MAX_PAGE_SIZE,
    MAX_RUNNING_REQ,
    MAX_TOKENIZER_PROCESSES,
    DistributedInfo,
    EngineConfig,
    SchedulerConfig,
    ServerArgs,
)
from minisgl.params import ConfigError


def test_the_defaults_are_those_of_the_contract() -> None:
    config = ServerArgs("a-model", admission="conservative", mixed_chunk=0)
    expected = {
        "model_path": "a-model",
        "device": "auto",
        "max_running_req": 256,
        "attention_backend": "auto",
        "moe_backend": "auto",
        "cuda_graph_bs": None,
        "cuda_graph_max_bs": None,
        "page_size": 1,
        "memory_ratio": 0.9,
        "cpu_kv_cache_bytes": 2 << 30,
        "use_dummy_weight": False,
        "max_seq_len_override": None,
        "num_page_override": None,
        "max_extend_tokens": 8192,
        "cache_type": "radix",
        "share_prefixes": 0,
        "admission": "conservative",
        "admission_share": None,
        "max_prefill_streak": 0,
        "mixed_chunk": 0,
        "queue_order": "fcfs",
        "max_queued": 0,
        "offline_mode": False,
        "server_host": "127.0.0.1",
        "server_port": 1919,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert SchedulerConfig("a-model").admission == "conservative"
    assert SchedulerConfig("a-model").mixed_chunk == 0
    assert config.tp_info == DistributedInfo(0, 1)


def test_each_config_extends_the_one_before_it() -> None:
    assert ServerArgs.__mro__[1:3] == (SchedulerConfig, EngineConfig)


def test_a_server_admits_and_batches_for_clients_that_send_no_max_tokens() -> None:
    assert (ServerArgs("m").admission, ServerArgs("m").mixed_chunk) == ("optimistic", 256)


@pytest.mark.parametrize("config", [EngineConfig("m"), SchedulerConfig("m"), ServerArgs("m")])
def test_a_config_is_frozen(config: EngineConfig) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 2  # type: ignore[misc]
    assert dataclasses.replace(config, page_size=2).page_size == 2


REFUSED: list[tuple[str, str, list[Any]]] = [
    ("model_path", "--model", ["", None, 5]),
    ("device", "--device", ["gpu", "", None, 3]),
    ("max_running_req", "--max-running-requests", [0, -1, MAX_RUNNING_REQ + 1, "8", None, 1.5]),
    ("page_size", "--page-size", [0, -4, MAX_PAGE_SIZE + 1, "16", 2.0, True, 10**5000]),
    ("memory_ratio", "--memory-ratio", [0.0, -1, 1.01, math.nan, "all", True]),
    ("cpu_kv_cache_bytes", "--kv-memory", [0, -1, 1.5, 2**63]),
    ("num_page_override", "--num-pages", [0, -1, 2**31, "9"]),
    ("max_seq_len_override", "--max-seq-len-override", [0, 1, -5, 2**31]),
    ("num_threads", "--threads", [-1, 10**6, None]),
    ("attention_backend", "--attention-backend", ["", None]),
    ("moe_backend", "--moe-backend", [0]),
    ("cuda_graph_max_bs", "--cuda-graph-max-bs", [-1, 10**9]),
    ("cuda_graph_bs", "--cuda-graph-max-bs", [[0], [1, "2"]]),
    ("distributed_timeout", "--timeout", [0, -1.0, math.inf, "60"]),
    ("distributed_port", "--distributed-port", [-1, 65536]),
    ("random_seed", "--random-seed", [-1, 2**63, 0.5]),
    ("max_extend_tokens", "--max-prefill-length", [0, -1, 2**31, None]),
    ("cache_type", "--cache-type", ["lru", "", None]),
    ("share_prefixes", "--share-prefixes", [-1, 2**31, True, None, "32"]),
    ("admission", "--admission", ["bold", "", None, 1]),
    ("admission_share", "--admission-share", [0.0, -1, 1.01, math.nan, "half", True, 0.5]),
    ("max_prefill_streak", "--max-prefill-streak", [-1, 2**31, None]),
    ("mixed_chunk", "--mixed-chunk", [-1, 2**31, True, "64"]),
    ("queue_order", "--queue-order", ["lifo", "", None, 1]),
    ("max_overtaken", "--max-overtaken", [-1, 0.5, None]),
    ("max_queued", "--max-queued-requests", [-1, 2**31, None]),
    ("server_port", "--port", [-1, 65536, "http"]),
    ("num_tokenizer", "--num-tokenizer", [0, MAX_TOKENIZER_PROCESSES + 1]),
]


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        pytest.param(n, flag, v, id=f"{n}-{i}")
        for n, flag, values in REFUSED
        for i, v in enumerate(values)
    ],
)
def test_what_cannot_work_is_refused_and_the_flag_named(name: str, flag: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs(**{"model_path": "m", "admission": "peak", name: value})
    message = str(caught.value)
    assert name in message and flag in message and len(message) < 250


@pytest.mark.parametrize(
    "accepted",
    [
        {"model_path": Path("a/folder")},
        {"page_size": MAX_PAGE_SIZE, "max_running_req": MAX_RUNNING_REQ},
        {"device": "cuda:1", "memory_ratio": 1, "num_threads": 0},
        {"num_page_override": 2**31 - 2, "share_prefixes": 2**31 - 1},
        {"cuda_graph_bs": [1, 2, 4], "cuda_graph_max_bs": 0},
        {"server_port": 0, "num_tokenizer": MAX_TOKENIZER_PROCESSES, "cache_type": "naive"},
        {"admission": "optimistic"},
        {"admission": "optimistic", "admission_share": 1},
        {"admission": "optimistic", "admission_share": 1e-9},
        {"admission": "peak", "mixed_chunk": 2**31 - 1, "queue_order": "longest-prefix"},
        {"max_prefill_streak": 2**31 - 1, "max_overtaken": 0, "max_queued": 2**31 - 1},
    ],
)
def test_every_bound_itself_is_accepted(accepted: dict[str, Any]) -> None:
    ServerArgs(**{"model_path": "m", **accepted})


def test_the_token_locations_of_a_pool_fit_in_int32() -> None:
    EngineConfig("m", page_size=4096, num_page_override=(2**31 - 1) // 4096 - 1)
    with pytest.raises(ConfigError):
        EngineConfig("m", page_size=4096, num_page_override=(2**31 - 1) // 4096)


@pytest.mark.parametrize(("rank", "size"), [(-1, 1), (1, 1), (2, 2), (0, 0), (0, -1), ("0", 1)])
def test_a_rank_outside_its_group_is_refused(rank: Any, size: int) -> None:
    with pytest.raises(ConfigError):
        DistributedInfo(rank, size)


def test_only_the_first_rank_talks_to_the_outside() -> None:
    assert [DistributedInfo(rank, 2).is_primary for rank in (0, 1)] == [True, False]


def test_a_prefix_file_that_could_not_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    assert SchedulerConfig("m", kv_prefix_file=str(tmp_path / "kv")).kv_prefix_file
    for path in (tmp_path, tmp_path / "nowhere" / "kv"):
        with pytest.raises(ConfigError, match="--kv-prefix-file"):
            SchedulerConfig("m", kv_prefix_file=str(path))
