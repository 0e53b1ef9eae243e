"""Loading: what comes out, and what a damaged or foreign folder is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minisgl.kernel import native
from minisgl.models import (
    create_model,
    init_dummy_weights,
    load_model_config,
    load_model_weights,
    load_weight,
    pack_floats,
    shard_tensor,
)
from minisgl.params import ModelLoadError
from minisgl.quant import FloatWeight

from tests.llm.tiny import CONFIG, random_weights, write_model
from tests.models.by_hand import ByHand
from tests.resident import resident_bytes

needs_native = pytest.mark.skipif(not native.available(), reason="built without native kernels")
IDS = [5, 9, 200, 31, 7, 7, 64]


def load(path: Path, **options: Any) -> Any:
    with torch.device("meta"):
        model = create_model(load_model_config(path))
    load_model_weights(model, path, device="cpu", dtype=torch.float32, **options)
    return model


def test_q_k_v_and_gate_up_are_merged_in_this_order(tmp_path: Path) -> None:
    stored = random_weights(CONFIG)
    got = dict(load_weight(write_model(tmp_path), "cpu"))
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    qkv = torch.cat([stored[f"{attn}.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([stored[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(got[f"{attn}.qkv_proj.weight"], qkv)
    assert torch.equal(got[f"{mlp}.gate_up_proj.weight"], gate_up)
    assert torch.equal(got["lm_head.weight"], stored["lm_head.weight"])


def test_a_stored_tied_head_is_yielded_and_ignored_by_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=True)
    weights = random_weights({**CONFIG, "tie_word_embeddings": True})
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors")
    names = [name for name, _ in load_weight(folder, "cpu")]
    assert "lm_head.weight" in names and not any("rotary" in name for name in names)
    model = load(folder)
    assert "lm_head.weight" not in model.state_dict()
    model.load_state_dict(dict(load_weight(folder, "cpu")))


def test_a_tied_tensor_may_be_stored_under_either_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=True)
    expected = load(folder).state_dict()
    weights = random_weights({**CONFIG, "tie_word_embeddings": True})
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors")
    got = load(folder).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    write_model(tmp_path / "untied")
    save_file(weights, tmp_path / "untied" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing model\.embed_tokens\.weight"):
        load(tmp_path / "untied")


def test_shards_are_read_by_the_index(tmp_path: Path) -> None:
    expected = dict(load_weight(write_model(tmp_path / "one"), "cpu"))
    folder = write_model(tmp_path / "two")
    (folder / "model.safetensors").unlink()
    weights = sorted(random_weights(CONFIG).items())
    parts = {"a.safetensors": dict(weights[::2]), "b.safetensors": dict(weights[1::2])}
    for file, part in parts.items():
        save_file(part, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    got = dict(load_weight(folder, "cpu"))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks b\.safetensors"):
        load(folder)


def test_an_index_may_not_point_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="no file name"):
        load(folder)


def test_progress_ends_at_the_total_and_pack_may_replace_matrices(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    packed: list[str] = []

    def pack(name: str, parts: list[Any]) -> FloatWeight | None:
        if "gate_up" not in name:
            return None
        packed.append(name)
        return FloatWeight(torch.cat([part.tensor() for part in parts]))

    folder = write_model(tmp_path)
    model = load(folder, progress=lambda done, total: seen.append((done, total)), pack=pack)
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    assert packed == [f"model.layers.{i}.mlp.gate_up_proj.weight" for i in range(2)]
    assert isinstance(model.state_dict()[packed[0]], FloatWeight)


@pytest.mark.parametrize(
    ("dtype", "pack"),
    [
        (torch.float16, None),
        (torch.float32, None),
        (torch.bfloat16, None),
        pytest.param(torch.float16, pack_floats(8), marks=needs_native),
    ],
    ids=["mapped", "float32", "bfloat16", "packed"],
)
def test_pages_of_the_file_go_back_once_a_weight_was_copied_from_them(
    tmp_path: Path, dtype: torch.dtype, pack: Any
) -> None:
    changes = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 128}
    folder = write_model(tmp_path, **changes)
    weights = {k: v.half() for k, v in random_weights({**CONFIG, **changes}).items()}
    file = folder / "model.safetensors"
    save_file(weights, file)
    with torch.device("meta"):
        model = create_model(load_model_config(folder))
    sizes: list[int] = []
    load_model_weights(
        model,
        folder,
        device="cpu",
        dtype=dtype,
        progress=lambda *_: sizes.append(resident_bytes(file)),
        pack=pack,
    )
    assert file.stat().st_size > 12_000_000
    assert max(sizes) == 0
    kept = [w for w in model.state_dict().values() if getattr(w, "dtype", None) is torch.float16]
    for weight in kept:
        weight.view(torch.uint8).sum()
    in_place = sum(w.nbytes for n, w in weights.items() if "o_proj" in n or "down" in n)
    in_place += 2 * weights["lm_head.weight"].nbytes
    expected = in_place if dtype is torch.float16 and pack is None else 0
    assert expected <= resident_bytes(file) < expected + (4 << 20)


def test_one_file_of_that_name_goes_before_the_same_weights_in_another_layout(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path)
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(ModelLoadError, match=r"has no place for tok_embeddings\.weight"):
        load(folder)


def test_weights_that_are_no_floats_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    weights = random_weights(CONFIG)
    save_file({**weights, "model.norm.weight": torch.ones(64).char()}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is stored as I8"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model.norm.weight": None}, r"missing model\.norm\.weight"),
        (
            {"model.layers.1.self_attn.k_proj.weight": None},
            "missing model.layers.1.self_attn.k_proj.weight",
        ),
        ({"model.layers.9.mlp.down_proj.weight": torch.ones(64, 96)}, "has no place for model"),
        ({"model.layers.0.mlp.down_proj.weight": torch.ones(64, 95)}, r"must be \(64, 96\)"),
        ({"model.layers.0.self_attn.v_proj.weight": torch.ones(16, 64)}, r"must be \(128, 64\)"),
        (
            {
                "model.layers.0.mlp.gate_proj.weight": torch.ones(95, 64),
                "model.layers.0.mlp.up_proj.weight": torch.ones(97, 64),
            },
            r"must be \(192, 64\), the file has .*gate_proj.weight \(95, 64\)",
        ),
    ],
)
def test_wrong_weights_are_one_typed_error(
    tmp_path: Path, change: dict[str, torch.Tensor | None], problem: str
) -> None:
    folder = write_model(tmp_path)
    weights = {**random_weights(CONFIG), **change}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=problem):
        load(folder)


@pytest.mark.parametrize(
    "offsets",
    [[0, 256], [1 << 40, (1 << 40) + 256], [-256, 0], [256, 0], [2**63, 2**63], [0.5, 256.5]],
    ids=["overlapping", "past the end", "negative", "backwards", "huge", "no integers"],
)
def test_offsets_that_overlap_or_leave_the_file_are_typed_errors(
    tmp_path: Path, offsets: list[float]
) -> None:
    folder = write_model(tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header["model.norm.weight"]["data_offsets"] != [0, 256]
    header["model.norm.weight"]["data_offsets"] = offsets
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(folder)


def test_damaged_pickled_and_empty_folders_are_typed_errors(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(folder)
    file.write_bytes((1 << 40).to_bytes(8, "little") + content[8:])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        load(folder)


def test_dummy_weights_fill_every_slot_and_give_finite_logits(tmp_path: Path) -> None:
    by_hand = ByHand(write_model(tmp_path))
    init_dummy_weights(by_hand.model, device="cpu", dtype=torch.bfloat16)
    assert {w.dtype for w in by_hand.model.state_dict().values()} == {torch.bfloat16}
    assert by_hand.logits(IDS).isfinite().all()


def test_shard_tensor_splits_each_kind_along_its_own_dimension() -> None:
    w = torch.arange(48.0).view(12, 4)
    attn = "model.layers.0.self_attn"
    for name in (f"{attn}.q_proj.weight", "m.mlp.gate_proj.weight", "m.mlp.up_proj.weight"):
        assert torch.equal(shard_tensor(name, w, 1, 2), w[6:])
    for name in (f"{attn}.o_proj.weight", "m.mlp.down_proj.weight"):
        assert torch.equal(shard_tensor(name, w, 1, 2), w[:, 2:])
    assert torch.equal(shard_tensor(f"{attn}.q_proj.bias", w[:, 0], 1, 2), w[6:, 0])
    assert torch.equal(shard_tensor(f"{attn}.o_proj.bias", w[:, 0], 1, 2), w[:, 0])
    assert torch.equal(shard_tensor("model.norm.weight", w[:, 0], 1, 2), w[:, 0])
    assert torch.equal(shard_tensor("m.mlp.gate.weight", w, 1, 2), w)


def test_shard_tensor_copies_kv_heads_when_there_are_fewer_than_ranks() -> None:
    w = torch.arange(48.0).view(12, 4)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(shard_tensor(name, w, 1, 2, num_kv_heads=2), w[6:])
    assert torch.equal(shard_tensor(name, w, 1, 4, num_kv_heads=2), w[:6])
    assert torch.equal(shard_tensor(name, w, 2, 4, num_kv_heads=2), w[6:])


def test_shard_tensor_gives_the_last_rank_what_is_left_of_the_vocabulary() -> None:
    w = torch.arange(10.0).view(10, 1)
    shards = [shard_tensor("model.embed_tokens.weight", w, rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(shards), w)


def write_gguf(path: Path, arch: str, config: dict[str, Any], **more: Any) -> None:
    """A GGUF file of random weights as llama.cpp's converter writes it; F16 and Q8_0 matrices."""
    writer = gguf.GGUFWriter(path, arch)
    dim, heads, kv_heads = (
        config["head_dim"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    for name, weight in random_weights(config).items():
        stem = name.removesuffix(".weight")
        if stem in top:
            gguf_name = top[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            gguf_name = f"blk.{layer}.{names[part]}"
        array = weight.numpy()
        if arch == "llama" and part_is_rotated(stem):
            count = heads if "q_proj" in stem else kv_heads
            array = array.reshape(count, 2, dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2 and "down" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(
                f"{gguf_name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(f"{gguf_name}.weight", array)
    for name, array in more.items():
        writer.add_tensor(name.replace("__", "."), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def part_is_rotated(stem: str) -> bool:
    return stem.endswith(("q_proj", "k_proj"))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_same_model_as_the_folder(tmp_path: Path, arch: str) -> None:
    config = {**CONFIG, "model_type": arch}
    folder = write_model(tmp_path / "hf", model_type=arch)
    if arch == "qwen2":
        weights = random_weights(config)
        for layer in range(2):
            for name, size in (("q", 64), ("k", 32), ("v", 32)):
                weights[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(size)
        save_file(weights, folder / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", arch, config)
    expected, got = ByHand(folder), ByHand(tmp_path / "model.gguf")
    assert got.config.tie_word_embeddings is False
    # Only the down projection went through 8 bits.
    assert (got.logits(IDS) - expected.logits(IDS)).abs().max().item() < 0.05


def test_rope_factors_of_a_gguf_file_become_part_of_the_config(tmp_path: Path) -> None:
    factors = np.linspace(1, 4, 8, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", "llama", CONFIG, rope_freqs__weight=factors)
    config = load_model_config(tmp_path / "model.gguf")
    assert config.rotary_config.scaling is not None
    assert config.rotary_config.scaling["factors"] == factors.tolist()
    assert ByHand(tmp_path / "model.gguf").logits(IDS).isfinite().all()


def test_a_truncated_gguf_file_is_a_typed_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", CONFIG)
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:-1000])
    with pytest.raises(ModelLoadError):
        load(tmp_path / "model.gguf")
