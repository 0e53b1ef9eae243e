"""What the tokenizer tests share: the default model's tokenizer, texts, tiny models."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from minisgl.tokenizer import Tokenizer, load_tokenizer
from minisgl.utils.model_files import resolve_model

TEXTS = [
    "",
    "a",
    " ",
    "\n",
    "\t \n \r\n\r\n",
    "Hello, world! It's we're I'LL don'T 's",
    "123 4567 89,000.50 1st 2nd x86_64 0xFF 1e-9",
    "def f(x: int) -> int:\n    return x ** 2  # ok\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b->c; } // done",
    '{"key": [1, 2.5, null, true], "täg": "\\u00e9"}',
    "日本語のテキスト。漢字かなカナ 中文测试，标点！ 한국어 텍스트",
    "مرحبا بالعالم ١٢٣ שלום עולם हिन्दी १२ ไทยภาษา Привет мир",
    "👨‍👩‍👧‍👦 🇩🇪 🤖 👍🏽 ✨",
    "é e\u0301 ﬁ Å \u212b ½ ² Ⅷ ǅ 𝕳𝖊𝖑𝖑𝖔",
    "a\u00a0b\u3000c\u200bd\u2028e\ufefff",
    "<|im_start|>user\nx<|im_end|> <|endoftext|> </s> <unk> <|im_start|",
    "   leading and trailing   ",
    " " * 50 + "\n" * 20 + "\t" * 9,
    "a" * 200,
    "\x00\x01\x7f\ufffd",
]


def random_texts(num: int, seed: int = 0) -> list[str]:
    """Texts of random characters and words of many scripts, the same for a seed."""
    rng = random.Random(seed)
    letters = [chr(c) for c in range(32, 127)] + list(" \n\t  ") * 8
    letters += list(
        "éüñßøÆ日本語中文かなカナ한국어مرحباשלוםПривет👍🎉🤖½²①٣०'’“”—…\u00a0\u3000\u200d\u0301ǅʼ"
    )
    words = (
        "the of return class http json SELECT don't I'm 2024 3.14 <|im_end|> \n\n     </s> /* Ünï"
    )
    texts = []
    for _ in range(num):
        if rng.random() < 0.5:
            texts.append("".join(rng.choices(letters, k=rng.randint(1, 60))))
        else:
            glue = rng.choice(["", " ", " \n", "\t"])
            texts.append(glue.join(rng.choices(words.split(" "), k=rng.randint(1, 20))))
    return texts


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """More than 2,000 texts of all kinds."""
    return TEXTS + random_texts(2000)


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The default model's GGUF file."""
    return resolve_model("default").path


@pytest.fixture(scope="session")
def tokenizer(model_file: Path) -> Tokenizer:
    """The default model's tokenizer."""
    return load_tokenizer(model_file)


GgufWriter = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> GgufWriter:
    """Writes a GGUF file that holds a vocabulary and nothing else."""

    def write(model: str, tokens: list[str], arch: str = "llama", **fields: Any) -> Path:
        path = tmp_path / f"{model}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        for name, value in fields.items():
            key = f"tokenizer.ggml.{name}" if name != "chat_template" else "tokenizer.chat_template"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


FolderWriter = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> FolderWriter:
    """Writes a Hugging Face folder with a byte-level vocabulary: 256 letters, <s>, </s>, <x>."""

    def write(files: dict[str, Any], name: str = "hf") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(["<s>", "</s>"])
        backend.add_tokens(["<x>"])
        backend.save(str(folder / "tokenizer.json"))
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    return write
