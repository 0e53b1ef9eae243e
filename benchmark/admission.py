"""How many requests run at once under each admission policy? python benchmark/admission.py

First 500 requests that come together, prompt and answer uniform in 100 to 1,024 tokens, EOS
ignored, a pool of 20,000 tokens, on the simulated engine: mean number of running requests, decode
steps, and both relative to the conservative policy. Then 100 small random traces with shared
prefixes, chunked prompts, aborts, pages of 1, 4 and 16 tokens and both loops. The simulated world
holds every token against what the request alone would get, counts each page after every step, and
raises at the first allocation that fails, or if a request that runs is put back.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minisgl.scheduler import StepRecord
from minisgl.scheduler.admission import POLICIES

from tests.sim.world import World, WorldConfig

MORE_AT_ONCE, FEWER_STEPS = 1.3, 0.77


@dataclass(frozen=True)
class Load:
    """Requests and the world they meet: lengths uniform in `shortest` to `longest`, both.

    shared: how many tokens at most a prompt has in common with others. abort_rate: the share of
    requests that are aborted after a while.
    """

    config: WorldConfig
    num_requests: int = 500
    shortest: int = 100
    longest: int = 1024
    shared: int = 0
    abort_rate: float = 0.0
    seed: int = 0


@dataclass
class Result:
    """What one run took; `answers` by request, None if it was aborted."""

    num_steps: int
    mean_running: float
    answers: list[list[int] | None]


def run(load: Load, policy: str) -> Result:
    """Serve the load; a broken property, a failed allocation among them, raises `Violation`."""
    rng = random.Random(load.seed)
    world = World(replace(load.config, admission=policy), checks_all=False)
    sizes: list[int] = []

    def count(record: StepRecord) -> None:
        if record.phase == "decode":
            sizes.append(len(record.uids))

    world.scheduler.step_listeners.append(count)
    vocab_size = load.config.vocab_size
    beginning = [rng.randrange(vocab_size) for _ in range(load.shared)]
    aborts: dict[int, list[int]] = {}
    aborted = set()
    for uid in range(load.num_requests):
        length = rng.randint(load.shortest, load.longest)
        prompt = beginning[: min(length, rng.choice([0, load.shared // 2, load.shared]))]
        prompt = prompt + [rng.randrange(vocab_size) for _ in range(length - len(prompt))]
        world.submit(uid, prompt, rng.randint(load.shortest, load.longest), ignore_eos=True)
        if rng.random() < load.abort_rate:
            aborts.setdefault(rng.randrange(4 * load.longest), []).append(uid)
            aborted.add(uid)
    while not world.is_idle:
        for uid in aborts.pop(world.num_steps, ()):
            world.abort(uid)
        world.step()
    world.drain()
    answers = [
        None if uid in aborted else world.book[uid].answer for uid in range(load.num_requests)
    ]
    return Result(len(sizes), sum(sizes) / len(sizes), answers)


def random_load(seed: int) -> Load:
    """A small trace; every second one with overlap."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    config = WorldConfig(
        page_size=page_size,
        num_pages=rng.randint(300, 800) // page_size,
        num_rows=64,
        budget=rng.choice([7, 32, 128, 8192]),
        overlap=seed % 2 == 1,
        max_len=256,
        share_prefixes=rng.choice([0, 8]),
    )
    longest = rng.randint(30, 120)
    shared = rng.choice([0, longest // 2, longest])
    return Load(config, rng.randint(20, 50), 5, longest, shared, rng.choice([0.0, 0.1]), seed)


def compare(load: Load) -> dict[str, Result]:
    """Run a load under each policy; the answers must be the same."""
    results = {policy: run(load, policy) for policy in POLICIES}
    answers = [result.answers for result in results.values()]
    assert all(given == answers[0] for given in answers), "the answers differ"
    return results


def main() -> int:
    """Print both tables; the exit status says whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=int, default=100, metavar="N", help="random traces")
    num_traces = parser.parse_args().traces
    results = compare(Load(WorldConfig(num_pages=20_000, num_rows=64, budget=8192, max_len=2048)))
    base = results["conservative"]
    print(f"{'policy':14} {'running':>8} {'ratio':>6} {'decode steps':>13} {'ratio':>6}")
    for policy, result in results.items():
        more, steps = result.mean_running / base.mean_running, result.num_steps / base.num_steps
        print(
            f"{policy:14} {result.mean_running:8.1f} {more:6.2f} "
            f"{result.num_steps:13,} {steps:6.2f}",
            flush=True,
        )
    is_good = (
        results["peak"].mean_running >= MORE_AT_ONCE * base.mean_running
        and results["peak"].num_steps <= FEWER_STEPS * base.num_steps
    )
    print(f"peak: at least {MORE_AT_ONCE} times as many, at most {FEWER_STEPS} of the steps")
    totals = dict.fromkeys(POLICIES, 0)
    for seed in range(num_traces):
        for policy, result in compare(random_load(seed)).items():
            totals[policy] += result.num_steps
    print(f"{num_traces} random traces, same answers, no allocation failed; decode steps {totals}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
