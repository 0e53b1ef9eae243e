"""What an engine, a scheduler and a server are told at start. Free of torch; may import `params`.

Each dataclass extends the one before it, and each is frozen: what changes at run time lives
elsewhere. `dtype` is a name ("float32") or a torch dtype object; the engine resolves it. Invariant:
a config that exists can be used; one that cannot raises `ConfigError` with the flag to change.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from typing import Any

from minisgl.params import MAX_SEED, ConfigError, shown

GIB = 1 << 30
AUTO = "auto"

QUEUE_ORDERS = ("fcfs", "skip", "priority", "longest-prefix")

MAX_TP_SIZE = 1024
MAX_RUNNING_REQ = 65536
MAX_PAGE_SIZE = 4096
MAX_TOKENS_OF_A_POOL = 2**31 - 1  # token locations are int32
MAX_GRAPH_BATCH_SIZE = 65536
MAX_THREADS = 256
MAX_TOKENIZER_PROCESSES = 64
MAX_CONCURRENT_REQUESTS = 65536


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_int(name: str, flag: str, value: Any, low: int, high: int, expected: str = "") -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(
        whole and low <= value <= high,
        f"{name} ({flag}) must be {expected or f'a whole number of {low} to {high}'}, "
        f"got {shown(value)}",
    )


def _check_float(name: str, flag: str, value: Any, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _require(
        number and 0.0 < value <= high,
        f"{name} ({flag}) must be above 0 and at most {high:g}, got {shown(value)}",
    )


def _check_word(name: str, flag: str, value: Any) -> None:
    _require(
        isinstance(value, str) and bool(value),
        f"{name} ({flag}) must be a name, got {shown(value)}",
    )


@dataclass(frozen=True)
class DistributedInfo:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        _check_int("size", "--tp-size", self.size, 1, MAX_TP_SIZE)
        _check_int("rank", "--tp-rank", self.rank, 0, self.size - 1)

    @property
    def is_primary(self) -> bool:
        """Whether this rank talks to the outside."""
        return self.rank == 0


@dataclass(frozen=True)
class EngineConfig:
    """The model, the device and the memory of one engine.

    `cpu_kv_cache_bytes` bounds the KV pool on a CPU, `memory_ratio` the share of a GPU's memory
    that weights and KV may take; `num_page_override` sets the number of pages directly.
    `num_threads` 0 follows the process's CPU affinity and its cgroup. `quant` "auto" keeps
    quantised files packed on a CPU unless `dtype` is float32 by name; "none" makes floats of them;
    "q4" and "q8" also pack float files. `revision` pins a hub model; `kv_dtype` is how K and V are
    stored, "int8" and "int16" on a CPU only; `sampling_defaults` "model" lets
    `generation_config.json` decide what a request does not say.
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
    quant: str = AUTO
    random_seed: int | None = None
    revision: str | None = None
    kv_dtype: Any = AUTO
    sampling_defaults: str = "model"

    def __post_init__(self) -> None:
        _require(
            bool(self.model_path) and isinstance(self.model_path, (str, os.PathLike)),
            "model_path (--model) must be a folder, a GGUF file or a model's name, "
            f"got {shown(self.model_path)}",
        )
        _require(
            self.device in (AUTO, "cpu", "cuda") or str(self.device).startswith("cuda:"),
            f"device (--device) must be auto, cpu or cuda, got {shown(self.device)}",
        )
        _check_word("attention_backend", "--attention-backend", self.attention_backend)
        _check_word("moe_backend", "--moe-backend", self.moe_backend)
        _require(
            self.quant in (AUTO, "none", "q4", "q8"),
            f"quant (--quant) must be auto, none, q4 or q8, got {shown(self.quant)}",
        )
        _require(
            self.sampling_defaults in ("model", "none"),
            "sampling_defaults (--sampling-defaults) must be model or none, "
            f"got {shown(self.sampling_defaults)}",
        )
        if self.revision is not None:
            _check_word("revision", "--revision", self.revision)
        _require(
            isinstance(self.use_dummy_weight, bool),
            f"use_dummy_weight must be True or False, got {shown(self.use_dummy_weight)}",
        )
        _require(
            isinstance(self.tp_info, DistributedInfo),
            f"tp_info must be a DistributedInfo, got {shown(self.tp_info)}",
        )
        _check_int("page_size", "--page-size", self.page_size, 1, MAX_PAGE_SIZE)
        _check_int(
            "max_running_req", "--max-running-requests", self.max_running_req, 1, MAX_RUNNING_REQ
        )
        _check_int("num_threads", "--threads", self.num_threads, 0, MAX_THREADS)
        self._check_memory()
        self._check_graphs()

    def _check_memory(self) -> None:
        _check_float("memory_ratio", "--memory-ratio", self.memory_ratio, 1.0)
        size = "a size of 1 byte to 8 EiB, such as 512M (in Python 512 << 20)"
        _check_int("cpu_kv_cache_bytes", "--kv-memory", self.cpu_kv_cache_bytes, 1, 2**63 - 1, size)
        if self.num_page_override is not None:
            most = MAX_TOKENS_OF_A_POOL // self.page_size - 1  # one more is the dummy page
            _check_int("num_page_override", "--num-pages", self.num_page_override, 1, most)
        if self.max_seq_len_override is not None:
            _check_int(
                "max_seq_len_override",
                "--max-seq-len-override",
                self.max_seq_len_override,
                2,
                MAX_TOKENS_OF_A_POOL,
            )

    def _check_graphs(self) -> None:
        flag = "--cuda-graph-max-bs"
        if self.cuda_graph_max_bs is not None:
            _check_int("cuda_graph_max_bs", flag, self.cuda_graph_max_bs, 0, MAX_GRAPH_BATCH_SIZE)
        sizes = self.cuda_graph_bs or []
        _require(
            isinstance(sizes, (list, tuple)),
            f"cuda_graph_bs must be a list of batch sizes, got {shown(sizes)}",
        )
        for size in sizes:
            _check_int("cuda_graph_bs", flag, size, 1, MAX_GRAPH_BATCH_SIZE)
        _check_float("distributed_timeout", "--timeout", self.distributed_timeout, 86400.0)
        _check_int("distributed_port", "--distributed-port", self.distributed_port, 0, 65535)
        if self.random_seed is not None:
            _check_int("random_seed", "--random-seed", self.random_seed, 0, MAX_SEED)


