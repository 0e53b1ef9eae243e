"""Devices and threads: what "auto" means, and how many threads affinity and cgroup leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from minisgl.engine import count_threads, device, human, resolve_device
from minisgl.engine.device import DeviceStream, NullEvent, free_memory
from minisgl.params import ConfigError

from tests.engine.conftest import MakeEngine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up cgroup without limits, for a process that may use 8 CPUs."""
    monkeypatch.setattr(device, "CGROUP_V2_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(device, "CGROUP_V1_QUOTA", tmp_path / "cpu.cfs_quota_us")
    monkeypatch.setattr(device, "CGROUP_V1_PERIOD", tmp_path / "cpu.cfs_period_us")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_without_a_limit_threads_follow_the_affinity(cgroup: Path) -> None:
    assert count_threads() == 8


@pytest.mark.parametrize(
    ("content", "threads"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),
        ("50000 100000\n", 1),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("nonsense", 8),
        ("100000 0\n", 8),
        ("", 8),
    ],
)
def test_the_quota_of_a_cgroup_cuts_the_threads(cgroup: Path, content: str, threads: int) -> None:
    (cgroup / "cpu.max").write_text(content)
    assert count_threads() == threads


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("300000", 3), ("50000", 1), ("x", 8)])
def test_the_quota_of_an_old_cgroup_cuts_them_too(cgroup: Path, quota: str, threads: int) -> None:
    (cgroup / "cpu.cfs_quota_us").write_text(quota + "\n")
    (cgroup / "cpu.cfs_period_us").write_text("100000\n")
    assert count_threads() == threads


def test_the_real_machine_gives_at_least_one_thread() -> None:
    assert 1 <= count_threads() <= (os.cpu_count() or 1)


def test_threads_can_be_set(make_engine: MakeEngine) -> None:
    before = torch.get_num_threads()
    try:
        assert make_engine(num_threads=1).num_threads == 1
        assert torch.get_num_threads() == 1
        assert make_engine(num_threads=0).num_threads == count_threads()
    finally:
        torch.set_num_threads(before)


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    assert resolve_device("cuda", rank=1) == torch.device("cuda", 1)
    assert resolve_device("cuda:1", rank=0) == torch.device("cuda", 1)
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="GPU 5"):
        resolve_device("cuda:5")


@pytest.mark.parametrize("name", ["cuda:x", "cuda:-1", "cuda:1.5"])
def test_a_gpu_number_that_is_none_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--device"):
        resolve_device(name)


def test_a_cpu_has_the_null_twins_of_stream_and_event() -> None:
    stream = DeviceStream(torch.device("cpu"))
    with stream.launch_order():
        event = stream.record_event()
    assert isinstance(event, NullEvent)
    event.synchronize()
    assert free_memory(torch.device("cpu")) > 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(5, "5 B"), (1500, "1.5 kB"), (98_300_000, "98.3 MB"), (2 * 10**9, "2.00 GB")],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert human(num_bytes) == text
