"""How close native attention comes to what this machine can do, and to torch.

    python benchmark/attention.py [--dtype bfloat16] [--isa avx2] [--threads 2] [--repeats 5]

Heads of SmolLM2-135M: 9 query heads on 3 KV heads of 64 columns, pages of 16 tokens in random
order. Decode is measured in GB/s of K and V read (every layer has K and V of its own, so that they
come from memory as in a model), prefill in GFLOP/s of the causal half. Two ceilings are probed in
each turn: how fast memory can be read and how fast floats can be multiplied and added in registers.
"of" is the share of the ceiling. torch: `scaled_dot_product_attention` on K and V that already lie
side by side, in the same type; a pool of pages would first have to be gathered.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minisgl.kernel import native
from minisgl.kernel import native_attention as na

NUM_Q, NUM_KV, DIM, PAGE, LAYERS = 9, 3, 64, 16, 30
CONTEXTS, STREAMS, PREFILLS = (64, 1024, 8192), (1, 8, 32), (512, 4096)
MEMORY = 192 << 20  # bytes of K and V that one case may take


@dataclass
class Case:
    """One shape: seconds per layer of ours and of torch's."""

    streams: int
    length: int
    queries: int
    ours: list[float] = field(default_factory=list)
    torch: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "decode" if self.queries == 1 else "prefill"

    def nbytes(self, itemsize: int) -> int:
        return 2 * self.streams * self.length * NUM_KV * DIM * itemsize

    @property
    def flops(self) -> int:
        pairs = self.queries * self.length - self.queries * (self.queries - 1) // 2
        return 4 * self.streams * NUM_Q * DIM * pairs


def seconds(call: Callable[[int], object], layers: int) -> float:
    """Seconds per layer of one pass over all layers."""
    start = time.perf_counter()
    for layer in range(layers):
        call(layer)
    return (time.perf_counter() - start) / layers


def measure(case: Case, dtype: torch.dtype, repeats: int, probe: Callable[[], None]) -> None:
    num_pages = case.streams * case.length // PAGE
    layers = max(1, min(LAYERS, MEMORY // case.nbytes(dtype.itemsize)))
    shape = (num_pages, PAGE, NUM_KV, DIM)
    is_int8 = dtype is torch.int8
    numbers = torch.randint(-127, 128, shape) if is_int8 else torch.randn(shape)
    scale = torch.full((num_pages * PAGE, NUM_KV), 0.01) if is_int8 else None
    numbers = numbers.to(dtype)
    pools = [na.KVTensors(numbers.clone(), numbers.clone(), scale, scale) for _ in range(layers)]
    pages = torch.randperm(num_pages).view(case.streams, -1, 1) * PAGE
    table = (pages + torch.arange(PAGE)).view(case.streams, -1).int()
    counts, lengths = [case.queries] * case.streams, [case.length] * case.streams
    batch = na.snapshot(table, range(case.streams), counts, lengths, num_pages * PAGE)
    q = torch.randn(case.streams * case.queries, NUM_Q, DIM)
    out = torch.empty_like(q)

    by_head = (case.streams, case.length, NUM_KV, DIM)
    plain = q.view(case.streams, case.queries, NUM_Q, DIM).transpose(1, 2)
    if not is_int8:
        plain = plain.to(dtype)

    def ours(layer: int) -> None:
        na.attention(q, pools[layer], batch, out=out)

    def twin(layer: int) -> None:
        k, v = (x.view(by_head).transpose(1, 2) for x in (pools[layer].k, pools[layer].v))
        F.scaled_dot_product_attention(plain, k, v, is_causal=case.queries > 1, enable_gqa=True)

    ours(0)
    for _ in range(repeats):
        probe()
        case.ours.append(seconds(ours, layers))
        if not is_int8:
            case.torch.append(seconds(twin, min(layers, 4)))


def report(cases: list[Case], itemsize: int, read: float, multiply: float) -> None:
    print(f"{'':8} {'streams':>7} {'context':>7} {'us/layer':>10} {'GB/s':>7} {'of':>5}"
          f" {'GFLOP/s':>8} {'of':>5} {'torch us':>10} {'ratio':>6}")  # fmt: skip
    for case in cases:
        ours = min(case.ours)
        bandwidth, rate = case.nbytes(itemsize) / ours, case.flops / ours
        line = (
            f"{case.name:8} {case.streams:>7} {case.length:>7} {ours * 1e6:>10.1f}"
            f" {bandwidth / 1e9:>7.2f} {bandwidth / read:>5.0%}"
            f" {rate / 1e9:>8.1f} {rate / multiply:>5.0%}"
        )
        if case.torch:
            twin = min(case.torch)
            line += f" {twin * 1e6:>10.1f} {twin / ours:>6.1f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dtypes = {"float32", "bfloat16", "float16", "int8"}
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(dtypes))
    parser.add_argument("--isa", help="instruction set; the best one by default")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    module = native.load()
    if args.threads:
        native.set_num_threads(args.threads)
    torch.set_num_threads(native.num_threads())
    if args.isa:
        native.set_isa(args.isa)
    dtype = getattr(torch, args.dtype)
    cases = [Case(n, length, 1) for length in CONTEXTS for n in STREAMS]
    cases = [case for case in cases if case.nbytes(dtype.itemsize) <= MEMORY]
    cases += [Case(1, length, length) for length in PREFILLS]
    ceilings = [0.0, 0.0]

    def probe() -> None:
        ceilings[0] = max(ceilings[0], module.probe_read(64 << 20, 1))
        ceilings[1] = max(ceilings[1], module.probe_float(50_000, 1))

    for case in cases:
        measure(case, dtype, args.repeats, probe)
    read, multiply = ceilings
    print(f"instruction set {native.isa()}, {native.num_threads()} threads, {args.dtype} K and V")
    print(f"ceilings: reading memory {read / 1e9:.1f} GB/s, floats {multiply / 1e9:.0f} GFLOP/s")
    print(f"the best of {args.repeats}, as the ceilings are\n")
    report(cases, dtype.itemsize, read, multiply)


if __name__ == "__main__":
    main()
