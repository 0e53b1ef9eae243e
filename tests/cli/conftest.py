"""The scripted model in the place of the real one, and a standard input that is a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from tests.cli.scripted import ScriptedLLM


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedLLM]:
    monkeypatch.setattr("minisgl.llm.LLM", ScriptedLLM)
    monkeypatch.setattr(ScriptedLLM, "made", [])
    return ScriptedLLM.made


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def set_stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return set_stdin


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called in the test: standard error is a terminal, and the live line comes at once."""

    def patch() -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr("minisgl.cli.progress.QUIET_SECONDS", 0.01)

    return patch
