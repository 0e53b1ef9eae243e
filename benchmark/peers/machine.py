"""The machine that a run was made on, and how much of it was somebody else's meanwhile."""

from __future__ import annotations

import os
import platform
from typing import Any

INTERESTING_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


def num_threads() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    """CPU model, the flags that matter to kernels, threads, memory, system."""
    model, flags = platform.processor() or platform.machine(), ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
    has = set(flags.split())
    return {
        "cpu": model,
        "flags": [flag for flag in INTERESTING_FLAGS if flag in has],
        "threads": num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_times() -> tuple[int, int]:
    """Ticks of all CPUs since the machine started: (stolen by the hypervisor, in all)."""
    with open("/proc/stat") as file:
        ticks = [int(part) for part in file.readline().split()[1:9]]
    return ticks[7], sum(ticks)


def steal_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The share of CPU time that the hypervisor gave to others, 0 to 1."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


def load() -> float:
    """Runnable processes, averaged over a minute."""
    return round(os.getloadavg()[0], 2)
