"""`minisgl demo`: one question, one streamed answer, and how fast it came.

May import everything below `cli`.
"""

from __future__ import annotations

import argparse
import time

from minisgl.params import SamplingParams
from minisgl.shell import EXIT_INTERRUPTED, interruptible

from .output import Stats, note, opened, reading, stream_out, write

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER_TOKENS = 64


def run(args: argparse.Namespace) -> int:
    """Ask the question and print the answer as it comes."""
    start = time.perf_counter()
    with opened(args) as llm:
        if not args.quiet:
            note(f"loaded {args.model} in {time.perf_counter() - start:.1f} s")
        write(f"\n> {QUESTION}\n\n")
        prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
        stats = Stats()
        events = llm.stream([prompt], SamplingParams(max_tokens=ANSWER_TOKENS))
        stream_out(stats.watch(interruptible(events)), reading(llm, args))
        write("\n" if args.quiet else f"\n\n{stats.line()}\n")
        if not (args.quiet or stats.is_interrupted):
            note("next: `minisgl chat` talks to it, `minisgl generate --help` shows more")
    return EXIT_INTERRUPTED if stats.is_interrupted else 0
