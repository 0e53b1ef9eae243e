"""A mixture of experts on a CPU: the recorded program against the layers one by one, in turns.

    python benchmark/experts.py [--layers 3] [--experts 64] [--top-k 8] [--seconds 3] [--threads 2]

The layers have the sizes of Qwen3-30B-A3B and random weights of 4 bits. For each case both run
the same batch again and again, one after the other; medians of each, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from minisgl.attention import create_attention_backend
from minisgl.core import Batch, Context, Req, SamplingParams, set_global_ctx
from minisgl.kernel import native
from minisgl.kernel.program import Recorder
from minisgl.kvcache import create_kvcache_pool
from minisgl.models import ModelConfig, create_model
from minisgl.moe import create_moe_backend
from minisgl.quant import ExpertWeights
from minisgl.quant.packed import PackedWeight
from minisgl.utils import torch_dtype

MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
CONTEXT = 100
CASES = (("1 token", 1, 1), ("4 tokens", 4, 1), ("16 tokens", 16, 1), ("prompt of 256", 1, 256))
MAX_LEN = CONTEXT + 256


def random_matrix(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def make_model(layers: int, experts: int, top_k: int) -> Any:
    """Random weights of 4 bits; the router and the norms are floats."""
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": top_k}
    with torch.device("meta"), torch_dtype(torch.float32):
        model = create_model(ModelConfig.from_hf(MODEL | sizes))
    for name, owner, attribute in list(model.slots()):
        shape = tuple(getattr(owner, attribute).shape)
        weight: Any = torch.ones(shape) if "norm" in name else random_matrix(shape[-2:])
        if len(shape) == 3:
            each = (random_matrix(shape[1:]) for _ in range(shape[0]))
            weight = ExpertWeights([PackedWeight.from_float(matrix, 4) for matrix in each])
        elif "norm" not in name and "mlp.gate." not in name:
            weight = PackedWeight.from_float(weight, 4)
        setattr(owner, attribute, weight)
    return model


def make_context(layers: int, streams: int) -> Context:
    """A pool of 16-bit K and V with a row of locations for each stream."""
    ctx = Context(1)
    ctx.kv_cache = create_kvcache_pool(
        num_kv_heads=4, num_layers=layers, head_dim=128, num_pages=streams * MAX_LEN, page_size=1,
        dtype=torch.int16, device="cpu",
    )  # fmt: skip
    ctx.page_table = torch.arange(streams * MAX_LEN, dtype=torch.int32).view(streams, MAX_LEN)
    ctx.attn_backend = create_attention_backend("native", ctx, torch.device("cpu"))
    ctx.moe_backend = create_moe_backend("torch")
    set_global_ctx(ctx)
    return ctx


def make_batch(ctx: Context, streams: int, count: int) -> Batch:
    """`count` random tokens behind the context of each stream."""
    end = CONTEXT + count
    reqs = [
        Req(torch.randint(0, 8000, (end,), dtype=torch.int32), row, CONTEXT, 1, row,
            SamplingParams())
        for row in range(streams)
    ]  # fmt: skip
    batch = Batch(reqs, "decode" if count == 1 else "prefill")
    batch.padded_reqs = reqs
    batch.input_ids = torch.cat([req.input_ids[CONTEXT:] for req in reqs])
    batch.positions = torch.arange(CONTEXT, end, dtype=torch.int32).repeat(streams)
    batch.out_loc = ctx.page_table[:streams, CONTEXT:end].flatten()
    ctx.attn_backend.prepare_metadata(batch)
    return batch


def in_turns(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """The median of each in milliseconds."""
    times: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 4:
        for call, own in zip(calls, times):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) * 1e3 for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8, help="experts of each token")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    args = parser.parse_args()
    native.set_num_threads(args.threads or torch.get_num_threads())
    model = make_model(args.layers, args.experts, args.top_k)
    ctx = make_context(args.layers, max(streams for _, streams, _ in CASES))
    recorder = Recorder(MODEL["vocab_size"], ctx.kv_cache, MAX_LEN)
    model.record(recorder)
    program = recorder.finish()
    print(f"{native.isa()}, {native.num_threads()} threads, {args.layers} layers")
    print(f"{'':<16}{'layers ms':>10}{'program ms':>12}{'ratio':>8}")
    for title, streams, count in CASES:
        batch = make_batch(ctx, streams, count)
        given = [batch.ints[name] for name in ("input_ids", "positions", "out_loc")]

        def by_layers(batch: Batch = batch) -> torch.Tensor:
            with torch.inference_mode(), ctx.forward_batch(batch):
                return model.forward()

        def by_program(batch: Batch = batch, given: list[Any] = given) -> torch.Tensor:
            return program.run(*given, batch.attn_metadata.paged)

        layers, steps = in_turns([by_layers, by_program], args.seconds)
        print(f"{title:<16}{layers:>10.1f}{steps:>12.1f}{layers / steps:>8.2f}")


if __name__ == "__main__":
    main()
