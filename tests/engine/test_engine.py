"""`Engine`: the shapes it owns, one forward by hand, the attention call, its memory, its end."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention import ATTENTION_BACKENDS, TorchAttnBackend
from minisgl.config import DistributedInfo
from minisgl.core import Batch, Req, SamplingParams, get_global_ctx
from minisgl.engine import Engine, EngineConfig, ForwardOutput
from minisgl.engine.memory import choose_num_pages
from minisgl.kernel import native
from minisgl.models import ModelConfig
from minisgl.params import ConfigError, ModelLoadError

from tests.engine.conftest import MakeEngine
from tests.llm.tiny import CONFIG, VOCAB_SIZE


class Floats(TorchAttnBackend):
    """Somebody else's, that knows no scales."""

    def can_read(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point


def request(ids: list[int], row: int, cached_len: int = 0, output_len: int = 10) -> Req:
    tokens = torch.tensor(ids, dtype=torch.int32)
    return Req(tokens, row, cached_len, output_len, row, SamplingParams())


def by_hand(engine: Engine, batch: Batch) -> torch.Tensor:
    """One forward as a user writes it: pad, fill in, prepare, run."""
    engine.graph_runner.pad_batch(batch)
    return run(engine, batch)


def run(engine: Engine, batch: Batch) -> torch.Tensor:
    """The same for a batch whose `padded_reqs` are set."""
    spans = [(req, torch.arange(req.cached_len, req.device_len)) for req in batch.padded_reqs]
    batch.positions = torch.cat([span for _, span in spans]).int()
    batch.input_ids = torch.cat([req.input_ids[span] for req, span in spans])
    batch.out_loc = torch.cat([engine.page_table[req.table_idx, span] for req, span in spans])
    engine.attn_backend.prepare_metadata(batch)
    with torch.inference_mode(), engine.ctx.forward_batch(batch):
        return engine.model.forward()


def give_rows(engine: Engine, *rows: tuple[int, int]) -> None:
    """Write scattered locations into rows: (row, first location)."""
    width = engine.page_table.shape[1]
    for row, start in rows:
        locations = (torch.arange(width) * 1 + start) % (engine.num_pages * engine.ctx.page_size)
        engine.page_table[row] = locations.int()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_table_has_a_row_more_and_the_pool_a_page_more(
    make_engine: MakeEngine, page_size: int
) -> None:
    engine = make_engine(num_page_override=16, page_size=page_size, max_running_req=3)
    assert engine.page_table.shape[0] == 4
    assert engine.num_pages == 16
    assert engine.kv_cache._kv_buffer.shape == (2, 2, 17, page_size, 2, 16)
    assert engine.dummy_req.table_idx == 3
    assert (engine.page_table[3] == 16 * page_size).all()  # the dummy page
    assert engine.max_seq_len == 16 * page_size


def test_the_context_is_the_smaller_of_what_is_configured_and_what_the_pool_holds(
    make_engine: MakeEngine,
) -> None:
    assert CONFIG["max_position_embeddings"] == 256
    assert make_engine(num_page_override=1000).max_seq_len == 256
    assert make_engine(num_page_override=100).max_seq_len == 100
    assert make_engine(num_page_override=100, max_seq_len_override=30).max_seq_len == 30
    engine = make_engine(num_page_override=10, page_size=4, max_seq_len_override=30)
    assert engine.max_seq_len == 30 and engine.page_table.shape[1] == 32  # whole pages


def test_table_and_pool_are_ordinary_writable_tensors(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for tensor in (engine.page_table, engine.kv_cache._kv_buffer):
        assert not tensor.is_inference() and not tensor.requires_grad
        tensor.view(-1)[0] = tensor.view(-1)[0] + 1
        tensor.view(-1)[0] -= 1
    assert engine.page_table.dtype == torch.int32


def test_one_forward_by_hand_gives_the_logits_of_each_last_position(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    give_rows(engine, (0, 0), (1, 30))
    prompts = [[5, 6, 7, 8, 9], [200, 3]]
    batch = Batch([request(ids, row) for row, ids in enumerate(prompts)], "prefill")
    logits = by_hand(engine, batch)
    assert logits.shape == (2, VOCAB_SIZE) and logits.dtype == torch.float32
    for row, ids in enumerate(prompts):
        alone = by_hand(engine, Batch([request(ids, row)], "prefill"))
        assert torch.allclose(logits[row], alone[0], atol=1e-5)
        longer = by_hand(engine, Batch([request([*ids, 1], row)], "prefill"))
        assert not torch.allclose(logits[row], longer[0], atol=1e-2)


def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(make_engine: MakeEngine) -> None:
    engine = make_engine()
    give_rows(engine, (2, 17))
    ids = [9, 100, 31, 77, 250, 3, 3, 8]
    whole = by_hand(engine, Batch([request(ids, 2)], "prefill"))
    engine.kv_cache._kv_buffer.zero_()
    for start, end in [(0, 3), (3, 7), (7, 8)]:
        phase: Any = "prefill" if end < 8 else "decode"
        logits = by_hand(engine, Batch([request(ids[:end], 2, cached_len=start)], phase))
    assert torch.allclose(whole, logits, atol=1e-5)


def test_users_may_assign_the_padded_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    give_rows(engine, (0, 0), (1, 30))
    reqs = [request([5, 6, 7], 0), request([8, 9], 1)]
    plain = by_hand(engine, Batch(reqs, "prefill"))
    for req in reqs:
        req.complete_one()
        req.append_host(1)
    expected = by_hand(engine, Batch(reqs, "decode"))
    batch = Batch(reqs, "decode")
    batch.padded_reqs = [*reqs, engine.dummy_req, engine.dummy_req]
    padded = run(engine, batch)
    assert plain.shape == (2, VOCAB_SIZE) and padded.shape[0] >= 2
    assert torch.allclose(padded[:2], expected, atol=1e-5)


def test_metadata_reads_only_the_batch_and_the_page_table_and_is_a_snapshot(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    give_rows(engine, (0, 0))
    expected = by_hand(engine, Batch([request([5, 6, 7, 8], 0)], "prefill"))
    req = request([5, 6, 7, 8], 0)
    batch = Batch([req], "prefill")
    batch.padded_reqs = [req]
    batch.positions = torch.arange(4, dtype=torch.int32)
    batch.input_ids = req.input_ids.clone()
    batch.out_loc = engine.page_table[0, :4].clone()
    engine.attn_backend.prepare_metadata(batch)
    engine.page_table[0].fill_(60)  # whatever happens to the row now is none of its business
    req.complete_one()
    with torch.inference_mode(), engine.ctx.forward_batch(batch):
        logits = engine.model.forward()
    assert torch.equal(logits, expected)


def test_attention_stores_k_and_v_and_then_attends(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4, attention_backend="torch")
    give_rows(engine, (0, 8), (1, 100))
    reqs = [request([1] * 6, 0, cached_len=2), request([1] * 3, 1, cached_len=2)]
    batch = Batch(reqs, "prefill")
    batch.padded_reqs = reqs
    batch.positions = torch.tensor([2, 3, 4, 5, 2], dtype=torch.int32)
    batch.input_ids = torch.ones(5, dtype=torch.int32)
    batch.out_loc = torch.cat([engine.page_table[0, 2:6], engine.page_table[1, 2:3]])
    generator = torch.Generator().manual_seed(0)
    old_k, old_v = torch.randn(2, 2, 2, 2, 16, generator=generator)  # request, token, head, dim
    k_cache = engine.kv_cache.k_cache(1).view(-1, 2, 16)
    v_cache = engine.kv_cache.v_cache(1).view(-1, 2, 16)
    for i in range(2):
        k_cache[engine.page_table[i, :2].long()] = old_k[i]
        v_cache[engine.page_table[i, :2].long()] = old_v[i]
    q = torch.randn(5, 4, 16, generator=generator)
    k, v = torch.randn(2, 5, 2, 16, generator=generator)
    engine.attn_backend.prepare_metadata(batch)
    assert batch.attn_metadata.get_last_indices(2).tolist() == [3, 4]
    assert batch.attn_metadata.get_last_indices(1).tolist() == [3]
    out = engine.attn_backend.forward(q, k, v, 1, batch)
    assert out.shape == (5, 4, 16)
    assert torch.equal(k_cache[batch.out_loc.long()], k)
    assert torch.equal(v_cache[batch.out_loc.long()], v)
    assert not engine.kv_cache.k_cache(0).any()
    for i, token, seen in [(0, 0, 3), (0, 1, 4), (0, 2, 5), (0, 3, 6), (1, 4, 3)]:
        start = 0 if i == 0 else 4
        keys = torch.cat([old_k[i], k[start : start + 4]])[:seen]
        values = torch.cat([old_v[i], v[start : start + 4]])[:seen]
        for head in range(4):
            scores = keys[:, head // 2] @ q[token, head] / math.sqrt(16)
            expected = torch.softmax(scores, 0) @ values[:, head // 2]
            assert torch.allclose(out[token, head], expected, atol=1e-5)


def test_forward_and_sample_give_tokens_on_device_and_host(make_engine: MakeEngine) -> None:
    engine = make_engine()
    give_rows(engine, (0, 0))
    batch = Batch([request([5, 6, 7], 0)], "prefill")
    engine.pad_batch(batch)
    batch.positions = torch.arange(3, dtype=torch.int32)
    batch.input_ids = batch.reqs[0].input_ids
    batch.out_loc = engine.page_table[0, :3].clone()
    args = engine.prepare(batch)
    logits = engine.forward(batch)
    output = engine.sample(batch, logits, args)
    assert isinstance(output, ForwardOutput)
    names = ("next_tokens_gpu", "next_tokens_cpu", "copy_done_event")
    assert ForwardOutput._fields[:3] == names and output.logprobs is None
    output.copy_done_event.synchronize()
    assert output.next_tokens_cpu.tolist() == output.next_tokens_gpu.tolist()
    assert output.next_tokens_cpu.tolist() == [int(logits[0].argmax())]


def test_many_engines_live_in_one_process_and_the_context_follows_the_running_one(
    make_engine: MakeEngine,
) -> None:
    engines = [make_engine(page_size=page_size) for page_size in (1, 4, 16)]
    assert get_global_ctx() is engines[-1].ctx
    logits = []
    for engine in engines:
        give_rows(engine, (0, 0))
        logits.append(by_hand(engine, Batch([request([5, 6, 7, 8, 9], 0)], "prefill")))
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert torch.allclose(logits[0], logits[2], atol=1e-5)
    engines[-1].shutdown()
    give_rows(engines[0], (0, 0))
    again = by_hand(engines[0], Batch([request([5, 6, 7, 8, 9], 0)], "prefill"))
    assert torch.allclose(logits[0], again, atol=1e-5)


def test_a_request_out_of_sight_of_the_garbage_in_its_row(make_engine: MakeEngine) -> None:
    engine = make_engine()
    give_rows(engine, (0, 0))
    expected = by_hand(engine, Batch([request([5, 6, 7], 0)], "prefill"))
    engine.kv_cache._kv_buffer.fill_(float("nan"))
    assert torch.equal(by_hand(engine, Batch([request([5, 6, 7], 0)], "prefill")), expected)


@pytest.mark.parametrize("dtype", [torch.float32, "float32", torch.bfloat16, "bfloat16", "float16"])
def test_dtype_says_how_weights_and_kv_are_stored(make_engine: MakeEngine, dtype: Any) -> None:
    expected = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    engine = make_engine(dtype=dtype)
    assert engine.dtype == expected
    assert engine.kv_cache._kv_buffer.dtype == expected
    give_rows(engine, (0, 0))
    logits = by_hand(engine, Batch([request([5, 6, 7], 0)], "prefill"))
    exact = by_hand(make_given(make_engine), Batch([request([5, 6, 7], 0)], "prefill"))
    assert torch.allclose(logits.float(), exact, atol=0.5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", torch.bfloat16, "int8", torch.int16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k_and_v_may_be_stored_in_a_type_of_their_own(
    make_engine: MakeEngine, dtype: str, kv_dtype: Any, backend: str
) -> None:
    engine = make_engine(dtype=dtype, kv_dtype=kv_dtype, attention_backend=backend)
    stored = kv_dtype if isinstance(kv_dtype, torch.dtype) else getattr(torch, kv_dtype)
    assert (engine.dtype, engine.kv_cache._kv_buffer.dtype) == (getattr(torch, dtype), stored)
    give_rows(engine, (0, 0))
    logits = by_hand(engine, Batch([request([5, 6, 7], 0)], "prefill"))
    exact = by_hand(make_given(make_engine, dtype), Batch([request([5, 6, 7], 0)], "prefill"))
    assert torch.allclose(logits.float(), exact.float(), atol=0.05)


def make_given(make_engine: MakeEngine, dtype: str = "float32") -> Engine:
    engine = make_engine(dtype=dtype, kv_dtype="float32")
    give_rows(engine, (0, 0))
    return engine


@pytest.mark.skipif(not native.available(), reason="floats without native kernels")
def test_on_a_cpu_auto_keeps_integers_where_the_backend_is_known_to_read_them(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS._items, "another", lambda ctx, _: Floats(ctx))
    stored = {"auto": torch.int16, "native": torch.int16, "torch": torch.int16}
    for name, kv_dtype in {**stored, "another": torch.float16}.items():
        engine = make_engine(dtype="auto", attention_backend=name)
        assert engine.kv_cache.k_cache(0).dtype is kv_dtype, name
        engine.shutdown()
    with pytest.raises(ConfigError, match=r"Floats on cpu .*int16.*--kv-dtype"):
        make_engine(dtype="auto", attention_backend="another", kv_dtype="int16")


def test_dummy_weights_need_no_weight_file(make_engine: MakeEngine) -> None:
    engine = make_engine(use_dummy_weight=True)
    give_rows(engine, (0, 0))
    logits = by_hand(engine, Batch([request([5, 6, 7], 0)], "prefill"))
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (
            {"attention_backend": "flash9"},
            r"^unknown attention_backend \(--a.*'flash9': use.*torch",
        ),
        ({"dtype": "float3"}, "float3"),
        ({"dtype": 5}, "5"),
        ({"dtype": "int8"}, r"^dtype \(--dtype\) must be auto, float32.*, float, got 'int8'"),
        ({"kv_dtype": "int4"}, r"^kv_dtype \(--kv-dtype\) .*, int16, int8, got 'int4'"),
        ({"kv_dtype": torch.int32}, "int32"),
    ],
)
def test_a_name_that_means_nothing_is_one_clear_error(
    make_engine: MakeEngine, fields: dict[str, Any], word: str
) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=word):
        make_engine(**fields)


def test_a_pool_that_holds_nothing_is_refused_with_the_way_out(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"raise cpu_kv_cache_bytes \(--kv-memory\) or num_page"):
        make_engine(num_page_override=None, cpu_kv_cache_bytes=100)
    with pytest.raises(ConfigError, match=r"raise memory_ratio \(--memory-ratio\) or num_page"):
        choose_num_pages(EngineConfig("x"), torch.device("cuda"), 100, 1000, 0)


def test_on_a_cpu_the_pool_is_sized_by_its_bytes(make_engine: MakeEngine) -> None:
    fields = {"num_page_override": None, "cpu_kv_cache_bytes": 1 << 20, "page_size": 16}
    engine = make_engine(**fields)
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4
    assert engine.num_pages == (1 << 20) // page_bytes - 1
    assert engine.kv_cache._kv_buffer.nbytes <= 1 << 20
    engine.shutdown()
    narrow = make_engine(kv_dtype="int8", **fields)  # a quarter, and 4 bytes for 16 numbers
    assert narrow.num_pages == (1 << 20) // (page_bytes * (16 + 4) // 64) - 1
    cache = narrow.kv_cache
    assert cache._kv_buffer.nbytes + cache._scales.nbytes == narrow.memory_report.kv_bytes


def test_the_memory_report_adds_up(make_engine: MakeEngine) -> None:
    engine = make_engine(num_page_override=63, page_size=2)
    report = engine.memory_report
    assert report.kv_bytes == engine.kv_cache._kv_buffer.nbytes
    assert (report.num_pages, report.page_size, report.max_seq_len) == (63, 2, 126)
    assert report.table_bytes == 2 * engine.page_table.nbytes
    weights = engine.model.state_dict().values()
    assert report.weight_bytes == sum(weight.nbytes for weight in weights)
    text = str(report)
    assert "63 pages of 2 = 126 tokens" in text and "126 tokens" in text and "kB" in text


def test_shutdown_lets_go_of_model_and_pool(make_engine: MakeEngine) -> None:
    engine = make_engine(cuda_graph_bs=[1, 2])
    refs = [weakref.ref(w) for w in engine.model.state_dict().values()]
    pool = weakref.ref(engine.kv_cache)
    engine.shutdown()
    engine.graph_runner = None  # type: ignore[assignment]
    del engine.kv_cache, engine.ctx, engine.attn_backend
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert pool() is None


def test_the_rank_must_be_inside_its_group() -> None:
    with pytest.raises(ConfigError):
        EngineConfig("m", tp_info=DistributedInfo(2, 2))


def on_ranks(size: int, **fields: Any) -> Any:
    """What an engine of so many ranks knows before it loads a model."""
    return SimpleNamespace(
        tp_info=DistributedInfo(0, size), device=torch.device("cpu"), dtype=torch.float32, **fields
    )


@pytest.mark.parametrize("quant", ["q4", "q8"])
def test_packing_on_several_ranks_is_refused_and_not_forgotten(quant: str) -> None:
    config = EngineConfig("tiny", quant=quant)
    with pytest.raises(ConfigError, match=rf"--quant\) {quant} runs on one rank only, not on 2"):
        Engine._choose_pack(on_ranks(2, config=config))
    assert Engine._choose_pack(on_ranks(2, config=EngineConfig("tiny"))) is None


def test_ranks_must_divide_heads_and_rows() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    sizes |= {"intermediate_size": 77, "num_hidden_layers": 2, "vocab_size": 100}
    dense = ModelConfig.from_hf({"model_type": "llama", "max_position_embeddings": 64, **sizes})
    moe = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    moe |= {"max_position_embeddings": 64, "moe_intermediate_size": 32}
    for model, fault in (
        (dense, "does not divide the 77 rows"),
        (ModelConfig.from_hf({**sizes, **moe}), None),
        (ModelConfig.from_hf({**sizes, **moe, "mlp_only_layers": [0]}), "the 77 rows"),
        (ModelConfig.from_hf({**sizes, **moe, "moe_intermediate_size": 33}), "the 33 rows"),
        (ModelConfig.from_hf({**sizes, **moe, "num_attention_heads": 6}), None),
        (ModelConfig.from_hf({**sizes, **moe, "num_attention_heads": 5,
                              "num_key_value_heads": 5}), "5 attention heads"),
    ):  # fmt: skip
        engine = on_ranks(2, model_config=model)
        if fault is None:
            Engine._check_ranks(engine)
        else:
            with pytest.raises(ConfigError, match=fault):
                Engine._check_ranks(engine)
        Engine._check_ranks(on_ranks(1, model_config=model))
