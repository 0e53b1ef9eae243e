"""For the tests of `LLM`: a maker of LLMs of the tiny model that are shut down afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.llm import LLM

MakeLLM = Callable[..., LLM]

# One thread: several would spin for each other where the machine is shared, and gain nothing here.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "num_page_override": 512,
    "max_running_req": 16,
    "num_threads": 1,
}


@pytest.fixture
def make_llm(tiny_model: Path) -> Iterator[MakeLLM]:
    """Make an LLM of the tiny model, float32 and small; shut down at the end of the test."""
    made: list[LLM] = []

    def make(path: Any = tiny_model, **fields: Any) -> LLM:
        made.append(LLM(str(path), **{**SMALL, **fields}))
        return made[-1]

    yield make
    for llm in made:
        if hasattr(llm, "engine"):
            llm.shutdown()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """One LLM for the tests of a module that leave it as it was."""
    shared = LLM(str(tiny_model), **SMALL)
    yield shared
    shared.shutdown()
