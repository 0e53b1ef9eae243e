"""A maker of engines of the tiny model that are shut down afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.engine import Engine, EngineConfig

MakeEngine = Callable[..., Engine]

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_page_override": 64,
    "max_running_req": 4,
    "num_threads": 1,
}


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[MakeEngine]:
    """Make an engine of the tiny model, float32, on the CPU; shut down at the end of the test."""
    made: list[Engine] = []

    def make(**fields: Any) -> Engine:
        made.append(Engine(EngineConfig(str(tiny_model), **{**SMALL, **fields})))
        return made[-1]

    yield make
    for engine in made:
        if "model" in vars(engine):
            engine.shutdown()
