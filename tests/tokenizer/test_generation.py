"""What a model's authors advise: read as transformers means it, never a reason not to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from minisgl.tokenizer import sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 5}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.3, "top_k": 0}, {"temperature": 0.3, "top_k": -1}),
        (
            {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05},
            {"repetition_penalty": 1.05},
        ),
        ({"top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": 4}, {"top_k": 4}),
    ],
)
def test_a_folder_advises(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == expected


def test_a_folder_without_the_file_advises_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


def test_a_gguf_file_advises_by_its_metadata(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sampling_defaults(tmp_path / "m.gguf") == {"temperature": 0.5, "top_k": 40}
