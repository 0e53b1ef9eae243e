"""`minisgl inspect`: the page tells the truth about tiny models, and survives odd ones."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from minisgl.cli import main
from minisgl.engine import human
from minisgl.kernel import native
from minisgl.llm import LLM

from tests.llm.tiny import write_model, write_tokenizer
from tests.models.as_gguf import BYTE_VOCABULARY, write_as_gguf
from tests.models.test_against_transformers import MOE, make_reference


def page(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What is printed, spaces as one."""
    assert main(["inspect", *argv]) == code
    return " ".join(capsys.readouterr().out.split())


def test_the_page_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "tiny", tie_word_embeddings=True)
    template = "{{ messages }}{% if enable_thinking and tools %}x{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    advice = {"do_sample": True, "temperature": 0.6, "eos_token_id": [257, 258]}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    found = page(capsys, str(folder))
    num_weights = 260 * 64 + 64 + 2 * (2 * 64 + 4 * 64 * 16 * 3 + 3 * 64 * 96)
    for fact in (
        "name tiny Hugging Face folder",
        "family llama",
        "4 heads of 16 over 2 of keys and values",
        "260 tokens, the head is the embedding",
        "context 256 tokens",
        f"float32 {num_weights / 1000:.1f} k parameters 32.00 bits each "
        f"{num_weights * 4 / 1000:.1f} kB 20 tensors",
        "BOS <bos> (256)",
        "ends at <eos> (257), <end> (258)",
        f"{len(template)} characters, understands enable_thinking, tools",
        "advised sampling temperature 0.6",
        "float16 256 B per token 65.5 kB for the whole context",
        "int16 288 B per token 73.7 kB for the whole context",
        "int8 160 B per token 41.0 kB for the whole context",
        f"--dtype bfloat16 {(num_weights + 5 * 64) * 2 / 1000:.1f} kB",  # norms stay float32
    ):
        assert fact in found, fact


def test_the_page_of_the_default_model(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = page(capsys)
    for fact in (
        f"GGUF file {default_model_path}",
        "30 of width 576",
        "Q4_1 106.2 M parameters 5.00 bits each 66.4 MB 210 tensors",
        "all 134.5 M parameters",
        "EOS <|im_end|> (2)",
        "float32 46.1 kB per token",
    ):
        assert fact in found, fact


@pytest.mark.skipif(not native.available(), reason="built without native kernels")
@pytest.mark.parametrize("is_gguf", [True, False], ids=["gguf", "folder"])
def test_a_mixture_of_experts_takes_what_the_page_says(
    is_gguf: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**MOE, "moe_intermediate_size": 64, "vocab_size": BYTE_VOCABULARY}
    reference = make_reference("qwen3_moe", {**changes, "hidden_size": 64}, tmp_path / "moe")
    path = tmp_path / "moe"
    ways = {"--quant q8": {"quant": "q8"}, "--quant q4": {"quant": "q4"}}
    write_tokenizer(path)
    if is_gguf:
        path = write_as_gguf(reference, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q4_0)
        ways = {"--dtype bfloat16 --quant none": {"dtype": "bfloat16", "quant": "none"}}
    found = page(capsys, str(path))
    for flags, fields in {"as it is": {}, "--dtype float32": {"dtype": "float32"}, **ways}.items():
        llm = LLM(str(path), num_page_override=64, **{"dtype": "auto", **fields})
        size = human(llm.engine.memory_report.weight_bytes)
        llm.shutdown()
        assert f"{flags} {size} " in found, (flags, size)


def test_a_model_without_a_tokenizer_or_with_a_broken_template_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "odd")
    (folder / "chat_template.jinja").write_text("{% for %} [red]\x1b[31m")
    found = page(capsys, str(folder))
    assert "chat template is broken" in found and "\x1b[31m" not in found
    (folder / "tokenizer.json").unlink()
    assert "cannot be used" in page(capsys, str(folder), code=1)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_beside_the_tokenizer_that_is_damaged_is_a_row(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "odd")
    (folder / name).write_text("{")
    found = page(capsys, str(folder), code=1)
    assert "cannot be used: " in found or "cannot be used " in found
    assert name in found and "whole contexts" in found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_hidden_layers": 3}, "missing model.layers.2.self_attn.qkv_proj.weight"),
        ({"num_hidden_layers": 1}, "the model has no place for model.layers.1."),
        ({"intermediate_size": 95}, "gate_up_proj.weight must be (190, 64), the file has"),
        ({"hidden_size": 32, "head_dim": 16}, "must be"),
    ],
)
def test_tensors_that_are_not_the_models_are_told_as_when_it_is_loaded(
    change: dict[str, int], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    found = page(capsys, str(folder), code=1)
    assert "cannot be loaded: " in found and fault.replace(" ", "") in found.replace(" ", "")
    assert "whole contexts" not in found
    assert main(["generate", "-q", "--model", str(folder), "a"]) == 1
    told = capsys.readouterr().err.removeprefix("minisgl: ").strip()
    assert "".join(told.split()) in "".join(found.split())


def test_a_model_that_does_not_fit_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.engine.device.free_memory", lambda device: 200_000)
    found = page(capsys, str(write_model(tmp_path / "big")))
    assert "--dtype float32 380.2 kB does not fit" in found
