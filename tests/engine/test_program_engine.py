"""The recorded program behind `Engine.forward`: used where it can be, equal to the layers, and the
same bits for a prompt whatever else is going on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

native = pytest.importorskip("minisgl.kernel.native")
if not native.available():
    pytest.skip("this installation has no native kernels", allow_module_level=True)

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.kernel.program import Program
from minisgl.llm import LLM

from tests.engine.conftest import MakeEngine
from tests.integer_kv import INTEGERS
from tests.llm.tiny import write_model

EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each run of a program had."""
    seen: list[int] = []
    original = Program.run

    def run(self: Program, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(input_ids))
        return original(self, input_ids, *args)

    monkeypatch.setattr(Program, "run", run)
    return seen


def prefill_batch(engine: Engine, lengths: list[int]) -> Batch:
    """A prepared prefill of random prompts, whose tokens lie at the start of the pool."""
    generator = torch.Generator().manual_seed(0)
    reqs, locations, start = [], [], 0
    for row, length in enumerate(lengths):
        ids = torch.randint(0, 256, (length,), generator=generator, dtype=torch.int32)
        reqs.append(Req(ids, row, 0, 4, row, SamplingParams()))
        locations.append(torch.arange(start, start + length + 1, dtype=torch.int32))
        engine.page_table[row, : length + 1] = locations[-1]
        start += length + 1
    batch = Batch(reqs, "prefill")
    prepare(engine, batch)
    return batch


def prepare(engine: Engine, batch: Batch) -> None:
    engine.graph_runner.pad_batch(batch)
    spans = [(req, range(req.cached_len, req.device_len)) for req in batch.padded_reqs]
    batch.input_ids = torch.cat([req.input_ids[span.start : span.stop] for req, span in spans])
    batch.positions = torch.tensor([p for _, span in spans for p in span], dtype=torch.int32)
    batch.out_loc = torch.cat(
        [engine.page_table[req.table_idx, span.start : span.stop] for req, span in spans]
    )
    engine.attn_backend.prepare_metadata(batch)


def by_layers(engine: Engine, batch: Batch) -> torch.Tensor:
    with torch.inference_mode(), engine.ctx.forward_batch(batch):
        return engine.model.forward()[: batch.size]


@pytest.mark.parametrize("kv_dtype", ["float32", *INTEGERS])
def test_a_forward_runs_the_program_and_equals_the_layers(
    make_engine: MakeEngine, runs: list[int], kv_dtype: Any
) -> None:
    engine = make_engine(attention_backend="native", kv_dtype=kv_dtype)
    # Where the last bit of a number moves a code by one, more than that bit differs.
    tolerance, step = (1e-5, 1e-5) if kv_dtype == "float32" else (1e-3, 1)
    batch = prefill_batch(engine, [9, 1, 20])
    actual = engine.forward(batch)
    assert runs == [30] and actual.shape == (3, engine.vocab_size)
    kv = engine.kv_cache._kv_buffer.clone()
    torch.testing.assert_close(actual, by_layers(engine, batch), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kv, engine.kv_cache._kv_buffer, rtol=1e-5, atol=step)
    for req in batch.reqs:
        req.complete_one()
        req.append_host(65)
    decode = Batch(batch.reqs, "decode")
    prepare(engine, decode)
    actual = engine.forward(decode)
    assert runs == [30, 3]
    torch.testing.assert_close(actual, by_layers(engine, decode), rtol=tolerance, atol=tolerance)


def test_other_rows_than_the_last_may_be_wanted(make_engine: MakeEngine) -> None:
    engine = make_engine(attention_backend="native")
    batch = prefill_batch(engine, [9, 5])
    last = engine.forward(batch)
    batch.attn_metadata.wanted_indices = torch.tensor([2, 8, 13])
    every = engine.graph_runner.forward(batch)
    assert every.shape == (3, engine.vocab_size) and torch.equal(every[1:], last)


def test_replay_pads_and_runs_the_program_over_the_fixed_buffers(
    make_engine: MakeEngine, runs: list[int]
) -> None:
    engine = make_engine(attention_backend="native", cuda_graph_bs=[4])
    batch = prefill_batch(engine, [9, 5, 3])
    engine.forward(batch)
    for req in batch.reqs:
        req.complete_one()
        req.append_host(70)
    decode = Batch(batch.reqs, "decode")
    prepare(engine, decode)
    assert decode.padded_size == 4
    actual = engine.forward(decode)
    buffer = engine.graph_runner.buffer
    assert buffer is not None and runs == [17, 4] and actual.shape[0] == 3
    assert actual.data_ptr() == buffer.logits.data_ptr()
    torch.testing.assert_close(actual, by_layers(engine, decode), rtol=1e-5, atol=1e-5)


