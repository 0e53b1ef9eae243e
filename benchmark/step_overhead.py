"""What one decode step of `LLM.generate` costs besides the native forward, function by function.

    python benchmark/step_overhead.py [--streams 1,8,32] [--steps 200] [--temperature 0.7]

A step lasts from the end of one native forward to the end of the next. What is not the forward is
"Python's share": replies, text, scheduling, pages, the batch's arrays, checks, sampling. It is
measured with nothing but the forward timed; a second pass times functions too, each without those
under it, which costs about half a microsecond a call. On a shared machine everything slower than
usual is somebody else's time, so a line gives the lower quartile and, of the share, the median.
`MINISGL_DISABLE_OVERLAP_SCHEDULING=false` shows the loop with overlap.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from minisgl import LLM, SamplingParams
from minisgl.attention.native_backend import NativeAttnBackend
from minisgl.engine import Engine, Sampler
from minisgl.kernel.program import Program
from minisgl.llm.answer import Answer
from minisgl.scheduler import Scheduler
from minisgl.scheduler.cache import CacheManager

WARM_STEPS = 5
FUNCTIONS: list[tuple[type, str]] = [
    (Scheduler, "_receive"),
    (Scheduler, "_schedule_next_batch"),
    (Scheduler, "_prepare_batch"),
    (CacheManager, "allocate_paged"),
    (Engine, "prepare"),
    (NativeAttnBackend, "prepare_metadata"),
    (Sampler, "prepare"),
    (Scheduler, "_launch"),
    (Scheduler, "_forward"),
    (Engine, "forward"),
    (Program, "run"),
    (Engine, "sample"),
    (Sampler, "sample"),
    (Scheduler, "_process_last_data"),
    (Scheduler, "_accept_token"),
    (Scheduler, "_flush_replies"),
    (Answer, "take"),
]
OUTSIDE = "generate, and what else"


class Stopwatch:
    """Times the native forward and, if asked to, functions; one entry per step each.

    steps, forwards: seconds. by_function: seconds of each function without those under it.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.forwards: list[float] = []
        self.by_function: list[Counter[str]] = []
        self._current: Counter[str] = Counter()
        self._inner = [0.0]
        self._last_end = 0.0
        self._undo: list[Callable[[], None]] = []

    def time_forward(self, program: Program) -> None:
        """Put a clock around the native call."""
        native = program._native

        def run(*args: Any) -> None:
            start = time.perf_counter()
            native.run(*args)
            end = time.perf_counter()
            self._inner[-1] += end - start
            self.steps.append(end - self._last_end)
            self.forwards.append(end - start)
            self.by_function.append(self._current)
            self._last_end, self._current = end, Counter()

        program._native = SimpleNamespace(run=run)
        self._undo.append(lambda: setattr(program, "_native", native))

    def time_function(self, owner: type, name: str) -> None:
        """Put a clock around a method."""
        original = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                taken = time.perf_counter() - start
                self._current[label] += taken - self._inner.pop()
                self._inner[-1] += taken

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    def stop(self) -> None:
        """Take all clocks away; forget the steps that warm up."""
        while self._undo:
            self._undo.pop()()
        for values in (self.steps, self.forwards, self.by_function):
            del values[:WARM_STEPS]  # type: ignore[attr-defined]


def quartile(values: list[float]) -> float:
    """The lower quartile, in microseconds."""
    return statistics.quantiles(values, n=4)[0] * 1e6


def measure(llm: LLM, streams: int, params: SamplingParams, by_function: bool) -> Stopwatch:
    """The decode steps of one `generate`."""
    ids = torch.randint(100, llm.engine.vocab_size, (streams, 32)).tolist()
    watch = Stopwatch()
    program = llm.engine.graph_runner._find_program()
    if program is None:
        raise SystemExit("this model has no native program here")
    watch.time_forward(program)
    if by_function:
        for owner, name in FUNCTIONS:
            watch.time_function(owner, name)
    try:
        llm.generate(ids, params)
    finally:
        watch.stop()
    return watch


def report(streams: int, plain: Stopwatch, detailed: Stopwatch) -> None:
    rest = [step - forward for step, forward in zip(plain.steps, plain.forwards)]
    share = 100 * statistics.median(part / step for part, step in zip(rest, plain.steps))
    print(
        f"\n{streams} streams: step {quartile(plain.steps):.0f} us, native forward "
        f"{quartile(plain.forwards):.0f} us, the rest {quartile(rest):.0f} us (median "
        f"{statistics.median(rest) * 1e6:.0f}); Python's share {share:.1f} %"
    )
    rows = []
    for owner, name in FUNCTIONS:
        label = f"{owner.__name__}.{name}"
        rows.append((quartile([times[label] for times in detailed.by_function]), label))
    outside = [
        step - forward - sum(times.values())
        for step, forward, times in zip(detailed.steps, detailed.forwards, detailed.by_function)
    ]
    rows.append((quartile(outside), OUTSIDE))
    for taken, label in rows:
        print(f"  {label:<36}{taken:>9.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="a GGUF file or folder")
    parser.add_argument("--streams", default="1,8,32", help="decode batches")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each")
    parser.add_argument("--rounds", type=int, default=2, help="of all batches, in turn")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    args = parser.parse_args()
    streams = [int(n) for n in args.streams.split(",")]
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=WARM_STEPS + args.steps,
        ignore_eos=True,
    )
    llm = LLM(
        args.model,
        dtype="auto",
        num_threads=args.threads,
        max_running_req=max(streams),
        max_seq_len_override=64 + params.max_tokens,
    )
    with llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        found = {n: (Stopwatch(), Stopwatch()) for n in streams}
        for _ in range(args.rounds):
            for n in streams:
                for by_function, total in enumerate(found[n]):
                    watch = measure(llm, n, params, bool(by_function))
                    total.steps += watch.steps
                    total.forwards += watch.forwards
                    total.by_function += watch.by_function
        for n, pair in found.items():
            report(n, *pair)


if __name__ == "__main__":
    main()
