"""Does the radix cache stay fast when it is full? python benchmark/radix_scale.py

Times one eviction plus one match (and the insert that keeps the size steady) with 500 and with
50,000 cached nodes, and prints their ratio. A walk of the tree would give about 100, the limit is
10.
"""

from __future__ import annotations

import gc
import random
import sys
import time

import torch

from minisgl.kvcache import RadixPrefixCache

SIZES = (500, 50_000)
NUM_ROUNDS = 2_000
PROMPT_LEN = 64
SHARED_LEN = 16
LIMIT = 10.0


def make_prompts(num_prompts: int, rng: random.Random) -> list[torch.Tensor]:
    """Prompts in families that share their first tokens, so that the tree has inner nodes."""
    prompts = torch.randint(0, 1 << 30, (num_prompts, PROMPT_LEN), dtype=torch.int32)
    for i in range(num_prompts):
        prompts[i, :SHARED_LEN] = rng.randrange(max(num_prompts // 8, 1))
    return list(prompts)


def seconds_per_round(num_nodes: int, num_rounds: int = NUM_ROUNDS) -> tuple[float, float]:
    """Median and 99.9th percentile of one eviction plus one match at `num_nodes` nodes."""
    rng = random.Random(0)
    torch.manual_seed(0)
    cache = RadixPrefixCache("cpu", 1)
    prompts = make_prompts(num_nodes + num_rounds, rng)
    indices = torch.arange(PROMPT_LEN, dtype=torch.int32)
    for prompt in prompts[:num_nodes]:
        cache.insert_prefix(prompt, indices)
    for prompt in rng.sample(prompts[:num_nodes], num_nodes // 2):
        cache.match_prefix(prompt)
    gc.collect()
    times = []
    for prompt in prompts[num_nodes:]:
        wanted = prompts[rng.randrange(num_nodes)]
        start = time.perf_counter()
        cache.evict(1)
        cache.match_prefix(wanted)
        times.append(time.perf_counter() - start)
        cache.insert_prefix(prompt, indices)
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.999)]


def main() -> int:
    """Print one line per size and the ratio; the exit status says whether it is below the limit."""
    medians = []
    for num_nodes in SIZES:
        median, tail = seconds_per_round(num_nodes)
        medians.append(median)
        micros = f"{median * 1e6:7.1f} us, p99.9 {tail * 1e6:8.1f} us"
        print(f"{num_nodes:>7} nodes: evict + match {micros}")
    ratio = medians[1] / medians[0]
    print(f"ratio {ratio:.2f} (limit {LIMIT:g})")
    return 0 if ratio < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
