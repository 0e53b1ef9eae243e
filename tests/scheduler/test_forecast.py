"""The guess how long an answer will be: pure counting."""

from __future__ import annotations

import random

import pytest

from minisgl.scheduler.forecast import FEWEST, LATEST, Forecast


def taught(*answers: tuple[int, int]) -> Forecast:
    forecast = Forecast()
    for num_generated, max_tokens in answers:
        forecast.learn(num_generated, max_tokens)
    return forecast


def test_without_evidence_an_answer_takes_all_it_may() -> None:
    assert Forecast().unused(0, 100) == 0
    assert taught(*[(10, 100)] * (FEWEST - 1)).unused(0, 100) == 0


def test_an_answer_is_expected_to_end_with_the_median_of_those_that_went_as_far() -> None:
    forecast = taught(*[(n, 100) for n in range(1, 2 * FEWEST + 2)])  # 1 to 17
    assert forecast.unused(0, 100) == 100 - (FEWEST + 1)
    assert forecast.unused(8, 100) == 100 - 13
    assert forecast.unused(10, 100) == 0, "too few of them went further than 10"
    assert forecast.unused(0, 120) == 120 - 11  # the same share: 9 of 100


def test_answers_of_another_size_say_nothing() -> None:
    forecast = taught(*[(10, 4000)] * FEWEST)
    assert forecast.unused(0, 4000) == 3990 and forecast.unused(0, 2049) > 2040
    assert forecast.unused(0, 2047) == forecast.unused(0, 4096) == 0


def test_only_the_latest_answers_count_and_memory_is_bounded() -> None:
    forecast = taught(*[(10, 100)] * 50, *[(100, 100)] * LATEST)
    assert forecast.unused(0, 100) == 0
    for size in range(1, 40):
        for _ in range(2 * LATEST):
            forecast.learn(1, 1 << size)
    assert sum(len(ordered) for _, ordered in forecast._answers.values()) <= 41 * LATEST
    assert all(len(latest) == len(ordered) for latest, ordered in forecast._answers.values())


def test_an_answer_without_a_token_teaches_nothing() -> None:
    assert taught(*[(0, 100)] * 2 * FEWEST).unused(0, 100) == 0


@pytest.mark.parametrize(("share", "unused"), [(1.0, 0), (0.5, 50), (0.05, 95), (1e-9, 99)])
def test_a_fixed_share_is_of_what_is_left_and_never_learns(share: float, unused: int) -> None:
    forecast = Forecast(share)
    for _ in range(2 * FEWEST):
        forecast.learn(100, 100)
    assert forecast.unused(0, 100) == unused
    assert forecast.unused(900, 1000) == unused


@pytest.mark.parametrize("share", [None, 1e-9, 0.3, 1.0])
def test_at_least_one_token_is_always_expected(share: float | None) -> None:
    rng, forecast = random.Random(1), Forecast(share)
    for _ in range(2000):
        max_tokens = rng.randint(1, 300)
        forecast.learn(rng.randint(1, max_tokens), max_tokens)
        max_tokens = rng.randint(1, 300)
        num_generated = rng.randrange(max_tokens)
        assert 0 <= forecast.unused(num_generated, max_tokens) < max_tokens - num_generated
