"""How close the packed products come to what this machine can do.

    python benchmark/kernels.py [--format q4m] [--head-format q8] [--isa avx2] [--threads 2]

Measures two ceilings, how fast memory can be read and how fast 8-bit products can be computed in
registers, and then the products of SmolLM2-135M at several numbers of rows (tokens). Each of the 30
layers has weights of its own, so that they come from memory as in a model. Everything is repeated
in turns. `--quantile 0.5` shows the median call; on a machine that is shared with others, 0.1 shows
the calls that were left alone. Ceilings are the best seen, and are probed again in each turn.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import torch

from minisgl.kernel import native

ROWS = (1, 4, 8, 16, 32, 128, 512)
HIDDEN, INTERMEDIATE, HEAD_DIM, NUM_Q, NUM_KV, VOCAB, LAYERS = 576, 1536, 64, 9, 3, 49152, 30
SHAPES = {
    "qkv": ((NUM_Q + 2 * NUM_KV) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, NUM_Q * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


@dataclass
class Case:
    """One product: its weights (one per layer), and the seconds of every call, by rows."""

    name: str
    shape: tuple[int, int]
    weights: list
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.weights[0].nbytes

    def ops(self, rows: int) -> int:
        return 2 * rows * self.shape[0] * self.shape[1]


def random_packed(fmt: str, shape: tuple[int, int]):
    """A packed weight of any format. Only the size matters here, so float formats pass through
    `pack_float`, the others through random GGUF blocks."""
    if fmt in ("q4m", "q8"):
        return native.pack_float(torch.randn(shape) * 0.02, fmt)
    ggml_type, columns, nbytes = {
        "q4": (2, 32, 18), "q5": (6, 32, 22), "q5m": (7, 32, 24), "q6": (14, 256, 210)
    }[fmt]  # fmt: skip
    if shape[1] % columns:
        raise SystemExit(f"{fmt} needs input sizes that are multiples of {columns}")
    raw = torch.zeros(shape[0] * shape[1] // columns * nbytes, dtype=torch.uint8)
    return native.pack_gguf([(raw.numpy(), 0)], ggml_type, shape)


def build(fmt: str, head_fmt: str) -> list[Case]:
    cases = [
        Case(name, shape, [random_packed(fmt, shape) for _ in range(LAYERS)])
        for name, shape in SHAPES.items()
    ]
    head = (VOCAB, HIDDEN)
    return [*cases, Case("head", head, [random_packed(head_fmt, head)])]


def time_layers(cases: list[Case], rows: int) -> None:
    """One pass through the model: every product once, in the order of a forward pass."""
    module = native.load()
    inputs = {k: native.quantize(torch.randn(rows, k)) for k in (HIDDEN, INTERMEDIATE)}
    outs = {case.name: torch.empty(rows, case.shape[0]) for case in cases}
    for layer in range(LAYERS):
        for case in cases:
            if layer >= len(case.weights):
                continue
            weight, x, out = case.weights[layer], inputs[case.shape[1]], outs[case.name]
            address, stride = out.data_ptr(), out.stride(0)
            start = time.perf_counter()
            module.multiply(weight, x, address, stride)
            case.seconds.setdefault(rows, []).append(time.perf_counter() - start)


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def report(cases: list[Case], rows: int, read: float, multiply: float, q: float) -> float:
    """Print the block of lines for `rows`; returns the seconds of a whole forward pass."""
    whole, all_bytes, all_ops = 0.0, 0, 0

    def line(name: str, shape: str, seconds: float, nbytes: int, ops: int) -> None:
        bandwidth, rate = nbytes / seconds, ops / seconds
        print(
            f"{rows:>5}  {name:<8} {shape:>12} {seconds * 1e3:>9.3f} {bandwidth / 1e9:>8.2f}"
            f" {bandwidth / read:>6.0%} {rate / 1e9:>9.1f} {rate / multiply:>6.0%}"
        )

    for case in cases:
        seconds = quantile(case.seconds[rows], q)
        count = len(case.weights)
        whole += seconds * count
        all_bytes += case.nbytes * count
        all_ops += case.ops(rows) * count
        line(case.name, f"{case.shape[0]}x{case.shape[1]}", seconds, case.nbytes, case.ops(rows))
    line("model", f"{LAYERS} layers", whole, all_bytes, all_ops)
    print()
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="q4m", choices=list(native.FORMATS))
    parser.add_argument("--head-format", default="q8", choices=list(native.FORMATS))
    parser.add_argument("--isa", help="instruction set; the best one by default")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    args = parser.parse_args()
    module = native.load()
    if args.threads:
        native.set_num_threads(args.threads)
    best_isa = native.isa()
    if args.isa:
        native.set_isa(args.isa)
    cases = build(args.format, args.head_format)
    read = multiply = 0.0
    for _ in range(args.repeats):
        read = max(read, module.probe_read(128 << 20, 2))
        multiply = max(multiply, module.probe_multiply(20_000, 10))
        for rows in args.rows:
            time_layers(cases, rows)
    print(f"instruction set {native.isa()} (best here: {best_isa}), {native.num_threads()} threads")
    print(
        f"ceilings: reading memory {read / 1e9:.1f} GB/s, 8-bit products {multiply / 1e9:.0f} Gop/s"
    )
    print(f"weights: layers {args.format}, head {args.head_format}; quantile {args.quantile} of"
          f" {args.repeats} passes\n")  # fmt: skip
    print(f"{'rows':>5}  {'product':<8} {'out x in':>12} {'ms':>9} {'GB/s':>8} {'of':>6}"
          f" {'Gop/s':>9} {'of':>6}")  # fmt: skip
    passes = {rows: report(cases, rows, read, multiply, args.quantile) for rows in args.rows}
    print("tokens/s if a forward pass were only these products:")
    for rows, seconds in passes.items():
        print(f"{rows:>5} rows {rows / seconds:>10.0f}")


if __name__ == "__main__":
    main()