def test_the_torch_backend_runs_the_layers(make_engine: MakeEngine, runs: list[int]) -> None:
    engine = make_engine(attention_backend="torch")
    batch = prefill_batch(engine, [9])
    assert torch.equal(engine.forward(batch), by_layers(engine, batch)) and runs == []


@pytest.fixture
def moe_engine(tmp_path: Path) -> Iterator[Engine]:
    path = write_model(tmp_path / "moe", **EXPERTS)
    weights_of_experts(path)
    config = EngineConfig(
        str(path), dtype="float32", device="cpu", num_page_override=64, max_running_req=4,
        attention_backend="native",
    )  # fmt: skip
    engine = Engine(config)
    yield engine
    engine.shutdown()


def test_experts_are_steps_of_the_program(moe_engine: Engine, runs: list[int]) -> None:
    batch = prefill_batch(moe_engine, [9, 1, 20])
    actual = moe_engine.forward(batch)
    torch.testing.assert_close(actual, by_layers(moe_engine, batch), rtol=1e-5, atol=1e-5)
    assert runs == [30]


def test_what_cannot_be_recorded_runs_by_layers_and_says_so_once(
    moe_engine: Engine, runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    attention = moe_engine.model.model.layers.op_list[1].self_attn
    attention.o_proj.weight = attention.o_proj.weight.double()
    batch = prefill_batch(moe_engine, [9])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert torch.equal(moe_engine.forward(batch), by_layers(moe_engine, batch))
    assert runs == []
    assert [r.getMessage() for r in caplog.records if "layer by layer" in r.getMessage()] == [
        "forwards run layer by layer in Python: a weight is torch.float64 on cpu"
    ]


def weights_of_experts(path: Path) -> None:
    """Replace the dense MLPs of a tiny model's file by experts."""
    from safetensors.torch import load_file, save_file

    stored = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        kept |= {f"{attention}.{name}_norm.weight": 1 + normal(16) for name in "qk"}
        kept[f"{mlp}.gate.weight"] = normal(4, 64)
        for expert in range(4):
            for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
                kept[f"{mlp}.experts.{expert}.{name}_proj.weight"] = normal(*shape)
    save_file(kept, path / "model.safetensors")


Bits = dict[int, list[torch.Tensor]]


def generate(path: Path, prompts: list[list[int]], threads: int = 0, **fields: Any) -> Bits:
    """Logits of every token generated, by the index of the prompt."""
    llm = LLM(
        str(path), device="cpu", attention_backend="native", max_running_req=64,
        num_page_override=8192 // fields.get("page_size", 1), **fields,
    )  # fmt: skip
    if threads:
        native.set_num_threads(threads)
    found: Bits = {}
    original = llm.engine.sample

    def sample(batch: Batch, logits: torch.Tensor, args: Any) -> Any:
        for row, req in enumerate(batch.reqs):
            if req.is_sampled:
                found.setdefault(req.uid, []).append(logits[row].clone())
        return original(batch, logits, args)

    llm.engine.sample = sample  # type: ignore[method-assign]
    try:
        llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    finally:
        llm.shutdown()
    return found


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads = native.num_threads()
    yield
    native.set_num_threads(threads)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize(
    "kind", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quant": "q4"}, {"quant": "q8"}], ids=str
)
def test_a_prompt_gives_the_same_bits_alone_among_31_others_chunked_and_paged(
    tiny_model: Path, kind: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(0, 256, (40,), generator=generator).tolist()
    prompts = [
        (shared if i % 3 == 0 else [])
        + torch.randint(0, 256, (3 + 7 * i % 50,), generator=generator).tolist()
        for i in range(32)
    ]
    base = generate(tiny_model, prompts, threads=1, **kind)
    assert sorted(base) == list(range(32)) and all(len(bits) == 6 for bits in base.values())
    variants = {
        "two threads": generate(tiny_model, prompts, threads=2, **kind),
        "chunks of 7": generate(tiny_model, prompts, **kind, max_extend_tokens=7),
        "pages of 16": generate(tiny_model, prompts, **kind, page_size=16),
        "no cache": generate(tiny_model, prompts, **kind, cache_type="naive"),
    }
    for name, found in variants.items():
        for uid, bits in base.items():
            same = [torch.equal(one, other) for one, other in zip(bits, found[uid], strict=True)]
            assert all(same), (name, uid, same)
    for uid in (0, 5, 31):
        alone = generate(tiny_model, [prompts[uid]], **kind)[0]
        assert all(torch.equal(one, other) for one, other in zip(base[uid], alone, strict=True))
