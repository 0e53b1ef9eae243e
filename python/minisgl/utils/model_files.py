"""From what the user typed to files on this machine, and a folder's `config.json`.

Imports `env` and `utils` only; no torch, no transformers. Invariant: what comes back exists and is
of the kind it is said to be; everything else is one `ModelLoadError` that names the thing and the
way out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .default_model import default_model_path
from .errors import ModelLoadError
from .gguf import is_gguf, split_parts
from .hub import PICKLES, fetch_from_hub

MAX_JSON_BYTES = 1 << 26
DEFAULT_MODEL_NAMES = ("default", "smollm2")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. `path` is a folder with config.json ("hf") or a GGUF file ("gguf").

    `name` is what to call it: the hub id, or the last part of the path.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    name: str


class HFConfig(Mapping[str, Any]):
    """The content of a `config.json`: keys are attributes, nested objects are such objects."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the model's config has no {name!r}")
        return self[name]

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return HFConfig(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def to_dict(self) -> dict[str, Any]:
        """A copy as plain, nested dicts."""
        return deepcopy(self._values)

    def __repr__(self) -> str:
        return f"HFConfig({self._values!r})"


_config_cache: dict[tuple[str, int, int], HFConfig] = {}


def cached_load_hf_config(path: str | os.PathLike[str]) -> HFConfig:
    """The `config.json` of a model folder (or of whatever `resolve_model` turns into one).

    Read once per state of the file. `ModelLoadError` if there is none or it is not a JSON object.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = resolve_model(path).path
    file = folder / "config.json"
    try:
        stat = file.stat()
    except OSError as error:
        raise ModelLoadError(f"{folder} has no config.json: it is not a model folder") from error
    key = (str(file.resolve()), stat.st_mtime_ns, stat.st_size)
    if key not in _config_cache:
        _config_cache[key] = HFConfig(read_json(file))
    return _config_cache[key]


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; `ModelLoadError` for anything else."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file} has more than {MAX_JSON_BYTES} bytes")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds a {type(value).__name__}, not a JSON object")
    return value


def resolve_model(path: str | os.PathLike[str], revision: str | None = None) -> ResolvedModel:
    """Find the model meant by a folder, a .gguf file, "default", or a hub id `org/name`.

    "smollm2" is another name of the default. Something on disk wins over a name of the same
    spelling. May fetch (default model, hub). revision: a branch, tag or commit of a hub model.
    """
    text = os.fspath(path)
    place = Path(text).expanduser()
    if revision is not None and (place.exists() or not _HUB_ID.fullmatch(text)):
        raise ModelLoadError(f"a revision (--revision) is of a hub model, and {text!r} is none")
    if text and place.is_dir():
        return _resolve_folder(place)
    if text and place.exists():
        if is_gguf(place):
            first = Path(split_parts(str(place))[0])
            return ResolvedModel("gguf", first, re.sub(r"-00001-of-\d{5}$", "", first.stem))
        raise ModelLoadError(
            f"{place} is not a GGUF file: pass a .gguf file or a folder with config.json"
        )
    if text.lower() in DEFAULT_MODEL_NAMES:
        file = default_model_path()
        return ResolvedModel("gguf", file, file.stem)
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        found = _resolve_folder(fetch_from_hub(text, revision))
        return ResolvedModel(found.kind, found.path, text)
    raise ModelLoadError(
        f"there is no model at {text!r}: pass a folder with config.json, a .gguf file, "
        '"default", or a hub id such as org/name'
    )


def _resolve_folder(folder: Path) -> ResolvedModel:
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.is_file())
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from error
    suffixes = {file.suffix.lower() for file in files}
    ggufs = [file for file in files if file.suffix.lower() == ".gguf"]
    ggufs = [file for file in ggufs if split_parts(str(file))[0] == str(file)]
    if (folder / "config.json").is_file():
        pickles = suffixes & set(PICKLES)
        if pickles and ".safetensors" not in suffixes:
            raise ModelLoadError(
                f"{folder} has only pickled weights ({', '.join(sorted(pickles))}), which can run "
                "code when loaded: convert them to safetensors, or take a GGUF file"
            )
        return ResolvedModel("hf", folder, folder.resolve().name)
    if len(ggufs) == 1:
        return resolve_model(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:8])
        raise ModelLoadError(f"{folder} holds {len(ggufs)} GGUF files: pass one of them ({names})")
    raise ModelLoadError(
        f"{folder} holds neither config.json nor a .gguf file: it is not a model folder"
    )
