"""Bad input: one typed error that names the thing and the way out, before any work."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.params import InvalidRequestError, MinisglError, ModelLoadError, UnsupportedModelError

from tests.llm.conftest import MakeLLM
from tests.llm.tiny import VOCAB_SIZE, write_model

REFERENCE = ([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))


@pytest.fixture(scope="module")
def reference(llm: LLM) -> list[dict[str, Any]]:
    return llm.generate(*REFERENCE)


@pytest.fixture
def checked(llm: LLM, reference: list[dict[str, Any]]) -> Iterator[LLM]:
    """The LLM; no step may run in the test, and it must be usable after it."""
    steps: list[Any] = []
    llm.step_listeners.append(steps.append)
    yield llm
    llm.step_listeners.clear()
    assert steps == []
    assert llm.is_idle and llm.table_manager.available_size == 16
    assert llm.generate(*REFERENCE) == reference


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["prompt 1", "empty"]),
        ("", ["prompt 1", "empty"]),
        ([5, VOCAB_SIZE], ["prompt 1", "260", "vocabulary"]),
        ([-1, 5], ["prompt 1", "-1", "vocabulary"]),
        ([2**31], ["prompt 1", "32 bits"]),
        ([2**70], ["prompt 1", "token ids"]),
        ([1] * 256, ["prompt 1", "256 tokens", "--max-seq-len-override"]),
        ([1] * 10_000, ["prompt 1", "10000 tokens", "shorten"]),
        ("x" * 100_000, ["prompt 1", "100000 tokens", "shorten"]),
        ([1.5], ["prompt 1", "token ids"]),
        ([True], ["prompt 1", "token ids"]),
        ([None], ["prompt 1", "token ids"]),
        (["a"], ["prompt 1", "token ids"]),
        ([[1]], ["prompt 1", "token ids"]),
        ([[1], [2, 3]], ["prompt 1", "token ids"]),
        (5, ["prompt 1", "token ids"]),
        (None, ["prompt 1", "token ids"]),
        (b"bytes", ["prompt 1", "token ids"]),
        ({"a": 1}, ["prompt 1", "token ids"]),
        (torch.zeros(3), ["prompt 1", "token ids"]),
        (torch.zeros(2, 2, dtype=torch.int32), ["prompt 1", "token ids"]),
        (torch.zeros(3, device="meta", dtype=torch.int32), ["prompt 1", "token ids"]),
        ("a lone surrogate \ud800", ["prompt 1"]),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_prompt_that_cannot_run_is_refused_before_any_work(
    checked: LLM, prompt: Any, words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked.generate([[5, 6], prompt])
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 400


@pytest.mark.parametrize("prompts", [5, None, {1, 2}, {"a": 1}, b"ab", 1.5, object()])
def test_prompts_must_be_a_list(checked: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts must be a list"):
        checked.generate(prompts)


def test_one_flat_list_of_token_ids_is_explained(checked: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="flat list of integers"):
        checked.generate([1, 2, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 5}, [None], [{}], 1.5, object()])
def test_sampling_params_must_be_sampling_params(checked: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        checked.generate([[5, 6]], params)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", None),
    ("max_tokens", 2.0),
    ("max_tokens", 2**63),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", None),
    ("min_p", -0.5),
    ("min_p", 2),
    ("seed", "x"),
    ("seed", 2**64),
    ("stop", "word"),
    ("stop", [""]),
    ("stop", [5]),
    ("stop", None),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", 5),
    ("frequency_penalty", 3),
    ("presence_penalty", "much"),
    ("repetition_penalty", 0),
    ("logit_bias", {VOCAB_SIZE: 1}),
    ("logit_bias", {1: 1000}),
    ("logit_bias", [1]),
    ("ignore_eos", "yes"),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda value: repr(value)[:20])
def test_a_parameter_without_a_meaning_is_named(checked: LLM, name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(InvalidRequestError, match=name) as caught:
        checked.generate([[5, 6]], params)
    assert caught.value.param == name


SCALARS: list[Any] = [
    None, True, 0, -1, 5, 300, 2**31, 2**70, -(2**70), 0.5, float("nan"), float("inf"), "", "a",
    b"a", object(), np.int64(5), np.float32(0.5), torch.tensor(3), torch.tensor([1, 2]),
    np.arange(3), int, 1j, range(3), iter([1]), "\ud800",
]  # fmt: skip
FIELDS = [
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "logit_bias",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "max_tokens",
]  # fmt: skip


def odd_value(rnd: random.Random, depth: int = 2) -> Any:
    kind = rnd.randrange(6) if depth else 0
    if kind < 3:
        return rnd.choice(SCALARS)
    inner = [odd_value(rnd, depth - 1) for _ in range(rnd.randrange(3))]
    return {3: inner, 4: tuple(inner), 5: {rnd.randrange(-1, 300): value for value in inner}}[kind]


def odd_params(rnd: random.Random) -> SamplingParams:
    chosen = rnd.sample(FIELDS, rnd.choice([0, 1, 1, 2]))
    return SamplingParams(**{"max_tokens": 2, **{name: odd_value(rnd) for name in chosen}})


@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_is_passed_to_generate_gives_an_untyped_error(
    make_llm: MakeLLM, seed: int
) -> None:
    llm = make_llm(max_seq_len_override=8)  # so that nothing can take long
    reference = llm.generate(*REFERENCE)
    rnd = random.Random(seed)
    num_refused = 0
    for _ in range(100):
        prompts = rnd.choice([odd_value(rnd), [[5]], [odd_value(rnd), [6]]])
        params = odd_params(rnd) if rnd.random() < 0.7 else [odd_params(rnd), odd_value(rnd)]
        params = odd_value(rnd, depth=1) if rnd.random() < 0.1 else params
        try:
            results = llm.generate(prompts, params)
        except InvalidRequestError as error:
            assert len(str(error)) < 400
            num_refused += 1
        else:
            assert all(result["finish_reason"] in ("length", "stop") for result in results)
        assert llm.is_idle and llm.table_manager.available_size == 16
        assert llm.cache_manager.num_owned_pages == 0
    assert 30 < num_refused < 100
    assert llm.generate(*REFERENCE) == reference


# --- model folders and files ---


def break_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def break_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**60) + b"{}")


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="mamba99", architectures=["Mamba99ForCausalLM"])


def missing_tensor(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)


def wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=128)


def absurd_size(folder: Path) -> None:
    change_config(folder, hidden_size=-64)


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_weights, ["model.safetensors", "truncated or damaged, fetch it again"]),
        (break_header, ["model.safetensors"]),
        (empty_weights, ["model.safetensors", "truncated or damaged, fetch it again"]),
        (pickle_only, ["safetensors", "pickle"]),
        (no_weights, ["safetensors"]),
        (unknown_architecture, ["mamba99", "llama"]),
        (missing_tensor, ["/damaged: weights: missing", "layers.2", "not belong together"]),
        (wrong_shape, ["96", "/damaged: weights: ", "the copy is incomplete"]),
        (absurd_size, ["hidden_size"]),
        (broken_config, ["config.json", "JSON"]),
        (no_config, ["config.json"]),
        (no_tokenizer, ["put the model's tokenizer.json there", "in Python pass tokenizer_path="]),
        (broken_tokenizer, ["tokenizer.json"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_model_folder_is_one_error_that_names_it(
    tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    with pytest.raises(ModelLoadError) as caught:
        LLM(str(folder), dtype="float32", num_page_override=64)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert isinstance(caught.value, UnsupportedModelError) or damage is not unknown_architecture


@pytest.mark.parametrize("path", ["/no/such/folder", "no-such-file.gguf", "./nothing/here"])
def test_a_missing_model_is_named_with_what_can_be_passed(path: str) -> None:
    with pytest.raises(ModelLoadError, match="no model at") as caught:
        LLM(path)
    assert path in str(caught.value) and ".gguf" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"GGUF\x63\0\0\0" + b"\0" * 16, b"", b"GGML" * 9],
    ids=["header", "absurd-counts", "version", "empty", "other-magic"],
)
def test_a_broken_gguf_file_is_one_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        LLM(str(file))


@pytest.mark.parametrize("kept", [1000, 3_000_000, 50_000_000])
def test_a_truncated_gguf_file_is_one_error_that_names_it(
    default_model_path: Path, tmp_path: Path, kept: int
) -> None:
    file = tmp_path / "short.gguf"
    with default_model_path.open("rb") as source:
        file.write_bytes(source.read(kept))
    with pytest.raises(ModelLoadError, match=r"short\.gguf"):
        LLM(str(file), num_page_override=64)


def test_after_a_failed_load_another_model_loads(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    break_weights(folder)
    with pytest.raises(MinisglError):
        LLM(str(folder))
    llm = LLM(str(tiny_model), dtype="float32", num_page_override=64)
    assert len(llm.generate(*REFERENCE)[0]["token_ids"]) == 4
    llm.shutdown()
