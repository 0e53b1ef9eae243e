"""The table of canaries in docs/scheduling.md is the one that the suite runs."""

from __future__ import annotations

from pathlib import Path

from .mutants import MUTANTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scheduling.md"


def test_the_page_lists_every_canary_in_its_own_words() -> None:
    rows = [f"| `{name}` | {' '.join((f.__doc__ or '').split())} |" for name, f in MUTANTS.items()]
    assert len(rows) >= 12
    assert "\n".join(rows) in PAGE.read_text(encoding="utf-8")