@dataclass(frozen=True)
class SchedulerConfig(EngineConfig):
    """How requests are batched. `max_extend_tokens` is the prompt-token budget of one step.

    `share_prefixes`: a request waits a step for what it shares with a prompt that is being computed
    if that is at least so many tokens; 0 never waits, and equal new prompts are each computed.
    `admission`: a request starts when all worst cases fit at once, or (peak) at every later step,
    or (optimistic) when what answers really use is likely to fit, and is put back if it does not.
    `admission_share`: how much of what it may still generate a request is then expected to; None
    learns it from the latest answers.
    `kv_spill_bytes`: how much of what the KV pool evicts is kept, in host memory or in a file in
    `kv_spill_dir`; 0 keeps nothing. `kv_prefix_file`: cached prefixes are loaded from it at the
    start, if it is there, and saved to it at the end.

    What protects those that run, each off at 0: `max_prefill_streak`, the most steps in a row that
    compute prompts while others wait for their next token; `mixed_chunk`, so many prompt tokens
    at most ride in a step of theirs instead. `queue_order`: who starts next; nobody is overtaken
    more than `max_overtaken` times. `max_queued`: one more that would have to wait is refused.
    """

    max_extend_tokens: int = 8192
    cache_type: str = "radix"
    share_prefixes: int = 0
    admission: str = "conservative"
    admission_share: float | None = None
    kv_spill_bytes: int = 0
    kv_spill_dir: str | None = None
    kv_prefix_file: str | None = None
    max_prefill_streak: int = 0
    mixed_chunk: int = 0
    queue_order: str = "fcfs"
    max_overtaken: int = 32
    max_queued: int = 0
    offline_mode: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int(
            "max_extend_tokens",
            "--max-prefill-length",
            self.max_extend_tokens,
            1,
            MAX_TOKENS_OF_A_POOL,
        )
        _require(
            self.cache_type in ("radix", "naive"),
            f"cache_type (--cache-type) must be radix or naive, got {shown(self.cache_type)}",
        )
        _check_int(
            "share_prefixes", "--share-prefixes", self.share_prefixes, 0, MAX_TOKENS_OF_A_POOL
        )
        _require(
            self.admission in ("conservative", "peak", "optimistic"),
            "admission (--admission) must be conservative, peak or optimistic, "
            f"got {shown(self.admission)}",
        )
        if self.admission_share is not None:
            _check_float("admission_share", "--admission-share", self.admission_share, 1.0)
            _require(
                self.admission == "optimistic",
                "admission_share (--admission-share) says what admission (--admission) optimistic "
                f"expects; here it is {self.admission}",
            )
        self._check_second_tier()

    def _check_second_tier(self) -> None:
        size = "a size of 0 bytes to 8 EiB, such as 4G (in Python 4 << 30)"
        _check_int("kv_spill_bytes", "--kv-spill", self.kv_spill_bytes, 0, 2**63 - 1, size)
        for name, flag in (
            ("kv_spill_dir", "--kv-spill-dir"),
            ("kv_prefix_file", "--kv-prefix-file"),
        ):
            path = getattr(self, name)
            _require(
                path is None or (isinstance(path, (str, os.PathLike)) and bool(os.fspath(path))),
                f"{name} ({flag}) must be a path, got {shown(path)}",
            )
        if self.kv_prefix_file is not None:
            folder = os.path.dirname(os.path.abspath(self.kv_prefix_file))
            _require(
                os.access(folder, os.W_OK | os.X_OK) and not os.path.isdir(self.kv_prefix_file),
                "kv_prefix_file (--kv-prefix-file) must be a file in a folder that is there and "
                f"can be written, got {shown(self.kv_prefix_file)}",
            )
        _require(
            self.kv_spill_dir is None or self.kv_spill_bytes > 0,
            "kv_spill_dir (--kv-spill-dir) needs kv_spill_bytes (--kv-spill), the file's size",
        )
        _require(
            self.cache_type != "naive" or not (self.kv_spill_bytes or self.kv_prefix_file),
            "kv_spill_bytes (--kv-spill) and kv_prefix_file (--kv-prefix-file) keep cached "
            "prefixes: they need cache_type (--cache-type) radix",
        )
        _require(
            self.kv_prefix_file is None or self.tp_info.size == 1,
            "kv_prefix_file (--kv-prefix-file) is for engines of one rank",
        )
        self._check_fairness()

    def _check_fairness(self) -> None:
        for name, flag in (
            ("max_prefill_streak", "--max-prefill-streak"),
            ("mixed_chunk", "--mixed-chunk"),
            ("max_overtaken", "--max-overtaken"),
            ("max_queued", "--max-queued-requests"),
        ):
            _check_int(name, flag, getattr(self, name), 0, MAX_TOKENS_OF_A_POOL)
        _require(
            self.queue_order in QUEUE_ORDERS,
            f"queue_order (--queue-order) must be {', '.join(QUEUE_ORDERS[:-1])} or "
            f"{QUEUE_ORDERS[-1]}, got {shown(self.queue_order)}",
        )


