"""python -m tests.sim.fuzz --seconds 60: random cases until the time is up or a property breaks.

A case that fails is cut to the step that failed, printed, and kept in tests/sim/seeds/.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter
from pathlib import Path

from .driver import Case, run_case
from .engine import Violation

SEEDS = Path(__file__).parent / "seeds"
PAGE_SIZES = (1, 2, 3, 4, 16, 64)


def random_case(rng: random.Random) -> Case:
    """A case that no earlier run is likely to have had."""
    return Case(
        seed=rng.randrange(1 << 40),
        page_size=rng.choice(PAGE_SIZES),
        cache_type=rng.choice(["radix", "radix", "radix", "naive"]),
        overlap=rng.random() < 0.5,
        num_steps=rng.choice([100, 500, 2000]),
    )


def cut(case: Case) -> Case:
    """The same case with as few steps as still fail, as far as halving finds them."""
    low, high = 0, case.num_steps
    while low < high:
        middle = (low + high) // 2
        try:
            run_case(dataclasses.replace(case, num_steps=middle))
            low = middle + 1
        except Violation:
            high = middle
    return dataclasses.replace(case, num_steps=high)


def main() -> int:
    """Run until the time is up; the exit status says whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat a whole session")
    parser.add_argument("--case", help="replay one line of JSON, or a file that holds it")
    args = parser.parse_args()
    if args.case:
        is_line = args.case.lstrip().startswith("{")
        run_case(Case.from_json(args.case if is_line else Path(args.case).read_text()))
        print("held")
        return 0
    session = random.randrange(1 << 40) if args.seed is None else args.seed
    rng = random.Random(session)
    print(f"fuzzing for {args.seconds:g} s, session --seed {session}")
    start, num_steps, num_cases = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    while time.monotonic() - start < args.seconds:
        case = random_case(rng)
        try:
            world = run_case(case, checks_all=False)
        except Violation as violation:
            kept = SEEDS / f"found-{case.seed}.json"
            kept.write_text(cut(case).to_json() + "\n")
            print(f"{violation}\nreplay: python -m tests.sim.fuzz --case {kept}")
            return 1
        num_steps, num_cases = num_steps + world.num_steps, num_cases + 1
        counts.update(world.counts)
    rate = num_steps / (time.monotonic() - start)
    print(f"{num_steps} steps in {num_cases} cases held, {rate:.0f} steps/s; {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
