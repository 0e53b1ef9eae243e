"""How many KV pages there are, and where the memory goes: sized once, reported at start."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.config import EngineConfig
from minisgl.params import ConfigError

MIN_TOKENS = 2


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by purpose; `kv_bytes` is the pool's limit, committed as used on a CPU."""

    weight_bytes: int
    kv_bytes: int
    table_bytes: int
    num_pages: int
    page_size: int
    max_seq_len: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"memory: weights {human(self.weight_bytes)}, KV pool up to {human(self.kv_bytes)} "
            f"({self.num_pages} pages of {self.page_size} = "
            f"{self.num_pages * self.page_size} tokens), tables {human(self.table_bytes)}, "
            f"free {human(self.free_bytes)}; context {self.max_seq_len} tokens"
        )


def human(num_bytes: int) -> str:
    """A size for people: "98.3 MB"."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def choose_num_pages(
    config: EngineConfig, device: torch.device, page_bytes: int, free_before: int, free_now: int
) -> int:
    """Pages of the KV pool, without the dummy page.

    On CUDA the pool takes what `memory_ratio` of the memory that was free before the model leaves;
    on a CPU `cpu_kv_cache_bytes`. `ConfigError` if not even a tiny sequence would fit.
    """
    if config.num_page_override is not None:
        num_pages = config.num_page_override
    elif device.type == "cuda":
        used = free_before - free_now
        num_pages = (int(config.memory_ratio * free_before) - used) // page_bytes - 1
    else:
        num_pages = config.cpu_kv_cache_bytes // page_bytes - 1
    if num_pages * config.page_size < MIN_TOKENS:
        on_gpu = device.type == "cuda"
        limit = "memory_ratio (--memory-ratio)" if on_gpu else "cpu_kv_cache_bytes (--kv-memory)"
        raise ConfigError(
            f"the KV pool has room for {max(num_pages, 0)} pages of {human(page_bytes)}: raise "
            f"{limit} or num_page_override (--num-pages)"
        )
    return num_pages
