"""How much sooner is the first token when the prefix comes back by copy? python benchmark/spill.py

A prompt of 2,000 tokens and a few more, SmolLM2-135M. Its KV is computed, or is in the pool, or
comes back from the second tier in host memory or in a file after other prompts have pushed it out,
or is loaded from a file of saved prefixes by another engine. Printed: the time to the first token,
medians; how many times as soon as by recompute; whether logits and tokens are the same to the bit;
and what the copies cost: an eviction with and without the tier, saving and loading. The pool holds
one prompt, so that what comes back pushes as much out, which is part of its time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from minisgl import LLM, SamplingParams

SOONER = 5.0
QUESTION = 16
ONE, SIX = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 6))


class Bench:
    """One engine, whose pool holds one prompt and no more, and what it is asked."""

    def __init__(self, args: argparse.Namespace, **fields: Any) -> None:
        self.num_tokens, page_size = args.tokens, args.page_size
        num_pages = (self.num_tokens + QUESTION + 64) // page_size + 2
        self.llm: Any = LLM(
            args.model,
            dtype="auto",
            page_size=page_size,
            num_page_override=num_pages,
            num_threads=args.threads,
            **fields,
        )
        generator = torch.Generator().manual_seed(0)
        high = self.llm.engine.vocab_size - 1

        def random_ids(count: int) -> list[int]:
            return torch.randint(0, high, (count,), generator=generator).tolist()

        self.prefix, self.question = random_ids(self.num_tokens), random_ids(QUESTION)
        self.others = [random_ids(self.num_tokens) for _ in range(3)]
        self.llm.generate([[1] * 8], SIX)  # records the programs
        self.llm.flush_cache()

    def first_token(self) -> float:
        """Seconds from the prompt to its first token."""
        start = time.perf_counter()
        self.llm.generate([self.prefix + self.question], ONE)
        return time.perf_counter() - start

    def push_out(self, which: int = 0) -> float:
        """Seconds to compute another prompt, which takes all pages."""
        start = time.perf_counter()
        self.llm.generate([self.others[which]], ONE)
        return time.perf_counter() - start

    def answer(self) -> tuple[list[int], torch.Tensor]:
        """The tokens and the logits, float32 (tokens, vocabulary)."""
        rows: list[torch.Tensor] = []
        sample = self.llm.engine.sample

        def watched(batch: Any, logits: torch.Tensor, args: Any) -> Any:
            if batch.reqs[0].is_sampled:
                rows.append(logits[0].clone())
            return sample(batch, logits, args)

        self.llm.engine.sample = watched
        tokens = self.llm.generate([self.prefix + self.question], SIX)[0]["token_ids"]
        del self.llm.engine.sample
        return tokens, torch.stack(rows)


Row = tuple[str, float, bool]


def recomputed(args: argparse.Namespace, rounds: int) -> tuple[list[Row], Any, float]:
    """First token by recompute and from the pool; the answer; seconds of another prompt."""
    bench = Bench(args)
    expected = bench.answer()
    times, others, hits = [], [], []
    for i in range(rounds):
        others.append(bench.push_out(i % 3))
        times.append(bench.first_token())
        hits.append(bench.first_token())
    is_same = same(bench.answer(), expected)
    bench.llm.shutdown()
    rows = [
        ("computed", statistics.median(times), True),
        ("in the pool", statistics.median(hits), is_same),
    ]
    return rows, expected, statistics.median(others)


def spilled(args: argparse.Namespace, folder: str | None, expected: Any) -> tuple[Row, float]:
    """First token from the second tier; seconds of a prompt that pushes another one out."""
    where = {} if folder is None else {"kv_spill_dir": folder}
    bench = Bench(args, kv_spill_bytes=args.spill_bytes, **where)
    others, times = [], []
    bench.first_token()
    for i in range(max(args.rounds, 3)):
        others.append(bench.push_out(i % 3))
        times.append(bench.first_token())
    bench.push_out()
    is_same = same(bench.answer(), expected)
    bench.llm.shutdown()
    name = "from memory" if folder is None else "from a file"
    # each of the others is copied out once, in its first round or the one after
    return (name, statistics.median(times), is_same), statistics.median(others[1:3])


def saved(args: argparse.Namespace, folder: str, expected: Any) -> tuple[Row, str]:
    """First token of an engine that has loaded what another one saved."""
    path = Path(folder) / "prefixes"
    bench = Bench(args)
    bench.first_token()
    start = time.perf_counter()
    bench.llm.save_prefixes(path)
    saving = time.perf_counter() - start
    bench.llm.shutdown()
    times, loads = [], []
    for _ in range(args.rounds):
        bench = Bench(args)
        start = time.perf_counter()
        bench.llm.load_prefixes(path)
        loads.append(time.perf_counter() - start)
        times.append(loads[-1] + bench.first_token())
        is_same = same(bench.answer(), expected)
        bench.llm.shutdown()
    size = path.stat().st_size / 1e6
    note = f"saved file: {size:.1f} MB, saving {saving:.2f} s, loading {min(loads):.2f} s"
    return ("saved, with loading", statistics.median(times), is_same), note


def same(answer: Any, expected: Any) -> bool:
    """Whether two answers have the same tokens and the same logits to the bit."""
    return answer[0] == expected[0] and torch.equal(answer[1], expected[1])


def main() -> int:
    """Print the table; the exit status says whether every way back is soon enough and exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="default", help="(default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prefix (default 2000)")
    parser.add_argument("--page-size", type=int, default=1, help="tokens per page (default 1)")
    parser.add_argument("--threads", type=int, default=0, help="0: automatic")
    parser.add_argument("--rounds", type=int, default=3, help="of each row (default 3)")
    parser.add_argument("--spill-bytes", type=int, default=1 << 30, help="(default 1 GiB)")
    parser.add_argument("--dir", default=None, help="of the files (default: the system's)")
    args = parser.parse_args()
    rows, expected, plain = recomputed(args, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        in_memory, with_memory = spilled(args, None, expected)
        in_file, with_file = spilled(args, folder, expected)
        loaded, note = saved(args, folder, expected)
    rows += [in_memory, in_file, loaded]
    print(f"first token after {args.tokens} + {QUESTION} tokens, pages of {args.page_size}")
    print(f"{'prefix':22} {'first token':>12} {'sooner':>8}   same bits")
    for name, seconds, is_same in rows:
        sooner = rows[0][1] / seconds
        print(f"{name:22} {seconds * 1e3:9.1f} ms {sooner:6.1f} x   {'yes' if is_same else 'NO'}")
    print(
        f"another prompt of {args.tokens}, nothing kept: {plain * 1e3:.0f} ms; pushing one out to "
        f"memory {with_memory * 1e3:.0f} ms, to a file {with_file * 1e3:.0f} ms"
    )
    print(note)
    is_good = all(ok for *_, ok in rows)
    return 0 if is_good and all(rows[0][1] / row[1] >= SOONER for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
