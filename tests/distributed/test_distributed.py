"""Ranks: who they are, what they exchange, and a model split over two and over four of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minisgl.config import DistributedInfo
from minisgl.distributed import (
    DistributedCommunicator,
    get_tp_info,
    init_distributed,
    reset_tp_info,
    set_tp_info,
    try_get_tp_info,
)
from minisgl.params import ConfigError

from tests.llm.tiny import write_model
from tests.models.by_hand import ByHand

IDS = [5, 9, 200, 31, 7, 7, 64]
RANK_PROGRAM = """
import sys, torch
from pathlib import Path
from minisgl.config import DistributedInfo
from minisgl.distributed import *
from tests.models.by_hand import ByHand
rank, size, port, folder, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
torch.set_num_threads(1)
set_tp_info(rank, size)
init_distributed(DistributedInfo(rank, size), "cpu", port, timeout=60)
comm = DistributedCommunicator()
assert comm.all_reduce(torch.ones(2) * (rank + 1)).tolist() == [size * (size + 1) / 2] * 2
assert comm.all_gather(torch.tensor([[rank]])).tolist() == [[r] for r in range(size)]
from safetensors.torch import save_file
save_file({"logits": ByHand(Path(folder)).logits(IDS)}, out + f"/{rank}")
destroy_distributed()
"""


@pytest.fixture(autouse=True)
def no_rank_is_left_behind() -> Iterator[None]:
    reset_tp_info()
    yield
    reset_tp_info()


def test_the_rank_is_set_once() -> None:
    assert try_get_tp_info() is None
    with pytest.raises(RuntimeError, match="set_tp_info"):
        get_tp_info()
    set_tp_info(0, 2)
    set_tp_info(0, 2)
    with pytest.raises(RuntimeError, match="already set"):
        set_tp_info(1, 2)
    assert get_tp_info() == DistributedInfo(0, 2)
    assert not DistributedInfo(1, 2).is_primary


def test_alone_nothing_is_started_and_exchanges_are_no_ops() -> None:
    init_distributed(DistributedInfo(0, 1), "cpu", 0)
    assert not torch.distributed.is_initialized()
    x = torch.ones(3)
    comm = DistributedCommunicator()
    assert comm.all_reduce(x) is x and comm.all_gather(x) is x


def test_several_ranks_need_a_port() -> None:
    with pytest.raises(ConfigError, match="distributed_port"):
        init_distributed(DistributedInfo(0, 2), "cpu", 0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"vocab_size": 259, "tie_word_embeddings": True}),
        (4, {"attention_bias": False}),
    ],
    ids=["two ranks, odd tied vocabulary", "four ranks, two kv heads"],
)
def test_a_split_model_gives_the_logits_of_the_whole(
    tmp_path: Path, repo_root: Path, size: int, changes: dict[str, object]
) -> None:
    folder = write_model(tmp_path / "model", **changes)
    expected = ByHand(folder).logits(IDS)
    program = RANK_PROGRAM.replace("(IDS)", f"({IDS})")
    environ = {**os.environ, "PYTHONPATH": f"{repo_root / 'python'}:{repo_root}"}
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), port, str(folder), str(tmp_path)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, errors
    results = [load_file(tmp_path / str(rank))["logits"] for rank in range(size)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] - expected).abs().max().item() < 1e-4
