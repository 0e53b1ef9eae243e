"""Each example runs, on the default model, and prints what its docstring promises."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Lines = list[str]


@pytest.fixture
def lines_of(run_python: RunPython, default_model_path: Path) -> Callable[[str], Lines]:
    def run(name: str) -> Lines:
        result = run_python(f"examples/{name}.py", timeout=280)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    return run


def test_first_steps(lines_of: Callable[[str], Lines]) -> None:
    lines = lines_of("first_steps")
    assert lines[0].startswith("The capital of France is| Paris")
    assert any(line.startswith("One, two, three,| four, five") for line in lines)


def test_the_pool_of_64_tokens_is_traced_number_by_number(
    lines_of: Callable[[str], Lines],
) -> None:
    lines = lines_of("trace_pool")
    pattern = re.compile(r"(\w+) +uids (\S+) +waiting (\d) +free +(\d+) +reserved +(\d+)")
    found = [pattern.match(line) for line in lines]
    steps = [(m[1], m[2], *map(int, m.groups()[2:])) for m in found if m]
    first, fifth = "0,1,2,3", "4"
    assert steps == [
        ("prefill", first, 1, 35, 28),
        *(("decode", first, 1, 35 - 4 * i, 28 - 4 * i) for i in range(1, 8)),
        ("prefill", fifth, 0, 59, 7),
        *(("decode", fifth, 0, 59 - i, 7 - i) for i in range(1, 8)),
    ]
    assert len({line.index("free") for line in lines[:-1]}) == 1  # aligned
    assert lines[-1] == "at the end: 64 of 64 pages are free, the check passes"


def test_prefix_reuse(lines_of: Callable[[str], Lines]) -> None:
    lines = lines_of("prefix_reuse")
    counts = [tuple(map(int, re.findall(r"\d+", line))) for line in lines]
    (first, all_of_it), (_, a_few), (_, one) = counts
    assert all_of_it == first and 1 < a_few < 10 and one == 1


def test_chunked_prefill(lines_of: Callable[[str], Lines]) -> None:
    lines = lines_of("chunked_prefill")
    prefills = [re.search(r"uids \S+ +(\d+)", line) for line in lines if " prefill " in line]
    sizes = [int(match[1]) for match in prefills if match]
    assert sizes[:-1] == [64] * (len(sizes) - 1) and 0 < sizes[-1] <= 64
    assert lines[-1] == f"computed in prefill: {sum(sizes)} of {sum(sizes)} prompt tokens"


def test_pages_over_time_is_what_the_documentation_shows(
    lines_of: Callable[[str], Lines],
) -> None:
    shown = "\n".join(line.rstrip() for line in lines_of("pages_over_time"))
    assert shown.count("time ") == 8
    page = Path(__file__).parent.parent / "docs" / "kvcache.md"
    assert f"```\n{shown}\n```" in page.read_text(encoding="utf-8")


def test_every_example_has_a_test() -> None:
    root = Path(__file__).parent.parent
    names = {path.stem for path in (root / "examples").iterdir() if path.is_file()}
    clients = (root / "tests" / "clients" / "test_real_server.py").read_text(encoding="utf-8")
    tests = "\n".join([*(name for name in globals() if name.startswith("test_")), clients])
    assert all(name in tests or name == "trace_pool" for name in names)
