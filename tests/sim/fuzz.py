"""python -m tests.sim.fuzz --seconds 60: random cases until the time is up or a property breaks.

A case that fails is printed, shrunk to a short history, and kept in tests/sim/seeds/.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

from .driver import Case, run_case
from .engine import Violation
from .replay import SEEDS, load, play, save, shrink

PAGE_SIZES = (1, 2, 3, 4, 16, 64)


def random_case(rng: random.Random) -> Case:
    """A case that no earlier run is likely to have had."""
    return Case(
        seed=rng.randrange(1 << 40),
        page_size=rng.choice(PAGE_SIZES),
        cache_type=rng.choice(["radix", "radix", "radix", "naive"]),
        overlap=rng.random() < 0.5,
        num_steps=rng.choice([100, 500, 2000]),
        shares=rng.random() < 0.7,
        is_fair=rng.random() < 0.7,
    )


def keep(violation: Violation, name: str) -> int:
    """Print what broke, shrink its history into a file, and say how to see it again."""
    print(violation)
    history = shrink(violation.config, violation.history)
    path = SEEDS / f"found-{name}.json"
    save(path, violation.config, history)
    print(f"{len(history)} events kept; replay: python -m tests.sim.fuzz --case {path}")
    return 1


def replay(text: str) -> int:
    """Run a case (one line of JSON) or a history (a file) again; a failing case is kept."""
    try:
        if text.lstrip().startswith("{"):
            case = Case.from_json(text)
            run_case(case)
        else:
            play(*load(Path(text)))
    except Violation as violation:
        if text.lstrip().startswith("{"):
            return keep(violation, str(case.seed))
        raise
    print("held")
    return 0


def main() -> int:
    """Run until the time is up; the exit status says whether everything held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat a whole session")
    parser.add_argument("--case", help="replay a case (a line of JSON) or a history (a file)")
    args = parser.parse_args()
    if args.case:
        return replay(args.case)
    session = random.randrange(1 << 40) if args.seed is None else args.seed
    rng = random.Random(session)
    print(f"fuzzing for {args.seconds:g} s, session --seed {session}", flush=True)
    start, num_steps, num_cases = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    while time.monotonic() - start < args.seconds:
        case = random_case(rng)
        try:
            world = run_case(case, checks_all=False)
        except Violation as violation:
            return keep(violation, str(case.seed))
        num_steps, num_cases = num_steps + world.num_steps, num_cases + 1
        counts.update(world.counts)
    rate = num_steps / (time.monotonic() - start)
    print(f"{num_steps} steps in {num_cases} cases held, {rate:.0f} steps/s; {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
