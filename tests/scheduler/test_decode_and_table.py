"""`DecodeManager` and `TableManager`: the running set, what it may still take, and the rows."""

from __future__ import annotations

import pytest
import torch

from minisgl.core import Req, SamplingParams
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.prefill import ChunkedReq
from minisgl.scheduler.table import TableManager


def request(uid: int, num_ids: int = 4, output_len: int = 3, req_type: type[Req] = Req) -> Req:
    ids = torch.zeros(num_ids, dtype=torch.int32)
    return req_type(ids, uid, 0, output_len, uid, SamplingParams())


def test_inflight_tokens_is_the_sum_of_what_remains() -> None:
    manager = DecodeManager(page_size=1)
    assert manager.inflight_tokens == 0
    manager.filter_reqs([request(0, output_len=3), request(1, output_len=5)])
    assert manager.inflight_tokens == 8


def test_inflight_tokens_adds_the_rest_of_a_page_for_each_request() -> None:
    manager = DecodeManager(page_size=16)
    manager.filter_reqs([request(0, output_len=3), request(1, output_len=5)])
    assert manager.inflight_tokens == 8 + 2 * 15


def test_one_token_to_go_at_17_with_pages_of_16_reserves_a_whole_page_more() -> None:
    manager = DecodeManager(page_size=16)
    req = request(0, num_ids=16, output_len=2)
    req.complete_one()
    assert (req.device_len, req.remain_len) == (17, 1)
    manager.filter_reqs([req])
    assert manager.inflight_tokens == 16


def test_the_running_set_keeps_its_order_and_drops_what_cannot_go_on() -> None:
    manager = DecodeManager(page_size=1)
    reqs = [request(uid) for uid in (4, 0, 2)]
    manager.filter_reqs(reqs)
    assert manager.runnable
    batch = manager.schedule_next_batch()
    assert batch is not None and batch.is_decode and batch.reqs == reqs
    for _ in range(3):
        reqs[1].complete_one()
    manager.filter_reqs(batch.reqs)
    assert [req.uid for req in manager.running_reqs] == [4, 2]


def test_a_chunk_does_not_join_the_running_set() -> None:
    manager = DecodeManager(page_size=1)
    manager.filter_reqs([request(0, req_type=ChunkedReq)])
    assert not manager.runnable and manager.schedule_next_batch() is None


def test_an_abort_takes_a_request_out_of_the_running_set() -> None:
    manager = DecodeManager(page_size=1)
    req = request(3)
    manager.filter_reqs([req])
    assert manager.abort_req(5) is None
    assert manager.abort_req(3) is req
    assert manager.abort_req(3) is None and manager.inflight_tokens == 0


def test_rows_are_handed_out_once_and_taken_back_once() -> None:
    page_table = torch.zeros((4, 10), dtype=torch.int32)
    table = TableManager(max_running_reqs=3, page_table=page_table)
    assert table.available_size == 3
    assert sorted(table.allocate() for _ in range(3)) == [0, 1, 2]  # never the dummy row
    assert table.available_size == 0
    with pytest.raises(AssertionError):
        table.allocate()
    table.free(1)
    assert (table.available_size, table.allocate()) == (1, 1)
    table.free(2)
    with pytest.raises(AssertionError, match="twice"):
        table.free(2)


def test_the_token_pool_has_the_shape_of_the_page_table() -> None:
    page_table = torch.zeros((4, 10), dtype=torch.int32)
    table = TableManager(3, page_table)
    assert table.page_table is page_table
    assert table.token_pool.shape == (4, 10) and table.token_pool.dtype == torch.int32
    assert not table.token_pool.is_inference()
