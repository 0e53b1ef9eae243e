"""Decoded tokens per second over the number of streams and the length of their contexts.

    python benchmark/throughput_table.py [--streams 1,8,64] [--contexts 64,2048]

Runs the default model as a recorded program (no engine, no scheduler), each stream with K and V of
its own, float16. A cell counts the fastest forward of `--seconds`, since on a shared machine
everything slower is somebody else's time. More streams should never give fewer tokens per second: a
cell that falls more than 5 % below the one to its left is marked. Cells whose K and V would not fit
in `--kv-memory` gigabytes are left out.
"""

from __future__ import annotations

import argparse
import time

from decode_step import load_program, make_run

from minisgl.kernel import native
from minisgl.models import load_model_config

FALLING = 0.95


def fastest(run, seconds: float) -> float:
    """Seconds of the fastest call, of at least three."""
    run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="a GGUF file or folder")
    parser.add_argument("--streams", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--contexts", default="64,512,2048,8192")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell")
    parser.add_argument("--kv-memory", type=float, default=8.0, help="gigabytes of K and V at most")
    args = parser.parse_args()
    if args.threads:
        native.set_num_threads(args.threads)
    streams = [int(n) for n in args.streams.split(",")]
    contexts = [int(n) for n in args.contexts.split(",")]
    config = load_model_config(args.model)
    token_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    room = int(args.kv_memory * 1e9) // token_bytes
    fitting = {(n, c) for n in streams for c in contexts if n * (c + 1) <= room}
    if not fitting:
        parser.error("--kv-memory: no cell fits")
    locations = max(n * (c + 1) for n, c in fitting)
    program, vocab = load_program(args.model, locations, max(contexts) + 1)
    print(f"{native.isa()}, {native.num_threads()} threads, tokens/s (* falls)")
    print(f"{'context':>8}" + "".join(f"{n:>9}" for n in streams))
    for context in contexts:
        line, before = f"{context:>8}", 0.0
        for n in streams:
            if (n, context) not in fitting:
                line += f"{'-':>9}"
                continue
            rate = n / fastest(make_run(program, vocab, n, context, context + 1), args.seconds)
            line += f"{f'{rate:.0f}' + ('*' if rate < FALLING * before else ''):>9}"
            before = rate
        print(line, flush=True)


if __name__ == "__main__":
    main()
