"""What an engine, a scheduler and a server are told at start. Free of torch.

Each dataclass extends the one before it, and each is frozen: what changes at run time lives
elsewhere. `dtype` is a name ("float32") or a torch dtype object; the engine resolves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minisgl.params import ConfigError

GIB = 1 << 30
AUTO = "auto"


@dataclass(frozen=True)
class DistributedInfo:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} is not in 0 to {self.size - 1}")

    @property
    def is_primary(self) -> bool:
        """Whether this rank talks to the outside."""
        return self.rank == 0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class EngineConfig:
    """The model, the device and the memory of one engine.

    `cpu_kv_cache_bytes` bounds the KV pool on a CPU, `memory_ratio` the share of a GPU's memory that
    weights and KV may take; `num_page_override` sets the number of pages directly. `num_threads` 0
    follows the process's CPU affinity and its cgroup.
    """

    model_path: str
    tp_info: DistributedInfo = DistributedInfo()
    dtype: Any = AUTO
    device: str = AUTO
    max_running_req: int = 256
    attention_backend: str = AUTO
    moe_backend: str = AUTO
    cuda_graph_bs: list[int] | None = None
    cuda_graph_max_bs: int | None = None
    page_size: int = 1
    memory_ratio: float = 0.9
    cpu_kv_cache_bytes: int = 2 * GIB
    distributed_timeout: float = 60.0
    distributed_port: int = 0
    use_dummy_weight: bool = False
    max_seq_len_override: int | None = None
    num_page_override: int | None = None
    num_threads: int = 0
    random_seed: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.model_path), "model_path (--model) is empty: give a folder or a GGUF file")
        _require(
            self.device in (AUTO, "cpu", "cuda") or self.device.startswith("cuda:"),
            f"device (--device) must be auto, cpu or cuda, got {self.device!r}",
        )
        _require(
            1 <= self.max_running_req <= 65536,
            f"max_running_req (--max-running-requests) must be 1 to 65536, got {self.max_running_req}",
        )
        _require(
            1 <= self.page_size <= 4096,
            f"page_size (--page-size) must be 1 to 4096, got {self.page_size}",
        )
        _require(
            0.0 < self.memory_ratio <= 1.0,
            f"memory_ratio (--memory-ratio) must be above 0 and at most 1, got {self.memory_ratio}",
        )
        _require(
            self.cpu_kv_cache_bytes > 0,
            f"cpu_kv_cache_bytes must be positive, got {self.cpu_kv_cache_bytes}",
        )
        _require(
            self.max_seq_len_override is None or self.max_seq_len_override >= 2,
            f"max_seq_len_override (--max-seq-len-override) must be at least 2, "
            f"got {self.max_seq_len_override}",
        )
        _require(
            self.num_page_override is None or self.num_page_override >= 1,
            f"num_page_override (--num-pages) must be at least 1, got {self.num_page_override}",
        )
        _require(
            self.num_threads >= 0, f"num_threads (--threads) must be 0 or more: {self.num_threads}"
        )


@dataclass(frozen=True)
class SchedulerConfig(EngineConfig):
    """How requests are batched. `max_extend_tokens` is the prompt-token budget of one step."""

    max_extend_tokens: int = 8192
    cache_type: str = "radix"
    offline_mode: bool = False
    zmq_backend_addr: str = ""
    zmq_detokenizer_addr: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.max_extend_tokens >= 1,
            f"max_extend_tokens (--max-prefill-length) must be at least 1, "
            f"got {self.max_extend_tokens}",
        )
        _require(
            self.cache_type in ("radix", "naive"),
            f"cache_type (--cache-type) must be radix or naive, got {self.cache_type!r}",
        )


@dataclass(frozen=True)
class ServerArgs(SchedulerConfig):
    """Where the server listens and how many tokenizer processes it starts."""

    server_host: str = "127.0.0.1"
    server_port: int = 1919
    num_tokenizer: int = 1
    silent_output: bool = False
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            0 <= self.server_port <= 65535,
            f"server_port (--port) must be 0 to 65535, got {self.server_port}",
        )
        _require(
            1 <= self.num_tokenizer <= 64,
            f"num_tokenizer (--num-tokenizer) must be 1 to 64, got {self.num_tokenizer}",
        )
