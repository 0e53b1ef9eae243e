"""Fixtures that every folder of tests may use, and what all tests have in common.

No model is loaded and torch is not imported here, so that a single fast test stays fast.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Tests never reach for a model hub; the default model does not come from one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, fetched if it is not on this machine."""
    from minisgl.utils.model_files import resolve_model

    return resolve_model("default").path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random llama with a token for each byte."""
    from tests.llm.tiny import write_model

    return write_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run `python ARGS...` in the repository, with this package first on the path."""

    def run(
        *args: str, stdin: str = "", timeout: float = 240.0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **(env or {})}
        return subprocess.run(
            [sys.executable, *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environ,
            cwd=ROOT,
        )

    return run


@pytest.fixture(autouse=True)
def unchanged_settings() -> Iterator[None]:
    """Values of `ENV` and the level of the log that a test sets hold for that test alone."""
    from minisgl.env import ENV

    log = logging.getLogger("minisgl")
    before, level = [(var, var.value) for var in ENV.all()], log.level
    yield
    log.setLevel(level)
    for var, value in before:
        var.value = value
