"""The smallest helpers: arithmetic, the ordered set, the registry, the logger, the errors."""

from __future__ import annotations

import logging
import math
import random

import pytest

import minisgl
from minisgl.utils import (
    OrderedSet,
    Registry,
    align_ceil,
    align_down,
    div_ceil,
    div_even,
    errors,
    init_logger,
)


def test_division_and_alignment_agree_with_their_definitions() -> None:
    for a in range(60):
        for b in range(1, 20):
            assert div_ceil(a, b) == math.ceil(a / b)
            assert align_down(a, b) == max(n for n in range(0, a + 1) if n % b == 0)
            assert align_ceil(a, b) == min(n for n in range(a, a + b) if n % b == 0)


def test_an_even_division_leaves_nothing_over() -> None:
    assert (div_even(12, 4), div_even(0, 4)) == (3, 0)
    with pytest.raises(ValueError, match="12 cannot be divided evenly by 5"):
        div_even(12, 5)


def test_a_division_may_replicate_if_asked() -> None:
    assert div_even(2, 8, allow_replicate=True) == 1
    for a, b in ((3, 8), (12, 5)):
        with pytest.raises(ValueError, match="evenly"):
            div_even(a, b, allow_replicate=True)


def test_an_ordered_set_iterates_in_the_order_of_insertion() -> None:
    items = OrderedSet([3, 1, 2])
    items.add(1)
    items.add(0)
    assert list(items) == [3, 1, 2, 0]
    items.discard(3)
    items.discard(99)
    items.add(3)
    assert list(items) == [1, 2, 0, 3]
    assert repr(items) == "OrderedSet([1, 2, 0, 3])"
    with pytest.raises(KeyError):
        items.remove(99)


def test_an_ordered_set_has_the_same_members_as_a_set() -> None:
    rng, ours, theirs = random.Random(0), OrderedSet[int](), set()
    for _ in range(500):
        item = rng.randrange(20)
        if rng.random() < 0.6:
            ours.add(item)
            theirs.add(item)
        else:
            ours.discard(item)
            theirs.discard(item)
        assert (len(ours), set(ours), item in ours) == (len(theirs), theirs, item in theirs)
    assert set(ours | OrderedSet([99])) == theirs | {99}


def test_a_registry_gives_what_was_entered() -> None:
    shapes: Registry[type] = Registry("shape")

    @shapes.register("round")
    class Circle:
        pass

    assert shapes["round"] is Circle
    assert ("round" in shapes, "flat" in shapes, shapes.names()) == (True, False, ["round"])


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    shapes: Registry[int] = Registry("shape")
    shapes.register("b")(2)
    shapes.register("a")(1)
    with pytest.raises(errors.ConfigError, match="unknown shape 'c': use one of a, b"):
        shapes["c"]


def test_a_name_cannot_be_entered_twice() -> None:
    shapes: Registry[int] = Registry("shape")
    shapes.register("a")(1)
    with pytest.raises(AssertionError):
        shapes.register("a")(2)


def test_loggers_share_one_handler() -> None:
    loggers = [init_logger(name) for name in ("minisgl.one", "two", "minisgl.one")]
    assert [logger.name for logger in loggers] == ["minisgl.one", "minisgl.two", "minisgl.one"]
    kinds = [type(handler).__name__ for handler in logging.getLogger("minisgl").handlers]
    assert kinds.count("_StderrHandler") == 1  # pytest adds some of its own


def test_a_log_line_goes_to_the_current_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    init_logger("minisgl.small").warning("a line")
    assert capsys.readouterr().err.endswith("minisgl.small: a line\n")


def test_every_error_of_a_user_is_a_minisgl_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) >= 9
    assert all(issubclass(kind, errors.MinisglError) for kind in kinds)
    assert errors.InvalidRequestError("no", "stop").param == "stop"


def test_the_package_looks_names_up_when_asked() -> None:
    assert minisgl.SamplingParams().is_greedy
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = minisgl.Nothing
