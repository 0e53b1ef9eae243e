"""The engine: owns device, model, KV pool, page table, graphs and sampler. Batch in, tokens out.

The page table has one row more than there may be running requests, and the pool one page more than
there are to hand out: the last of each belongs to the dummy request that pads batches.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from minisgl.attention import create_attention_backend
from minisgl.config import AUTO, EngineConfig
from minisgl.core import Batch, Context, Req, SamplingParams, reset_global_ctx, set_global_ctx
from minisgl.distributed import destroy_distributed, init_distributed, set_tp_info
from minisgl.env import ENV
from minisgl.kernel import native
from minisgl.kvcache import BaseKVCachePool, create_kvcache_pool
from minisgl.layers import set_rope_device
from minisgl.models import (
    Pack,
    create_model,
    init_dummy_weights,
    load_model_config,
    load_model_weights,
    pack_floats,
    pack_stored,
)
from minisgl.moe import create_moe_backend
from minisgl.params import ConfigError, Constraint, InvalidRequestError
from minisgl.utils import (
    AUTO_KV_DTYPE,
    KV_DTYPES,
    align_ceil,
    init_logger,
    resolve_dtype,
    torch_dtype,
    zeros_as_used,
)
from minisgl.utils.model_files import resolve_model

from . import logprobs
from .device import DeviceStream, NullEvent, count_threads, free_memory, resolve_device
from .fingerprint import fingerprint_kv
from .graph import GraphRunner, determine_cuda_graph_bs
from .logits import GrammarsProtocol, MatcherProtocol
from .logprobs import StepLogprobs
from .memory import MemoryReport, choose_num_pages, human
from .sample import BatchSamplingArgs, Sampler, Tokens

logger = init_logger(__name__)

DUMMY_UID = -1
Progress = Callable[[int, int], None]


class ForwardOutput(NamedTuple):
    """The tokens of one step, int32 `(requests,)`, as tensors or, chosen on a CPU, as an array; the
    host's copy is valid after the event. logprobs: None if no request of the batch asked."""

    next_tokens_gpu: Tokens
    next_tokens_cpu: Tokens
    copy_done_event: NullEvent | torch.cuda.Event
    logprobs: StepLogprobs | None = None


