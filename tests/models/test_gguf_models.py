"""Models from GGUF files: every architecture, type of tensor and way of splitting a file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minisgl.models import create_model, load_model_weights, open_source, pack_stored
from minisgl.models.metadata import gguf_as_hf
from minisgl.params import MinisglError, ModelLoadError, UnsupportedModelError
from minisgl.tokenizer import load_tokenizer
from minisgl.utils.gguf import GGUFFile
from minisgl.utils.model_files import resolve_model

from tests.models.as_gguf import write_as_gguf
from tests.models.by_hand import ByHand
from tests.models.test_against_transformers import (
    CASES,
    EXPERTS,
    IDS,
    MOE,
    assert_close,
    make_reference,
    reference_logits,
)

GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
GEMMA |= {"num_hidden_layers": 7, "rope_local_base_freq": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "short_factor": [1.0, 1.0, 1.1, 1.1, 1.2, 1.2],
}
PHI: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: CASES[name]
    for name in (
        "llama",
        "llama tied",
        "llama with biases",
        "llama no groups",
        "llama linear rope",
        "llama yarn rope",
        "llama3 rope",
        "mistral windowed",
        "qwen2",
        "qwen3",
        "qwen3 tied biased",
    )
} | {
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "mixtral": ("mixtral", EXPERTS),
    "mixtral apart": ("mixtral", EXPERTS),
    "gemma3": ("gemma3_text", GEMMA),
    "phi3": ("phi3", PHI),
    "phi3 windowed": ("phi3", {**PHI, "sliding_window": 6}),
    "phi3 longrope": (
        "phi3",
        {**PHI, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
    ),
}
Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("case", GGUF_CASES)
def test_logits_agree_with_transformers_through_a_gguf_file(case: str, tmp_path: Path) -> None:
    model_type, changes = GGUF_CASES[case]
    reference = make_reference(model_type, changes, tmp_path / "hf")
    path = write_as_gguf(reference, tmp_path / "model.gguf", experts_apart="apart" in case)
    by_hand = ByHand(path)
    assert by_hand.config.model_type == model_type
    expected = reference_logits(reference, IDS)
    assert_close(by_hand.logits(IDS), expected)
    assert_close(by_hand.logits(IDS, [1, 13, 1, 1, 24], row=1), expected)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "mixtral", "gemma3", "phi3"])
def test_every_tensor_gets_the_name_and_values_that_hugging_face_stores(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = GGUF_CASES[case]
    reference = make_reference(model_type, changes, tmp_path / "hf")
    source = open_source(write_as_gguf(reference, tmp_path / "model.gguf"))
    got = {name: tensor.tensor() for name, tensor in source.tensors().items()}
    offset = 1.0 if model_type == "gemma3_text" else 0.0
    for name, weight in reference.state_dict().items():
        if name == "lm_head.weight" and reference.config.tie_word_embeddings:
            continue
        parts = [got.pop(name)] if name in got else []
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            gates, ups = (
                [got.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(len(weight))]
                for part in ("gate", "up")
            )
            parts = [torch.stack([torch.cat(pair) for pair in zip(gates, ups)])]
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            parts = [
                torch.stack([got.pop(f"{stem}.{i}.down_proj.weight") for i in range(len(weight))])
            ]
        added = offset if name.endswith("norm.weight") else 0.0
        assert len(parts) == 1 and torch.equal(parts[0], weight + added), name
    assert not got


def test_the_config_of_a_gguf_gemma_3_is_that_of_its_folder(tmp_path: Path) -> None:
    reference = make_reference(*GGUF_CASES["gemma3"], tmp_path / "hf")
    file = GGUFFile(write_as_gguf(reference, tmp_path / "model.gguf"))
    got, config = gguf_as_hf(file.metadata, file.tensors, {}), reference.config
    for key in ("layer_types", "sliding_window", "query_pre_attn_scalar", "head_dim"):
        assert got[key] == getattr(config, key), key
    assert got["rope_theta"] == config.rope_parameters["full_attention"]["rope_theta"]
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    assert (got["rope_local_base_freq"], got["norm_weight_offset"]) == (local, 0.0)
    assert got["tie_word_embeddings"] is True


def test_the_queries_of_gemma_3_27b_have_their_own_scale() -> None:
    numbers = {"block_count": 62, "embedding_length": 5376, "attention.head_count": 32}
    numbers |= {"attention.key_length": 128, "attention.sliding_window": 1024}
    metadata = {"general.architecture": "gemma3"}
    metadata |= {f"gemma3.{key}": value for key, value in numbers.items()}
    assert gguf_as_hf(metadata, None, {})["query_pre_attn_scalar"] == 168
    smaller = gguf_as_hf({**metadata, "gemma3.block_count": 48}, None, {})
    assert smaller["query_pre_attn_scalar"] == 128
    pattern = np.array([True, False] * 24)
    metadata |= {"gemma3.block_count": 48, "gemma3.attention.sliding_window_pattern": pattern}
    kinds = gguf_as_hf(metadata, None, {})["layer_types"]
    assert kinds == ["sliding_attention", "full_attention"] * 24


def test_the_config_of_a_gguf_phi_3_is_that_of_its_folder(tmp_path: Path) -> None:
    reference = make_reference(*GGUF_CASES["phi3 longrope"], tmp_path / "hf")
    source: Any = open_source(write_as_gguf(reference, tmp_path / "model.gguf"))
    names = ("rope_factors_long", "rope_factors_short")
    factors = {n: source.file.tensors[f"{n}.weight"].data.view(np.float32) for n in names}
    listed = {name: values.tolist() for name, values in factors.items()}
    got = gguf_as_hf(source.file.metadata, source.file.tensors, listed)
    assert got["rope_scaling"]["rope_type"] == "longrope"
    assert got["rope_scaling"]["long_factor"] == LONGROPE["long_factor"]
    assert got["rope_scaling"]["short_factor"] == pytest.approx(LONGROPE["short_factor"])
    assert got["original_max_position_embeddings"] == 32
    assert not any("rope" in name for name in source.tensors())


def test_numbers_given_for_each_layer_count_if_they_are_one() -> None:
    metadata: dict[str, Any] = {"general.architecture": "llama"}
    metadata["llama.attention.head_count_kv"] = np.array([2, 2, 2])
    assert gguf_as_hf(metadata, None, {})["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModelError, match="values of another size"):
        gguf_as_hf({**metadata, "llama.attention.value_length": 7}, None, {})


@pytest.mark.parametrize("values", [[1.0], [1.0, float("nan")], [0.0, 1.0], [1.0, float("inf")]])
def test_rope_factors_that_do_not_fit_are_refused(values: list[float]) -> None:
    metadata = {"general.architecture": "llama", "llama.rope.dimension_count": 4}
    with pytest.raises(ModelLoadError, match="rope factors do not fit"):
        gguf_as_hf(metadata, None, {"rope_freqs": values})


def quantizable() -> list[gguf.GGMLQuantizationType]:
    """The types that the gguf package can also write."""
    found = []
    for kind in gguf.quants._type_traits:
        try:
            gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return sorted([*found, Q.F16], key=lambda kind: kind.name)


def test_models_of_every_type_that_can_be_written_run_packed_and_as_floats(
    tmp_path: Path,
) -> None:
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    reference = make_reference("llama", changes, tmp_path / "hf")
    kinds = quantizable()
    assert {Q.F16, Q.BF16, Q.Q4_0, Q.Q5_1, Q.Q8_0, Q.TQ2_0} <= set(kinds)
    for kind in kinds:
        path = write_as_gguf(reference, tmp_path / f"{kind.name}.gguf", kind)
        by_hand = ByHand(path)
        stored: Any = open_source(path)
        gate = stored.file.tensors["blk.0.ffn_gate.weight"]
        expected = gguf.quants.dequantize(gate.data.reshape(256, -1), kind)
        weight: Any = by_hand.model.state_dict()["model.layers.0.mlp.gate_up_proj.weight"]
        assert np.array_equal(weight[:256].numpy(), expected), kind
        logits = by_hand.logits(IDS)
        with torch.device("meta"):
            packed = create_model(by_hand.config)
        load_model_weights(packed, path, device="cpu", dtype=torch.float32, pack=pack_stored)
        by_hand.model = packed
        assert (by_hand.logits(IDS) - logits).abs().max() < 0.1 * logits.abs().max(), kind


def test_a_split_model_is_the_whole_one_by_the_name_of_any_part(tmp_path: Path) -> None:
    reference = make_reference(*GGUF_CASES["llama"], tmp_path / "hf")
    expected = reference_logits(reference, IDS)
    (tmp_path / "some").mkdir()
    first = write_as_gguf(reference, tmp_path / "some" / "model.gguf", parts=3)
    parts = sorted(first.parent.iterdir())
    assert [part.name[-20:] for part in parts] == [f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (first.parent, *parts):
        resolved = resolve_model(path)
        assert (resolved.path, resolved.name) == (first, "model")
        assert len(GGUFFile(path if path.is_file() else first).tensors) == 30
    assert_close(ByHand(parts[1]).logits(IDS), expected)
    moved = parts[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelLoadError, match="of a split model, but by its name"):
        GGUFFile(moved)
    with pytest.raises(ModelLoadError, match=r"00002-of-00003\.gguf cannot be read"):
        GGUFFile(first)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelLoadError, match="by its name part 1 of 3"):
        GGUFFile(first)


def test_a_damaged_model_is_one_typed_error_or_a_model(tmp_path: Path) -> None:
    reference = make_reference("llama", {"num_hidden_layers": 1}, tmp_path / "hf")
    path = write_as_gguf(reference, tmp_path / "model.gguf")
    content, rng = path.read_bytes(), random.Random(0)
    header = content.index(b"blk.0.ffn_down.weight") + 200
    refused = 0
    for i in range(300):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header)] = rng.choice([0, 1, 255, rng.randrange(256)])
        bad = tmp_path / f"{i}.gguf"
        bad.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
        try:
            source = open_source(bad)
            with torch.device("meta"):
                model = create_model(source.config())
            load_model_weights(model, bad, device="cpu", dtype=torch.float32)
        except MinisglError:
            refused += 1
        with pytest.raises(ModelLoadError):
            load_tokenizer(bad)
    assert refused > 200
