"""`determine_cuda_graph_bs`, `GraphRunner`, `GraphCaptureBuffer`: fixed-size decode batches."""

from __future__ import annotations

import pytest
import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine import GraphCaptureBuffer, GraphRunner, determine_cuda_graph_bs

from tests.engine.conftest import MakeEngine

GIB = 1 << 30


def decode_batch(num_reqs: int) -> Batch:
    reqs = []
    for row in range(num_reqs):
        req = Req(torch.tensor([1, 2], dtype=torch.int32), row, 0, 9, row, SamplingParams())
        req.complete_one()
        req.append_host(3 + row)
        reqs.append(req)
    return Batch(reqs, "decode")


@pytest.mark.parametrize(
    ("bs", "max_bs", "free", "device", "expected"),
    [
        (None, 32, 0, "cuda", [1, 2, 4, 8, 16, 24, 32]),
        (None, 30, 0, "cuda", [1, 2, 4, 8, 16, 24]),
        (None, 8, 0, "cpu", [1, 2, 4, 8]),
        (None, 5, 0, "cuda", [1, 2, 4]),
        (None, 3, 0, "cuda", [1, 2]),
        (None, 1, 0, "cuda", [1]),
        (None, 0, 0, "cuda", []),
        (None, None, 200 * GIB, "cpu", []),
        ([3, 1, 3], None, 0, "cpu", [1, 3]),
        ([], 64, 0, "cuda", []),
        ([7], 64, 0, "cuda", [7]),
    ],
)
def test_the_sizes_are_1_2_4_and_multiples_of_8_or_those_given(
    bs: list[int] | None, max_bs: int | None, free: int, device: str, expected: list[int]
) -> None:
    assert determine_cuda_graph_bs(bs, max_bs, free, torch.device(device)) == expected


def test_the_default_maximum_follows_the_memory_of_the_gpu() -> None:
    device = torch.device("cuda")
    assert determine_cuda_graph_bs(None, None, 100 * GIB, device)[-1] == 256
    assert determine_cuda_graph_bs(None, None, 20 * GIB, device)[-1] == 160


def test_on_a_cpu_nothing_is_padded_unless_sizes_are_given(make_engine: MakeEngine) -> None:
    engine = make_engine()
    batch = decode_batch(3)
    engine.graph_runner.pad_batch(batch)
    assert batch.padded_reqs == batch.reqs
    assert not engine.graph_runner.can_replay(batch)


@pytest.mark.parametrize(("num_reqs", "padded"), [(1, 2), (2, 2), (3, 4), (4, 4)])
def test_a_decode_batch_is_padded_to_the_next_size_with_the_dummy_request(
    make_engine: MakeEngine, num_reqs: int, padded: int
) -> None:
    engine = make_engine(cuda_graph_bs=[2, 4])
    assert isinstance(engine.graph_runner, GraphRunner)
    batch = decode_batch(num_reqs)
    engine.graph_runner.pad_batch(batch)
    assert batch.padded_size == padded and batch.size == num_reqs
    assert batch.padded_reqs[num_reqs:] == [engine.dummy_req] * (padded - num_reqs)


def test_prefills_and_larger_batches_are_not_padded(make_engine: MakeEngine) -> None:
    engine = make_engine(cuda_graph_bs=[2])
    large, prefill = decode_batch(3), Batch(decode_batch(1).reqs, "prefill")
    for batch in (large, prefill):
        engine.graph_runner.pad_batch(batch)
        assert batch.padded_reqs == batch.reqs
        assert not engine.graph_runner.can_replay(batch)


def test_the_buffer_takes_in_a_padded_batch() -> None:
    buffer = GraphCaptureBuffer.create(4, 10, torch.device("cpu"))
    assert buffer.input_ids.shape == buffer.out_loc.shape == buffer.positions.shape == (4,)
    assert buffer.logits.shape == (4, 10) and buffer.logits.dtype == torch.float32
    batch = decode_batch(3)
    batch.input_ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    batch.out_loc = torch.tensor([1, 3, 2], dtype=torch.int32)
    batch.positions = torch.tensor([2, 2, 2], dtype=torch.int32)
    address = buffer.input_ids.data_ptr()
    buffer.copy_from(batch)
    assert buffer.input_ids.tolist() == [5, 6, 7, 0]
    assert buffer.out_loc.tolist() == [1, 3, 2, 0]
    assert buffer.positions.tolist() == [2, 2, 2, 0]
    assert buffer.input_ids.data_ptr() == address


def test_replay_runs_over_the_fixed_buffers_and_gives_the_same_logits(
    make_engine: MakeEngine,
) -> None:
    logits = []
    for sizes in (None, [4]):
        engine = make_engine(cuda_graph_bs=sizes)
        for row in range(3):
            engine.page_table[row] = torch.arange(64, dtype=torch.int32).roll(-7 * row)
        prompts = Batch(
            [
                Req(r.input_ids[:2], r.table_idx, 0, 9, r.uid, r.sampling_params)
                for r in decode_batch(3).reqs
            ],
            "prefill",
        )
        for batch in (prompts, decode_batch(3)):
            engine.pad_batch(batch)
            spans = [(r, torch.arange(r.cached_len, r.device_len)) for r in batch.padded_reqs]
            batch.positions = torch.cat([s for _, s in spans]).int()
            batch.input_ids = torch.cat([r.input_ids[s] for r, s in spans])
            batch.out_loc = torch.cat([engine.page_table[r.table_idx, s] for r, s in spans])
            engine.prepare(batch)
            result = engine.forward(batch)
        assert result.shape == (3, engine.vocab_size)
        logits.append(result.clone())
        if sizes is not None:
            buffer = engine.graph_runner.buffer
            assert buffer is not None
            assert result.data_ptr() == buffer.logits.data_ptr()
            assert batch.input_ids.data_ptr() == buffer.input_ids.data_ptr()
            assert buffer.input_ids.tolist() == [3, 4, 5, 0]
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
