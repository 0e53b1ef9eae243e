"""How much memory this process holds, from /proc; a test that asks skips where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest


def resident_bytes(path: Path) -> int:
    """Bytes of the mapped file at `path` that are in this process's memory."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs /proc")
    total, is_in_file = 0, False
    for line in smaps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # the head of a mapping
            is_in_file = fields[-1] == str(path.resolve())
        elif is_in_file and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total
