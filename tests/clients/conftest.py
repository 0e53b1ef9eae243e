"""The one server that all tests of clients share: the default model, real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Server, running

PARTS = {"engine": "minisgl.engine:Engine", "app": "minisgl.server.app:create_app"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder, default_model_path, dtype="auto", **PARTS) as made:
        yield made