class Engine:
    """Runs one model on one device.

    Raises `ConfigError`, `ModelLoadError` or `UnsupportedModelError` before any work is accepted.
    progress: called with (bytes done, bytes in all) while weights load.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self.config = config
        self.tp_info = config.tp_info
        self.device = resolve_device(config.device, config.tp_info.rank)
        self._stream = DeviceStream(self.device)
        self._set_threads()
        set_tp_info(config.tp_info.rank, config.tp_info.size)
        init_distributed(
            config.tp_info, self.device, config.distributed_port, config.distributed_timeout
        )
        set_rope_device(self.device)
        free_before = free_memory(self.device)
        self.model_path = resolve_model(config.model_path, config.revision).path
        self.model_config = load_model_config(self.model_path)
        self._check_ranks()
        self.vocab_size = self.model_config.vocab_size
        self.dtype, self.kv_dtype = self._choose_dtypes()
        self._load_model(progress)
        self._create_memory(free_before)
        self.sampler = Sampler(self.device, self.vocab_size, self._shared_seed())
        self._create_graphs()
        self._fingerprint: bytes | None = None
        logger.info("%s", self.memory_report)

    def _set_threads(self) -> None:
        num_threads = self.config.num_threads or ENV.NUM_THREADS.value or count_threads()
        if self.device.type == "cpu" and torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if self.device.type == "cpu" and native.available():
            native.set_num_threads(num_threads)
        self.num_threads = num_threads

    def _check_ranks(self) -> None:
        """Every rank has the same number of heads; K and V heads may be in several."""
        size, model = self.tp_info.size, self.model_config
        heads, kv_heads = model.num_qo_heads, model.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(
                f"size (--tp-size) {size} does not fit the model's {heads} attention heads and "
                f"{kv_heads} heads of K and V: choose a number that divides both"
            )
        num_sparse = len(model.sparse_layers)
        dense = model.intermediate_size if num_sparse < model.num_layers else 0
        for inner in (dense, model.moe_intermediate_size if num_sparse else 0):
            if inner % size:
                raise ConfigError(
                    f"size (--tp-size) {size} does not divide the {inner} rows of the model's MLPs"
                )

    def _choose_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """How float weights, and K and V, are stored: as asked, else the checkpoint's type.

        On a CPU "auto" takes the checkpoint's type and `AUTO_KV_DTYPE` where the native kernels
        run, else float32; float16 for an attention backend of somebody else's. K and V follow a
        `dtype` that is given by name.
        """
        asked, checkpoint = self.config.dtype, self.model_config.dtype
        is_given = asked not in (None, AUTO)
        if self.device.type != "cpu":
            dtype = kv_dtype = resolve_dtype(asked, resolve_dtype(checkpoint, torch.bfloat16))
        elif is_given or not native.available():
            dtype = kv_dtype = resolve_dtype(asked)
        else:
            is_ours = self.config.attention_backend in (AUTO, "native", "torch")
            dtype = resolve_dtype(checkpoint, torch.float32)
            kv_dtype = AUTO_KV_DTYPE if is_ours else torch.float16
        asked, field = self.config.kv_dtype, "kv_dtype (--kv-dtype)"
        return dtype, resolve_dtype(asked, kv_dtype, field, KV_DTYPES)

    def _choose_pack(self) -> Pack | None:
        """What packs a matrix while it loads; a float32 model asked for by name stays floats."""
        quant = self.config.quant
        if quant == AUTO:
            is_float32 = self.config.dtype not in (None, AUTO) and self.dtype is torch.float32
            quant = "none" if is_float32 else "stored"
        lacking = None
        if self.device.type != "cpu":
            lacking = "runs on a CPU only"
        elif self.tp_info.size > 1:
            lacking = f"runs on one rank only, not on {self.tp_info.size} (--tp-size)"
        elif not native.available():
            lacking = "needs the native kernels, not built here"
        if lacking is not None and quant in ("q4", "q8"):
            raise ConfigError(f"quant (--quant) {quant} {lacking}")
        if lacking is not None or quant == "none":
            return None
        return pack_stored if quant == "stored" else pack_floats(int(quant[1]))

    def _load_model(self, progress: Progress | None) -> None:
        with torch.device("meta"), torch_dtype(self.dtype):
            self.model = create_model(self.model_config)
        if self.config.use_dummy_weight:
            init_dummy_weights(self.model, device=self.device, dtype=self.dtype)
        else:
            load_model_weights(
                self.model,
                self.model_path,
                device=self.device,
                dtype=self.dtype,
                progress=progress,
                pack=self._choose_pack(),
            )

    def _create_memory(self, free_before: int) -> None:
        config, model = self.config, self.model_config
        page_size = config.page_size

        def create_pool(num_pages: int, device: torch.device) -> BaseKVCachePool:
            return create_kvcache_pool(
                num_kv_heads=model.num_kv_heads,
                num_layers=model.num_layers,
                head_dim=model.head_dim,
                num_pages=num_pages,
                page_size=page_size,
                dtype=self.kv_dtype,
                device=device,
            )

        page_bytes = create_pool(1, torch.device("meta")).page_bytes
        free_now = free_memory(self.device)
        self.num_pages = choose_num_pages(config, self.device, page_bytes, free_before, free_now)
        try:
            self.kv_cache = create_pool(self.num_pages + 1, self.device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no memory for a KV pool of {human(page_bytes * (self.num_pages + 1))}: lower "
                "cpu_kv_cache_bytes (--kv-memory) or num_page_override (--num-pages)"
            ) from error
        configured = config.max_seq_len_override or model.rotary_config.max_position
        if configured > model.rotary_config.max_position:
            logger.warning(
                "max_seq_len_override (--max-seq-len-override) %d is beyond the %d positions that "
                "the model was trained for: expect noise there",
                configured,
                model.rotary_config.max_position,
            )
        self.max_seq_len = min(configured, self.num_pages * page_size)
        self.page_table = zeros_as_used(
            (config.max_running_req + 1, align_ceil(self.max_seq_len, page_size)),
            torch.int32,
            self.device,
        )
        self.ctx = Context(page_size)
        self.ctx.kv_cache = self.kv_cache
        self.ctx.page_table = self.page_table
        self.ctx.attn_backend = create_attention_backend(
            config.attention_backend, self.ctx, self.device
        )
        self.attn_backend = self.ctx.attn_backend
        if model.is_moe:
            self.ctx.moe_backend = create_moe_backend(config.moe_backend, self.device)
        set_global_ctx(self.ctx)
        self.memory_report = MemoryReport(
            weight_bytes=self._weight_bytes(),
            kv_bytes=page_bytes * (self.num_pages + 1),
            table_bytes=2 * self.page_table.nbytes,
            num_pages=self.num_pages,
            page_size=page_size,
            max_seq_len=self.max_seq_len,
            free_bytes=free_now,
        )

    def _weight_bytes(self) -> int:
        """Bytes of all weights; a tensor that two layers share counts once."""
        return sum({id(w): w.nbytes for w in self.model.state_dict().values()}.values())

    def _create_graphs(self) -> None:
        config = self.config
        self.dummy_req = Req(
            input_ids=torch.zeros(1, dtype=torch.int32),
            table_idx=config.max_running_req,
            cached_len=0,
            output_len=1,
            uid=DUMMY_UID,
            sampling_params=SamplingParams(),
        )
        self.page_table[self.dummy_req.table_idx].fill_(self.num_pages * config.page_size)
        sizes = determine_cuda_graph_bs(
            config.cuda_graph_bs,
            config.cuda_graph_max_bs,
            free_memory(self.device),
            self.device,
        )
        self.graph_runner = GraphRunner(
            self.model, self.ctx, self.device, sizes, self.dummy_req, self.vocab_size
        )

    def _shared_seed(self) -> int:
        """A seed for unseeded draws that all ranks share."""
        seed = self.config.random_seed
        seed = secrets.randbits(63) if seed is None else seed
        if self.tp_info.size > 1:
            shared = torch.tensor([seed], dtype=torch.int64, device=self.device)
            torch.distributed.broadcast(shared, src=0)
            seed = int(shared.item())
        return seed

    def set_grammars(self, grammars: GrammarsProtocol) -> None:
        """Say who compiles constraints; until then no request can have one."""
        self.sampler.processors.grammars = grammars

    def check_constraint(self, constraint: Constraint) -> None:
        """Wait until it is compiled; `InvalidRequestError` if it cannot be used."""
        grammars = self.sampler.processors.grammars
        if grammars is None:
            raise InvalidRequestError("this engine has no grammars", constraint.kind)
        grammars.check(constraint)

    def matcher_of(self, req: Req) -> MatcherProtocol | None:
        """Where a request that was sampled stands in its grammar; None without a constraint."""
        return self.sampler.processors.matcher_of(req)

    def pad_batch(self, batch: Batch) -> None:
        """Set `batch.padded_reqs`."""
        self.graph_runner.pad_batch(batch)

    def prepare(self, batch: Batch) -> BatchSamplingArgs:
        """Take the attention metadata from the page table; returns the sampling arguments."""
        self.attn_backend.prepare_metadata(batch)
        args = self.sampler.prepare(batch)
        args.logprobs = logprobs.plan(batch.reqs, self.device)
        if args.logprobs is not None and args.logprobs.wanted is not None:
            batch.attn_metadata.wanted_indices = args.logprobs.wanted
        return args

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits float32 `(requests, vocab)` at the last position of each request.

        With prompt logprobs in the batch, at all of its wanted positions.
        """
        if self.graph_runner.can_replay(batch):
            return self.graph_runner.replay(batch)
        logits = self.graph_runner.forward(batch)
        has_dummies = batch.padded_size != batch.size
        if has_dummies and batch.attn_metadata.wanted_indices is None:
            logits = logits[: batch.size]
        return logits

    def sample(self, batch: Batch, logits: torch.Tensor, args: BatchSamplingArgs) -> ForwardOutput:
        """Choose a token per request and start its copy to the host; -1 marks unusable logits."""
        plan, last = args.logprobs, logits
        if plan is not None and plan.last is not None:
            last = logits.index_select(0, plan.last)
        tokens = self.sampler.sample(last, args)
        on_host = tokens
        if isinstance(tokens, torch.Tensor) and not tokens.is_cpu:
            on_host = tokens.to("cpu", non_blocking=True)
        measured = None if plan is None else logprobs.measure(plan, logits, last, tokens)
        return ForwardOutput(tokens, on_host, self._stream.record_event(), measured)

    def launch_order(self) -> AbstractContextManager[None]:
        """Inside, work is launched behind everything that was launched before."""
        return self._stream.launch_order()

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page."""
        return self.kv_cache.page_bytes

    def read_pages(self, pages: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """A copy of KV pages, opaque: uint8 `(len(pages), page_bytes)` on the engine's device."""
        return self.kv_cache.read_pages(pages)

    def write_pages(self, pages: torch.Tensor | Sequence[int], data: torch.Tensor) -> None:
        """Write back what `read_pages` gave."""
        self.kv_cache.write_pages(pages, data)

    def fingerprint(self) -> bytes:
        """32 bytes that are the same only where the same tokens have the same KV bytes."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_kv(self)
        return self._fingerprint

    def shutdown(self) -> None:
        """Let go of the model, the pool and the process group."""
        self.graph_runner.destroy()
        self.__dict__.pop("model", None)
        reset_global_ctx(self.ctx)
        destroy_distributed()
