"""Forwards without Python in their way: CUDA graphs on a GPU, a recorded program on a CPU.

The program (`kernel/program.py`) takes any batch, so it needs no sizes. Where the device, the
attention backend or the model has none, the layers' own `forward` runs.

A decode batch is padded with the dummy request up to the next captured size and run through
`replay(batch)`. Sizes are automatic on CUDA and none on a CPU unless they are given.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.core import Batch, Context, Req
from minisgl.kernel.native_attention import PagedBatch
from minisgl.kernel.program import CannotRecord, Program, Recorder
from minisgl.utils import init_logger

logger = init_logger(__name__)

GIB = 1 << 30
LARGE_GPU_BYTES = 80 * GIB


def determine_cuda_graph_bs(
    bs: list[int] | None, max_bs: int | None, free_memory: int, device: torch.device | str
) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, then multiples of 8 up to the maximum.

    bs: exactly these, if given. max_bs: the maximum; by default none on a CPU, and on CUDA 160, or
    256 with more than 80 GiB of `free_memory` (bytes).
    """
    if bs is not None:
        return sorted(set(bs))
    if max_bs is None:
        if torch.device(device).type != "cuda":
            return []
        max_bs = 256 if free_memory > LARGE_GPU_BYTES else 160
    return [size for size in [1, 2, 4, *range(8, max_bs + 1, 8)] if size <= max_bs]


@dataclass
class GraphCaptureBuffer:
    """Where a captured forward reads its tokens and writes its logits; sized for the largest batch.

    input_ids, positions, out_loc: int32 `(max_bs,)`; logits: float32 `(max_bs, vocab)`.
    """

    input_ids: torch.Tensor
    out_loc: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def create(cls, max_bs: int, vocab_size: int, device: torch.device) -> GraphCaptureBuffer:
        """Buffers for decode batches of up to `max_bs` requests."""

        def ints() -> torch.Tensor:
            return torch.zeros(max_bs, dtype=torch.int32, device=device)

        logits = torch.empty(max_bs, vocab_size, dtype=torch.float32, device=device)
        return cls(ints(), ints(), ints(), logits)

    def copy_from(self, batch: Batch) -> None:
        """Take in the inputs of a padded batch."""
        size = batch.padded_size
        self.input_ids[:size] = batch.input_ids
        self.out_loc[:size] = batch.out_loc
        self.positions[:size] = batch.positions

    def bind(self, batch: Batch, size: int) -> None:
        """Make a batch of `size` requests read from here."""
        batch.input_ids = self.input_ids[:size]
        batch.out_loc = self.out_loc[:size]
        batch.positions = self.positions[:size]


class GraphRunner:
    """Runs decode batches of the sizes it was made for.

    model: its `forward()` reads everything from `ctx`. dummy_req: pads a batch; it has its own row.
    """

    def __init__(
        self,
        model: Any,
        ctx: Context,
        device: torch.device,
        sizes: list[int],
        dummy_req: Req,
        vocab_size: int,
    ) -> None:
        self.model = model
        self.ctx = ctx
        self.device = device
        self.sizes = sizes
        self.dummy_req = dummy_req
        self.graphs: dict[int, Any] = {}
        self.buffer: GraphCaptureBuffer | None = None
        self._vocab_size = vocab_size
        self._program: Program | None = None
        self._is_recorded = False
        if sizes:
            self.buffer = GraphCaptureBuffer.create(sizes[-1], vocab_size, device)
            if device.type == "cuda" and ctx.attn_backend.supports_graph:
                self._capture_all()

    def can_replay(self, batch: Batch) -> bool:
        """Whether the batch fits a captured size."""
        return batch.is_decode and bool(self.sizes) and batch.size <= self.sizes[-1]

    def pad_batch(self, batch: Batch) -> None:
        """Set `padded_reqs`: the requests, and dummies up to the next captured size."""
        size = batch.size
        if self.can_replay(batch):
            size = self.sizes[bisect_left(self.sizes, batch.size)]
        batch.padded_reqs = batch.reqs + [self.dummy_req] * (size - batch.size)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Logits float32 `(requests, vocab)` of a padded decode batch, until the next replay."""
        assert self.buffer is not None and self.can_replay(batch)
        size = batch.padded_size
        self.buffer.copy_from(batch)
        if size in self.graphs:
            self.ctx.attn_backend.prepare_for_replay(batch)
            self.graphs[size].replay()
        else:
            self.buffer.bind(batch, size)
            self.forward(batch, self.buffer.logits[:size])
        return self.buffer.logits[: batch.size]

    def forward(self, batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits float32 `(wanted rows, vocab)` of any padded batch, in `out` if given."""
        metadata = batch.attn_metadata
        paged = getattr(metadata, "paged", None)
        program = self._find_program() if isinstance(paged, PagedBatch) else None
        if program is None or not isinstance(paged, PagedBatch):
            with torch.inference_mode(), self.ctx.forward_batch(batch):
                logits = self.model.forward()
                return logits if out is None else out.copy_(logits)
        ints, wanted = batch.ints, metadata.wanted_indices
        return program.run(
            ints["input_ids"], ints["positions"], ints["out_loc"], paged, wanted, out
        )

    def _find_program(self) -> Program | None:
        """The model as a native program, recorded at the first forward: then weights are there."""
        if not self._is_recorded:
            self._is_recorded = True
            try:
                num_positions = self.ctx.page_table.shape[1]
                recorder = Recorder(self._vocab_size, self.ctx.kv_cache, num_positions)
                self.model.record(recorder)
                self._program = recorder.finish()
            except CannotRecord as reason:
                logger.info("forwards run layer by layer in Python: %s", reason)
        return self._program

    def _capture_all(self) -> None:
        """Capture every size, largest first, so that all share one memory pool."""
        assert self.buffer is not None
        pool = None
        for size in reversed(self.sizes):
            batch = Batch([self.dummy_req] * size, "decode")
            self.buffer.bind(batch, size)
            self.ctx.attn_backend.prepare_for_capture(batch)
            with self.ctx.forward_batch(batch):
                self.buffer.logits[:size] = self.model.forward()  # warm up before capturing
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.buffer.logits[:size] = self.model.forward()
            pool = pool or graph.pool()
            self.graphs[size] = graph
        logger.info("captured CUDA graphs for batch sizes %s", self.sizes)

    def destroy(self) -> None:
        """Let go of graphs and buffers."""
        self.graphs.clear()
        self.buffer = self._program = None
        self._is_recorded = False
