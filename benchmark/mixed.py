"""What a long prompt does to those who are being answered. python benchmark/mixed.py

Requests decode, and after a while one long prompt arrives. Without `mixed_chunk` it is computed
in one go, and all others wait for their next token that long; with it, so many of its tokens at
most ride in each of their steps. Printed are the longest time between two tokens of a running
request, how long the newcomer waits for its first token, and all tokens computed per second from
the first step to the last. Rounds are interleaved; medians count, and the median of the ratios
to no mixing in the same round. The answers must be the same, token for token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from minisgl import LLM, SamplingParams
from minisgl.message import DetokenizeMsg, UserMsg

BETTER_GAP, THROUGHPUT_LEFT = 4.0, 0.9


@dataclass
class Result:
    """Milliseconds between tokens at worst and to the newcomer's first; tokens per second."""

    worst_gap: float
    first_token: float
    throughput: float
    answers: dict[int, list[int]]


class Load:
    """`streams` requests of `context` tokens with answers of `answer`, and one of `prompt` tokens
    that arrives when each of them has `after` tokens of answer."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        sizes = (args.streams, args.context)
        self.prompts = torch.randint(0, vocab_size, sizes, generator=generator).tolist()
        self.long = torch.randint(0, vocab_size, (args.prompt,), generator=generator).tolist()
        self.params = SamplingParams(max_tokens=args.answer, ignore_eos=True)
        self.after = args.after

    def run(self, llm: Any) -> Result:
        """Serve it once, with an empty cache."""
        llm.cache_manager.flush()
        newcomer = len(self.prompts)
        times: dict[int, list[float]] = {uid: [] for uid in range(newcomer + 1)}
        answers: dict[int, list[int]] = {uid: [] for uid in range(newcomer + 1)}
        num_tokens = 0
        arrival = 0.0
        receive, send = type(llm).receive_msg, type(llm).send_result

        def receiving(blocking: bool = False) -> Sequence[Any]:
            nonlocal arrival
            msgs = receive(llm, blocking)
            if not arrival and len(times[0]) == self.after:
                arrival = time.perf_counter()
                return [*msgs, UserMsg(newcomer, self.long, self.params)]
            return msgs

        def sending(replies: Sequence[DetokenizeMsg]) -> None:
            now = time.perf_counter()
            for reply in replies:
                times[reply.uid].append(now)
                answers[reply.uid].append(reply.next_token)
            send(llm, replies)

        def count(record: Any) -> None:
            nonlocal num_tokens
            num_tokens += record.num_tokens

        llm.receive_msg, llm.send_result = receiving, sending
        llm.step_listeners.append(count)
        start = time.perf_counter()
        llm.generate(self.prompts, self.params)
        seconds = time.perf_counter() - start
        llm.step_listeners.remove(count)
        gaps = [b - a for at in list(times.values())[:-1] for a, b in pairwise(at)]
        first = times[newcomer][0] - arrival
        return Result(1e3 * max(gaps), 1e3 * first, num_tokens / seconds, answers)


def measure(args: argparse.Namespace) -> dict[int, list[Result]]:
    """All rounds of each chunk size, 0 for none; the answers must be the same."""
    results: dict[int, list[Result]] = {chunk: [] for chunk in [0, *args.chunks]}
    with LLM(args.model, dtype="auto", num_page_override=args.pages) as llm:
        load = Load(args, llm.engine.vocab_size)
        llm.engine.kv_cache._kv_buffer.zero_()  # no page of it is touched for the first time later
        llm.generate([[1, 2, 3]])  # nothing is recorded later
        for round_ in range(args.rounds):
            for chunk, found in results.items():
                print(f"round {round_ + 1}: chunk {chunk or 'none'}", file=sys.stderr, flush=True)
                llm.mixed_budget = chunk
                found.append(load.run(llm))
                assert found[-1].answers == results[0][0].answers, "the answers differ"
    return results


def main() -> int:
    """Print the table; the exit status says whether some chunk size is within the limits."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=16, help="requests that decode")
    parser.add_argument("--context", type=int, default=64, help="tokens of their prompts")
    parser.add_argument("--answer", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--after", type=int, default=40, help="tokens until the newcomer arrives")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of its prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--pages", type=int, default=16_384, help="tokens of the KV pool")
    results = measure(parser.parse_args())

    def median(chunk: int, field: str) -> float:
        return statistics.median(getattr(result, field) for result in results[chunk])

    def ratio(chunk: int, field: str) -> float:
        pairs = zip(results[chunk], results[0], strict=True)
        return statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs)

    print(
        f"{'chunk':>6} {'worst gap ms':>13} {'better':>7} {'first token ms':>15} "
        f"{'tokens/s':>9} {'ratio':>6}"
    )
    is_good = False
    for chunk in results:
        better, left = 1 / ratio(chunk, "worst_gap"), ratio(chunk, "throughput")
        is_good |= better >= BETTER_GAP and left >= THROUGHPUT_LEFT
        print(
            f"{chunk or 'none':>6} {median(chunk, 'worst_gap'):13.1f} {better:7.1f} "
            f"{median(chunk, 'first_token'):15.0f} {median(chunk, 'throughput'):9.0f} {left:6.2f}"
        )
    print(f"wanted: a gap at least {BETTER_GAP:g} times better, a ratio of {THROUGHPUT_LEFT:g}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
