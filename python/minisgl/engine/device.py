"""Devices: which one, its stream and events, and how many CPU threads this process may use.

Streams, events and pinned memory exist only on CUDA; a CPU has their null twins, so that the engine
reads the same on both. Imports torch and `utils` only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from minisgl.params import ConfigError

CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CGROUP_V1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CGROUP_V1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def resolve_device(name: str, rank: int = 0) -> torch.device:
    """The device meant by "auto", "cpu", "cuda" or "cuda:N"; `ConfigError` if it is not there."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError(f"device (--device) is {name}, but torch {torch.__version__} sees no GPU")
    number = name.partition(":")[2] or str(rank)
    if not number.isdecimal():
        raise ConfigError(f"device (--device) must name a GPU by its number, got {name!r}")
    index = int(number)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device (--device) is GPU {index}, but there are {torch.cuda.device_count()}"
        )
    return torch.device("cuda", index)


def count_threads() -> int:
    """CPU threads that this process may keep busy: its affinity, cut by its cgroup's quota."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def _cgroup_cpus() -> float | None:
    """CPUs' worth of time that the cgroup grants, None if it sets no limit."""
    try:
        if CGROUP_V2_QUOTA.exists():
            quota, period = CGROUP_V2_QUOTA.read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        if CGROUP_V1_QUOTA.exists():
            quota_us = int(CGROUP_V1_QUOTA.read_text())
            return quota_us / int(CGROUP_V1_PERIOD.read_text()) if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return None


class NullEvent:
    """An event of a device whose work is done when the call returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class DeviceStream:
    """The stream on which an engine launches its work; on a CPU the program order."""

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch_order(self) -> AbstractContextManager[None]:
        """Inside, work goes to this stream, behind all that the caller's stream was given."""
        return nullcontext() if self.cuda_stream is None else self._behind(self.cuda_stream)

    @contextmanager
    def _behind(self, stream: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def record_event(self) -> NullEvent | torch.cuda.Event:
        """An event that is ready when everything launched so far is done."""
        if self.cuda_stream is None:
            return NullEvent()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.cuda_stream.device))
        return event


def free_memory(device: torch.device) -> int:
    """Bytes that are free: of the GPU, or of main memory as the kernel estimates it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
