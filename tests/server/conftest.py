"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server of a simulated engine that all tests of a module share."""
    with running(tmp_path_factory.mktemp("server"), tiny_model, num_tokenizer=2) as server:
        yield server