@dataclass(frozen=True)
class ServerArgs(SchedulerConfig):
    """Where the server listens, whom it answers, and how many tokenizer processes it starts.

    api_key: what clients must send; without one, only loopback addresses may be bound, unless
    `insecure_bind`. allowed_hosts: names besides localhost and addresses that a Host header may
    have, "*" for any. cors_origins: web pages that may call, such as "https://example.org".
    max_concurrent_requests: more are answered 429 at once. drain_seconds: after a SIGTERM, how long
    what runs may still take. Clients that say no `max_tokens` would each reserve the whole context,
    hence optimistic admission; and nobody's answer shall pause for another's prompt.
    """

    admission: str = "optimistic"
    mixed_chunk: int = 256
    server_host: str = "127.0.0.1"
    server_port: int = 1919
    num_tokenizer: int = 1
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    insecure_bind: bool = False
    max_concurrent_requests: int = 1024
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_word("server_host", "--host", self.server_host)
        _check_int("server_port", "--port", self.server_port, 0, 65535)
        _check_int(
            "num_tokenizer", "--num-tokenizer", self.num_tokenizer, 1, MAX_TOKENIZER_PROCESSES
        )
        _check_int(
            "max_concurrent_requests",
            "--max-concurrent-requests",
            self.max_concurrent_requests,
            1,
            MAX_CONCURRENT_REQUESTS,
        )
        _check_float("drain_seconds", "--drain-seconds", self.drain_seconds, 86400.0)
        if self.served_model_name is not None:
            _check_word("served_model_name", "--served-model-name", self.served_model_name)
        if self.api_key is not None:
            key = self.api_key
            is_key = isinstance(key, str) and key.isascii() and key.isprintable() and " " not in key
            _require(is_key and bool(key), "api_key (--api-key) must be printable ASCII, no spaces")
        for origin in self.cors_origins:
            _require(
                origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None,
                "cors_origins (--cors-origin) must be as https://example.org, without a path, got "
                f"{shown(origin)}",
            )
        for host in self.allowed_hosts:
            _require(
                re.fullmatch(r"[^\s/:]+", host) is not None,
                "allowed_hosts (--allowed-host) must be a name, as example.org, without scheme and "
                f"port, got {shown(host)}",
            )
        _require(
            self.api_key is not None or self.insecure_bind or is_loopback(self.server_host),
            f"server_host (--host) {self.server_host} can be reached from other machines: give an "
            "--api-key, or --insecure-bind to serve anybody",
        )


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
