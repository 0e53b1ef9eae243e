"""What is left after many requests of every kind: nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .soak import NUM_PAGES, Soak, soak, soaked_server


@pytest.mark.slow
def test_a_soak_leaves_no_page_row_socket_or_map_entry_behind(tmp_path: Path) -> None:
    with soaked_server(tmp_path) as server:
        counts = soak(server, num_requests=2000, num_users=32, seed=1)
    kinds = {"disconnected", "bad", "n", "stop", "regex", "grammar", "choice", "response_format"}
    assert kinds | {"logprobs", "cache_salt", "stream", "timeout"} <= counts.keys()
    assert counts["disconnected"] > 300 and counts["status 200"] > 1300


def test_200_requests_of_100_users_are_all_answered(tmp_path: Path) -> None:
    with soaked_server(tmp_path) as server:
        run = Soak(server, seed=2, all_good=True)
        asyncio.run(run.run(num_requests=200, num_users=100))
        server.wait_empty(NUM_PAGES)
    assert run.counts["status 200"] == 200
    assert "streams that ended in an error" not in run.counts
