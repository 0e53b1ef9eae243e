"""Experts that stay packed: from quantised files, from floats, and how they are given back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.core import SamplingParams
from minisgl.kernel import native
from minisgl.llm import LLM
from minisgl.models import (
    check_weights,
    create_model,
    load_model_config,
    load_model_weights,
    open_source,
    pack_floats,
    pack_stored,
)
from minisgl.models.packing import loaded_bytes
from minisgl.models.sources import SourceTensor
from minisgl.params import ModelLoadError
from minisgl.quant import ExpertWeights, StackedWeight, Weight
from minisgl.quant.packed import PackedWeight

from tests.llm.test_against_transformers import collect_logits
from tests.models.as_gguf import BYTE_VOCABULARY, KindOf, write_as_gguf
from tests.models.by_hand import ByHand
from tests.models.test_against_transformers import CASES, IDS, MOE, make_reference
from tests.resident import resident_bytes

pytestmark = pytest.mark.skipif(not native.available(), reason="built without native kernels")

Q = gguf.GGMLQuantizationType
NUM_EXPERTS = 6
WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
WIDE |= {"num_experts_per_tok": NUM_EXPERTS}  # no choice between two that are nearly equal
WIDE |= {"head_dim": 64, "vocab_size": BYTE_VOCABULARY, "norm_topk_prob": True}
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE whose matrices are wide enough for K-quants; experts one by one."""
    folder = tmp_path_factory.mktemp("moe")
    make_reference("qwen3_moe", {**MOE, **WIDE}, folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The same in transformers, which stacks the experts."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def as_stacked(folder: Path, reference: Any, to: Path) -> Path:
    """The model of `folder` with each layer's experts as one tensor."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = {name: weight.contiguous() for name, weight in reference.state_dict().items()}
    assert stored[f"{EXPERTS}.gate_up_proj"].shape == (NUM_EXPERTS, 512, 256)
    save_file(stored, to / "model.safetensors")
    return to


def load(path: Path, pack: Any, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        model = create_model(load_model_config(path))
    load_model_weights(model, path, device="cpu", dtype=dtype, pack=pack)
    return model


def experts_of(model: Any, name: str) -> list[Any]:
    """The weights of the experts of layer 1."""
    weights = model.state_dict()[f"{EXPERTS}.{name}"]
    assert isinstance(weights, ExpertWeights) and len(weights) == NUM_EXPERTS
    return list(weights.experts)


def check_logits(path: Path, packed: Any) -> None:
    """Near those of the same file as floats."""
    by_hand = ByHand(path)
    expected = by_hand.logits(IDS)
    by_hand.model = packed
    assert (by_hand.logits(IDS) - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "packed_format"),
    [(Q.Q4_K, "q4m"), (Q.Q6_K, "q6"), (Q.Q4_0, "q4"), (Q.Q5_1, "q5m"), (Q.Q8_0, "q8")],
)
def test_experts_of_a_quantised_file_stay_packed(
    kind: Any, packed_format: str, reference: Any, tmp_path: Path
) -> None:
    path = write_as_gguf(reference, tmp_path / "model.gguf", kind)
    model = load(path, pack_stored)
    for name, shape in (("gate_up_proj", (512, 256)), ("down_proj", (256, 256))):
        assert model.state_dict()[f"{EXPERTS}.{name}"].shape == (NUM_EXPERTS, *shape)
        for expert in experts_of(model, name):
            assert isinstance(expert, PackedWeight)
            assert (expert.format, expert.shape) == (packed_format, shape)
    stored = sum(tensor.nbytes for tensor in open_source(path).tensors().values())
    assert sum(weight.nbytes for weight in model.state_dict().values()) < 1.2 * stored
    check_logits(path, model)


def test_an_expert_of_two_formats_is_a_stack_and_floats_beside_it_stay_floats(
    reference: Any, tmp_path: Path
) -> None:
    def kind(name: str) -> Any:
        mixed = {"ffn_gate_exps": Q.Q4_K, "ffn_up_exps": Q.Q6_K, "ffn_down_exps": Q.BF16}
        return next((mixed[part] for part in mixed if part in name), None)

    path = write_as_gguf(reference, tmp_path / "model.gguf", kind)
    model = load(path, pack_stored, torch.bfloat16)
    for index, expert in enumerate(experts_of(model, "gate_up_proj")):
        assert isinstance(expert, StackedWeight)
        assert [part.format for part in expert.parts] == ["q4m", "q6"]  # gate over up
        stored = open_source(path).tensors()
        gate, up = (stored[f"{EXPERTS}.{index}.{part}_proj.weight"] for part in ("gate", "up"))
        expected = torch.cat([gate.tensor(), up.tensor()])
        got = expert.rows(torch.arange(512))
        assert (got - expected).abs().max() < 2e-3 * expected.abs().max()
    down = model.state_dict()[f"{EXPERTS}.down_proj"]
    assert isinstance(down, torch.Tensor) and down.dtype is torch.bfloat16
    check_logits(path, model)


@pytest.mark.parametrize(("bits", "packed_format"), [(4, "q4m"), (8, "q8")])
def test_float_experts_are_packed_on_request_however_they_are_stored(
    bits: int, packed_format: str, folder: Path, reference: Any, tmp_path: Path
) -> None:
    stacked = as_stacked(folder, reference, tmp_path / "stacked")
    models = [load(path, pack_floats(bits)) for path in (folder, stacked)]
    for name in ("gate_up_proj", "down_proj"):
        floats = reference.state_dict()[f"{EXPERTS}.{name}"]
        for expected, one, other in zip(floats, *(experts_of(model, name) for model in models)):
            assert one.format == other.format == packed_format
            assert torch.equal(one.dequantize(), other.dequantize())
            step = (expected.max() - expected.min()) / (2**bits - 2)
            assert (one.dequantize() - expected).abs().max() < step
    if bits == 8:
        check_logits(stacked, models[1])


def test_mixtral_of_floats_is_packed_too(tmp_path: Path) -> None:
    model_type, changes = CASES["mixtral"]
    make_reference(model_type, {**changes, "num_experts_per_tok": 4}, tmp_path)
    model = load(tmp_path, pack_floats(8))
    weights = model.state_dict()[f"{EXPERTS}.gate_up_proj"]
    assert isinstance(weights, ExpertWeights) and weights.shape == (4, 160, 48)
    check_logits(tmp_path, model)


def test_one_expert_that_cannot_be_packed_makes_floats_of_all(
    reference: Any, tmp_path: Path
) -> None:
    path = write_as_gguf(reference, tmp_path / "model.gguf", Q.Q8_0)
    asked: list[str] = []

    def pack(name: str, parts: Sequence[SourceTensor]) -> Weight | None:
        asked.extend(part.name for part in parts if name == f"{EXPERTS}.gate_up_proj")
        refused = any(part.name == f"{EXPERTS}.3.up_proj.weight" for part in parts)
        return None if refused else pack_stored(name, parts)

    model = load(path, pack)
    assert asked == [
        f"{EXPERTS}.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up")
    ]
    assert torch.equal(
        model.state_dict()[f"{EXPERTS}.gate_up_proj"],
        load(path, None).state_dict()[f"{EXPERTS}.gate_up_proj"],
    )
    assert len(experts_of(model, "down_proj")) == NUM_EXPERTS
    check_logits(path, model)


def held_by_expert(path: Path, file: Path, pack: Any) -> list[int]:
    """Bytes of the mapped `file` in memory when an expert has just been packed."""
    held: list[int] = []

    def watch(name: str, parts: Sequence[SourceTensor]) -> Weight | None:
        packed: Weight | None = pack(name, parts)
        if ".experts" in name:
            held.append(resident_bytes(file))
        return packed

    load(path, watch)
    return held


def test_pages_go_back_expert_by_expert(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_experts": 16}
    folder = tmp_path / "floats"
    reference = make_reference("qwen3_moe", {**MOE, **sizes, "num_hidden_layers": 1}, folder)
    floats = folder / "model.safetensors"
    save_file({name: weight.half() for name, weight in reference.state_dict().items()}, floats)
    quantised = write_as_gguf(reference, tmp_path / "model.gguf", Q.Q8_0)
    assert min(file.stat().st_size for file in (quantised, floats)) > 26_000_000
    for held in (
        held_by_expert(quantised, quantised, pack_stored),
        held_by_expert(folder, floats, pack_floats(8)),
    ):
        assert len(held) == 2 * 16
        assert max(held) <= 4 << 21  # one expert's gate and up, and the huge pages they touch


def kinds_of(name: str) -> Any:
    """As "Q4_K_M" mixes them, and a layer whose `down` no kernel multiplies packed."""
    if "ffn_gate_inp" in name:
        return None
    if "ffn_down_exps" in name:
        return Q.TQ2_0 if name.startswith("blk.0.") else Q.Q6_K
    return Q.Q6_K if name.startswith(("output", "token_embd")) else Q.Q4_K


@pytest.mark.parametrize("kind", [kinds_of, None], ids=["mixed", "floats"])
def test_what_a_load_takes_is_known_beforehand(
    kind: KindOf | None, folder: Path, reference: Any, tmp_path: Path
) -> None:
    path = write_as_gguf(reference, tmp_path / "m.gguf", kind) if kind else folder
    with torch.device("meta"):
        slots = check_weights(create_model(load_model_config(path)), path)
    packs = {"none": None, "stored": pack_stored, "q8": pack_floats(8), "q4": pack_floats(4)}
    for dtype in (torch.float32, torch.bfloat16):
        for quant, pack in packs.items():
            weights = load(path, pack, dtype).state_dict().values()
            found = sum(loaded_bytes(slot, dtype, quant) for slot in slots)
            assert found == sum(weight.nbytes for weight in weights), (dtype, quant)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q8_0])
def test_a_request_has_the_same_bits_alone_and_among_others(
    kind: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference.config, "num_experts_per_tok", 2)
    path = write_as_gguf(reference, tmp_path / "model.gguf", kind)
    generator = torch.Generator().manual_seed(3)
    watched, *others = torch.randint(0, 256, (12, 40), generator=generator).tolist()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    runs: list[tuple[list[list[int]], dict[str, Any]]] = [
        ([watched], {}),
        ([watched, *(ids[: 1 + 3 * i] for i, ids in enumerate(others))], {}),
        ([watched, *others], {"max_extend_tokens": 7}),
    ]
    found = []
    for prompts, fields in runs:
        llm = LLM(str(path), dtype="auto", num_page_override=2048, num_threads=2, **fields)
        try:
            logits = collect_logits(llm)
            llm.generate(prompts, params)
            found.append(torch.stack(logits[min(logits)]))
        finally:
            llm.shutdown()
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def save_changed(folder: Path, to: Path, change: Any) -> Path:
    """The model of `folder` with its stored tensors changed in place."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors")
    return to


WRONG_EXPERTS: dict[str, tuple[Any, str]] = {
    "one is missing": (
        lambda stored: stored.pop(f"{EXPERTS}.3.up_proj.weight"),
        f"missing {EXPERTS}.3.up_proj.weight",
    ),
    "rows that add up": (
        lambda stored: stored.update({
            f"{EXPERTS}.3.gate_proj.weight": torch.zeros(255, 256),
            f"{EXPERTS}.3.up_proj.weight": torch.zeros(257, 256),
        }),
        rf"{EXPERTS}.3.gate_proj.weight must be \(256, 256\), the file has \(255, 256\)",
    ),
    "one too many": (
        lambda stored: stored.update({
            f"{EXPERTS}.{NUM_EXPERTS}.{name}_proj.weight": torch.zeros(256, 256)
            for name in ("gate", "up", "down")
        }),
        "has 6 experts, the file 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_what_is_wrong_with_experts_is_named(case: str, folder: Path, tmp_path: Path) -> None:
    change, fault = WRONG_EXPERTS[case]
    path = save_changed(folder, tmp_path / "wrong", change)
    for pack in (None, pack_stored):
        with pytest.raises(ModelLoadError, match=fault):
            load(path, pack)
