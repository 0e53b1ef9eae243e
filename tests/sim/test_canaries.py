"""The suite must catch broken schedulers, or its silence means nothing."""

from __future__ import annotations

import pytest

from .driver import Case, run_case
from .engine import Violation
from .mutants import MUTANTS, UNFAIR, WORLD_OF

MAX_CASES = 40
STEPS_PER_CASE = 400


def cases_for(name: str) -> list[Case]:
    """Worlds of all kinds that the mutant can break; half of them with overlap."""
    return [
        Case(
            seed=seed,
            page_size=(1, 4, 2, 16, 3)[seed % 5],
            cache_type="radix",
            overlap=seed % 2 == 0,
            num_steps=STEPS_PER_CASE,
            shares=seed % 3 > 0,
            is_fair=MUTANTS[name] in UNFAIR,
            world=WORLD_OF.get(name, {}),
        )
        for seed in range(1000, 1000 + MAX_CASES)
    ]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_catches_a_scheduler_that_would(name: str) -> None:
    for case in cases_for(name):
        with pytest.MonkeyPatch.context() as patch:
            try:
                run_case(case, prepare=lambda world: MUTANTS[name](world, patch))
            except Violation as violation:
                print(f"{name}: {violation}")
                return
    pytest.fail(f"the mutant {name} survived {MAX_CASES} cases of {STEPS_PER_CASE} steps")
