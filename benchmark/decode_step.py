"""Where the time of one forward goes, kind of step by kind of step, against the memory bandwidth.

    python benchmark/decode_step.py [--streams 1,8,32] [--context 64] [--prefill 512] [--threads 2]
        [--kv-dtype int16]

Runs the default model, packed as stored, as a recorded program (no engine, no scheduler). Each of
the few hundred steps counts with its fastest round, since on a shared machine everything slower is
somebody else's time; their sum is what an idle machine would take. "lost" is what a step takes
beyond reading its weights at the probed bandwidth. A call costs what Python and the checks take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from minisgl.kernel import native
from minisgl.kernel.native_attention import snapshot
from minisgl.kernel.program import Program, Recorder
from minisgl.kvcache import create_kvcache_pool
from minisgl.models import create_model, load_model_config, load_model_weights
from minisgl.models.packing import pack_stored
from minisgl.utils import torch_dtype

PROBE_BYTES = 96 << 20
KV_DTYPES = ("float32", "bfloat16", "float16", "int16", "int8")


def load_program(
    path: str, num_locations: int, max_len: int, kv_dtype: torch.dtype = torch.float16
) -> tuple[Program, int]:
    """The recorded model and its vocabulary size."""
    config = load_model_config(path)
    with torch.device("meta"), torch_dtype(torch.float32):
        model = create_model(config)
    load_model_weights(model, path, device="cpu", dtype=torch.float32, pack=pack_stored)
    pool = create_kvcache_pool(
        num_kv_heads=config.num_kv_heads,
        num_layers=config.num_layers,
        head_dim=config.head_dim,
        num_pages=num_locations,
        page_size=1,
        dtype=kv_dtype,
        device="cpu",
    )
    recorder = Recorder(config.vocab_size, pool, max_len)
    model.record(recorder)
    return recorder.finish(), config.vocab_size


def make_run(program: Program, vocab: int, streams: int, begin: int, end: int) -> Callable[[], Any]:
    """A forward of tokens [begin, end) of each stream, all of whose locations are its own."""
    table = torch.arange(streams * end, dtype=torch.int32).view(streams, end)
    count = end - begin
    ids = torch.randint(0, vocab, (streams * count,), dtype=torch.int32)
    positions = torch.arange(begin, end, dtype=torch.int32).repeat(streams)
    out_loc = table[:, begin:end].reshape(-1)
    requests = snapshot(table, range(streams), [count] * streams, [end] * streams, table.numel())
    wanted = torch.arange(1, streams + 1) * count - 1
    out = torch.empty(streams, vocab)
    return lambda: program.run(ids, positions, out_loc, requests, wanted, out)


def measure(program: Program, run: Callable[[], Any], seconds: float) -> tuple[list[float], dict]:
    """Seconds of each call, and by kind [nanoseconds, bytes] in the sum of its fastest steps."""
    run()
    plain: list[float] = []
    fastest: list[int] = []
    steps: list[tuple[str, int, int]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(plain) < 5:
        start = time.perf_counter()
        run()
        plain.append(time.perf_counter() - start)
        program.set_profile(True)
        run()
        program.set_profile(False)
        steps = program.take_profile()
        times = [nanoseconds for _, nanoseconds, _ in steps]
        fastest = [min(pair) for pair in zip(fastest or times, times, strict=True)]
    by_kind: dict[str, list[int]] = {}
    for (kind, _, nbytes), nanoseconds in zip(steps, fastest, strict=True):
        total = by_kind.setdefault(kind, [0, 0])
        total[0] += nanoseconds
        total[1] += nbytes
    return plain, by_kind


def report(title: str, tokens: int, plain: list[float], best: dict, bandwidth: float) -> None:
    native_ms = sum(ns for ns, _ in best.values()) / 1e6
    nbytes = sum(size for _, size in best.values())
    median = statistics.median(plain) * 1e3
    print(
        f"\n{title}: {native_ms:.2f} ms in steps ({min(plain) * 1e3:.2f} ms the fastest call, "
        f"{median:.2f} the median), {tokens / native_ms * 1e3:.0f} tokens/s; "
        f"weights at {nbytes / native_ms / 1e6:.1f} GB/s, "
        f"{100 * nbytes / native_ms * 1e3 / bandwidth:.0f} % of the probe"
    )
    print(f"  {'step':<28}{'ms':>9}{'share':>8}{'GB/s':>7}{'lost ms':>9}")
    for kind, (ns, size) in sorted(best.items(), key=lambda item: -item[1][0]):
        rate = f"{size / ns:.1f}" if size else ""
        lost = ns / 1e6 - size / bandwidth * 1e3
        print(f"  {kind:<28}{ns / 1e6:>9.3f}{ns / 1e4 / native_ms:>7.1f}%{rate:>7}{lost:>9.3f}")
    print(f"  {'sum of the steps':<28}{native_ms:>9.3f}")


def call_overhead(program: Program, vocab: int) -> float:
    """Microseconds of a call that computes nothing: Python, checks, and the way in and out."""
    none = torch.empty(0, dtype=torch.int32)
    requests = snapshot(torch.zeros(1, 1, dtype=torch.int32), [], [], [], 1)
    out = torch.empty(0, vocab)
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        program.run(none, none, none, requests, none, out)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="a GGUF file or folder")
    parser.add_argument("--streams", default="1,8,32", help="decode batches")
    parser.add_argument("--context", type=int, default=64, help="tokens before the decoded one")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of one prompt, 0 for none")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--kv-dtype", default="int16", choices=KV_DTYPES, help="of K and V")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    args = parser.parse_args()
    if args.threads:
        native.set_num_threads(args.threads)
    streams = [int(n) for n in args.streams.split(",") if n]
    num_locations = max([args.prefill, *(n * (args.context + 1) for n in streams)])
    max_len = max(args.context + 1, args.prefill)
    kv_dtype = getattr(torch, args.kv_dtype)
    program, vocab = load_program(args.model, num_locations, max_len, kv_dtype)
    cases = []
    for n in streams:
        run = make_run(program, vocab, n, args.context, args.context + 1)
        cases.append((f"decode, {n} streams", n, run))
    if args.prefill:
        run = make_run(program, vocab, 1, 0, args.prefill)
        cases.append((f"prefill {args.prefill}", args.prefill, run))
    bandwidth = 0.0
    found = []
    for title, tokens, run in cases:
        bandwidth = max(bandwidth, native.load().probe_read(PROBE_BYTES, 5))
        found.append((title, tokens, *measure(program, run, args.seconds)))
    bandwidth = max(bandwidth, native.load().probe_read(PROBE_BYTES, 5))
    print(
        f"{native.isa()}, {native.num_threads()} threads, {program.num_steps} steps, "
        f"bandwidth {bandwidth / 1e9:.1f} GB/s, a call costs {call_overhead(program, vocab):.0f} us"
    )
    for title, tokens, plain, best in found:
        report(title, tokens, plain, best, bandwidth)


if __name__ == "__main__":
    main()
