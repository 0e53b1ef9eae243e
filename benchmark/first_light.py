"""Two ratios that a user feels: how soon the first token comes, and what batching brings.

First token: a fresh process that loads the default model and prints its first token, against one
that only imports torch, in turn. Batching: 16 prompts at once against the same ones one by one.
Run: `python benchmark/first_light.py`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from minisgl import LLM, SamplingParams

FIRST_TOKEN = """
from minisgl import LLM, SamplingParams
llm = LLM({model!r}, dtype={dtype!r})
print(next(iter(llm.stream(["The capital of France is"], SamplingParams(max_tokens=8)))).text)
"""


def seconds_of(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - start


def first_token(model: str, dtype: str, rounds: int) -> None:
    """Print the time to the first token as a multiple of `import torch`."""
    code = FIRST_TOKEN.format(model=model, dtype=dtype)
    seconds_of(code)  # the files are in the page cache from here on
    pairs = [(seconds_of("import torch"), seconds_of(code)) for _ in range(rounds)]
    base, ours = (statistics.median(side) for side in zip(*pairs))
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"first token   {ours:6.2f} s   import torch {base:6.2f} s   "
        f"ratio {ratio:5.2f}   (wanted: at most 4)"
    )


def batching(model: str, dtype: str, rounds: int, num_prompts: int = 16) -> None:
    """Print tokens per second of prompts at once and in turn."""
    llm = LLM(model, dtype=dtype)
    prompts = [f"Write about {i} cats and" for i in range(num_prompts)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    llm.generate(prompts[:1], params)
    ratios, at_once, in_turn = [], [], []
    for _ in range(rounds):
        llm.cache_manager.flush()
        start = time.perf_counter()
        together = llm.generate(prompts, params)
        middle = time.perf_counter()
        llm.cache_manager.flush()
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        end = time.perf_counter()
        assert [a["token_ids"] for a in together] == [a["token_ids"] for a in alone]
        at_once.append(num_prompts * params.max_tokens / (middle - start))
        in_turn.append(num_prompts * params.max_tokens / (end - middle))
        ratios.append(at_once[-1] / in_turn[-1])
    print(
        f"{num_prompts} at once    {statistics.median(at_once):6.0f} t/s   "
        f"in turn {statistics.median(in_turn):10.0f} t/s   "
        f"ratio {statistics.median(ratios):5.2f}   (wanted: at least 3), the same tokens"
    )


def main() -> None:
    """Parse the flags and run both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    first_token(args.model, args.dtype, args.rounds)
    batching(args.model, args.dtype, min(args.rounds, 3))


if __name__ == "__main__":
    main()
