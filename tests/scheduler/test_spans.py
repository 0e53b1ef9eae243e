"""The arrays of a batch, made at once, against one request and one token after the other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import Req, SamplingParams, Spans
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.prefill import ChunkedReq
from minisgl.scheduler.utils import cells, make_positions, make_write_tuple

ROWS, WIDTH = 8, 48
Small = tuple[int, int, int, bool]  # computed so far, to compute, tokens of the answer, is a chunk

smalls = st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(0, 3), st.booleans())


def make_reqs(described: list[Small]) -> list[Req]:
    """Requests in rows from the last one down."""
    reqs = []
    for i, (cached_len, extend_len, rest, is_chunk) in enumerate(described):
        ids = torch.zeros(cached_len + extend_len, dtype=torch.int32)
        req_type = ChunkedReq if is_chunk else Req
        reqs.append(req_type(ids, ROWS - 1 - i, cached_len, rest, i, SamplingParams()))
    return reqs


@given(st.lists(smalls, max_size=ROWS))
def test_positions_and_where_tokens_go_are_those_of_each_request_in_turn(
    described: list[Small],
) -> None:
    reqs = make_reqs(described)
    table = cells(torch.zeros(ROWS, WIDTH, dtype=torch.int32))
    spans = Spans.of(reqs)
    positions, (rows, columns) = make_positions(spans, table)
    expected = [
        (req.table_idx, position)
        for req in reqs
        for position in range(req.cached_len, req.device_len)
    ]
    assert list(zip(rows.tolist(), columns.tolist())) == expected
    assert positions.tolist() == [position for _, position in expected]
    assert str(positions.dtype) == "int32" and spans.num_tokens == len(expected)
    wanted = [(req.table_idx, req.device_len if req.can_decode else -1) for req in reqs]
    rows, columns = make_write_tuple(reqs[:5], spans, table)  # the others pad the batch
    assert list(zip(rows.tolist(), columns.tolist())) == wanted[:5]


@given(st.lists(smalls, max_size=ROWS), st.sampled_from([1, 3, 16]), st.booleans())
def test_pages_are_handed_out_as_to_one_request_after_the_other(
    described: list[Small], page_size: int, has_spans: bool
) -> None:
    reqs = make_reqs(described)
    table = torch.full((ROWS, WIDTH), -1, dtype=torch.int32)
    cache = CacheManager(200, page_size, table, "naive")
    free = cache.free_slots.tolist()
    expected = table.tolist()
    for req in reqs:
        for page in range(-(-req.cached_len // page_size), -(-req.device_len // page_size)):
            start, head = page * page_size, free.pop(0)
            expected[req.table_idx][start : start + page_size] = range(head, head + page_size)
    cache.allocate_paged(reqs, Spans.of(reqs) if has_spans else None)
    assert table.tolist() == expected and cache.free_slots.tolist() == free
    assert cache._owners == {req.table_idx: (req, -(-req.device_len // page_size)) for req in reqs}
