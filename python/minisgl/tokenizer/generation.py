"""What a model's authors advise: EOS ids and sampling values beside the weights.

May import `params` and `utils`. Invariant: a value that `SamplingParams` would refuse is left out
with a warning; advice never keeps a model from loading.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minisgl.params import InvalidRequestError, ModelLoadError, SamplingParams
from minisgl.utils import init_logger
from minisgl.utils.gguf import open_gguf
from minisgl.utils.model_files import read_json

logger = init_logger(__name__)

GENERATION_FILE = "generation_config.json"
_GGUF_NAMES = {  # field: how GGUF calls it
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_FIELDS = tuple(_GGUF_NAMES)


def sampling_defaults(model: str | os.PathLike[str]) -> dict[str, Any]:
    """Fields of `SamplingParams` that a model folder or a GGUF file advises; often none.

    As in transformers, a temperature that is not named is 1 where `do_sample` is true, and of a
    model that is not to be sampled only the repetition penalty counts.
    """
    place = Path(model)
    if place.is_file():
        metadata = open_gguf(place).metadata
        config = {name: metadata.get(f"general.sampling.{_GGUF_NAMES[name]}") for name in _FIELDS}
    else:
        config = read_generation_config(place)  # the tokenizer has warned if it is damaged
        place /= GENERATION_FILE
    found = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    if config.get("do_sample", "temperature" in found):
        found.setdefault("temperature", 1.0)
    else:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    if found.get("top_k") == 0:
        found["top_k"] = -1  # all tokens
    return {name: value for name, value in found.items() if _is_usable(name, value, place)}


def read_generation_config(folder: Path, *, warn: bool = False) -> dict[str, Any]:
    """What generation_config.json holds; nothing if it is absent or cannot be read."""
    file = folder / GENERATION_FILE
    try:
        return read_json(file) if file.is_file() else {}
    except ModelLoadError as error:
        if warn:
            logger.warning("its advice is left out: %s", error)
        return {}


def _is_usable(name: str, value: Any, place: Path) -> bool:
    try:
        SamplingParams(**{name: value}).validate()
    except InvalidRequestError as error:
        logger.warning("%s advises what cannot be done, left out: %s", place, error)
        return False
    return True
