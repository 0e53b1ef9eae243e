"""`Req`, `Batch` and `Context`: a test for every sentence of the public contract about them."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from minisgl.core import (
    Batch,
    Context,
    Req,
    SamplingParams,
    get_global_ctx,
    reset_global_ctx,
    set_global_ctx,
)


def make_req(num_ids: int = 5, cached_len: int = 0, output_len: int = 3, uid: int = 7) -> Req:
    return Req(
        input_ids=torch.arange(num_ids, dtype=torch.int32),
        table_idx=2,
        cached_len=cached_len,
        output_len=output_len,
        uid=uid,
        sampling_params=SamplingParams(),
        cache_handle=None,
    )


def test_a_new_request_has_the_lengths_of_its_prompt() -> None:
    req = make_req(num_ids=5, cached_len=2, output_len=3)
    assert (req.device_len, req.max_device_len) == (5, 8)
    assert (req.remain_len, req.extend_len, req.can_decode) == (3, 3, True)
    assert (req.table_idx, req.cached_len, req.output_len, req.uid) == (2, 2, 3, 7)
    assert req.cache_handle is None
    assert req.input_ids.dtype == torch.int32 and req.input_ids.device.type == "cpu"


def test_complete_one_stores_what_was_computed_and_makes_room_for_one() -> None:
    req = make_req(num_ids=5, cached_len=2, output_len=3)
    req.complete_one()
    assert (req.cached_len, req.device_len, req.extend_len, req.remain_len) == (5, 6, 1, 2)


def test_a_request_decodes_until_nothing_remains() -> None:
    req = make_req(num_ids=5, output_len=2)
    assert req.can_decode
    req.complete_one()
    assert req.can_decode
    req.complete_one()
    assert (req.device_len, req.remain_len, req.can_decode) == (7, 0, False)


def test_a_request_that_may_generate_nothing_cannot_decode() -> None:
    assert not make_req(output_len=0).can_decode


@pytest.mark.parametrize("cached_len", [-1, 5, 6])
def test_the_cached_part_is_smaller_than_the_request(cached_len: int) -> None:
    with pytest.raises(AssertionError):
        make_req(num_ids=5, cached_len=cached_len)


def test_append_host_takes_a_tensor_of_one_element_or_an_int() -> None:
    req = make_req(num_ids=2)
    req.append_host(torch.tensor([11], dtype=torch.int32))
    req.append_host(12)
    assert req.input_ids.tolist() == [0, 1, 11, 12]
    assert req.input_ids.dtype == torch.int32


def test_append_host_leaves_the_prompt_of_the_caller_alone() -> None:
    pool = torch.arange(10, dtype=torch.int32)
    req = Req(pool[:3], 0, 0, 4, 0, SamplingParams())
    req.append_host(99)
    assert req.input_ids.tolist() == [0, 1, 2, 99]
    assert pool.tolist() == list(range(10))


def test_append_host_grows_in_amortised_constant_time() -> None:
    req = make_req(num_ids=1)
    addresses = {req.input_ids.data_ptr()}
    for token in range(2000):
        req.append_host(token)
        addresses.add(req.input_ids.data_ptr())
    assert req.input_ids.tolist() == [0, *range(2000)]
    assert len(addresses) <= 12  # one for each doubling


def test_append_host_works_after_input_ids_was_assigned() -> None:
    req = make_req(num_ids=4)
    req.append_host(9)
    replacement = torch.tensor([5, 6], dtype=torch.int32)
    req.input_ids = replacement
    req.append_host(7)
    assert req.input_ids.tolist() == [5, 6, 7]
    assert replacement.tolist() == [5, 6]


def test_requests_take_attributes_of_their_users() -> None:
    make_req().note = "a class without __slots__"  # type: ignore[attr-defined]


def test_a_batch_knows_its_phase_and_its_size() -> None:
    reqs = [make_req(uid=0), make_req(uid=1)]
    batch = Batch(reqs, "prefill")
    assert (batch.is_prefill, batch.is_decode, batch.size) == (True, False, 2)
    assert Batch(reqs=reqs, phase="decode").is_decode
    assert (batch.padded_reqs, batch.padded_size) == (reqs, 2)


def test_padded_requests_can_be_assigned_and_leave_the_requests_alone() -> None:
    reqs, dummy = [make_req(uid=0)], make_req(uid=-1)
    batch = Batch(reqs, "decode")
    batch.padded_reqs = [*reqs, dummy, dummy]
    assert (batch.size, batch.padded_size) == (1, 3)


def test_the_batch_of_a_context_is_there_only_during_its_forward() -> None:
    ctx, batch = Context(page_size=4), Batch([make_req()], "prefill")
    with pytest.raises(AssertionError):
        _ = ctx.batch
    with ctx.forward_batch(batch):
        assert ctx.batch is batch
    with pytest.raises(AssertionError):
        _ = ctx.batch


def test_a_forward_cannot_be_nested_in_itself() -> None:
    ctx, batch = Context(page_size=1), Batch([make_req()], "prefill")
    with ctx.forward_batch(batch):
        with pytest.raises(AssertionError), ctx.forward_batch(batch):
            pass
        assert ctx.batch is batch  # the refused one took nothing away


def test_a_forward_that_raises_leaves_the_context_usable() -> None:
    ctx, batch = Context(page_size=1), Batch([make_req()], "prefill")
    with pytest.raises(KeyError), ctx.forward_batch(batch):
        raise KeyError
    with ctx.forward_batch(batch):
        assert ctx.batch is batch


def test_the_global_context_is_the_last_one_set() -> None:
    reset_global_ctx()
    with pytest.raises(AssertionError):
        get_global_ctx()
    first, second = Context(page_size=1), Context(page_size=16)
    set_global_ctx(first)
    set_global_ctx(second)
    assert get_global_ctx() is second
    reset_global_ctx()
    with pytest.raises(AssertionError):
        get_global_ctx()


def test_during_a_forward_the_global_context_is_the_one_that_runs() -> None:
    running, other = Context(page_size=1), Context(page_size=1)
    set_global_ctx(other)
    with running.forward_batch(Batch([make_req()], "prefill")):
        assert get_global_ctx() is running
    assert get_global_ctx() is other
    reset_global_ctx()


def test_two_engines_in_two_threads_do_not_see_each_other() -> None:
    seen: list[bool] = []

    def run(ctx: Context) -> None:
        with ctx.forward_batch(Batch([make_req()], "prefill")):
            time.sleep(0.02)
            seen.append(get_global_ctx() is ctx)

    threads = [threading.Thread(target=run, args=(Context(page_size=1),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4
