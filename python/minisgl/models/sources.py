"""Weights where they lie: safetensors folders and GGUF files, memory-mapped, by Hugging Face name.

A source lists its tensors without reading them. A tensor is read when it is copied to its place,
once, and never as a whole model. Pickled weights are refused: loading them can run code.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minisgl.quant.dequant import FLOAT_TYPES, dequantize, dequantize_into
from minisgl.utils import cached_load_hf_config
from minisgl.utils.errors import ModelLoadError
from minisgl.utils.gguf import GGUFFile, GGUFTensor, open_gguf
from minisgl.utils.model_files import read_json, resolve_model

from .config import ARCHITECTURES, ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SourceTensor(ABC):
    """One stored tensor. shape: in torch order; nbytes: as stored."""

    name: str
    shape: tuple[int, ...]
    nbytes: int

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """It as floats on the CPU; a view of the mapped file where that is possible."""

    def copy_into(self, out: torch.Tensor) -> None:
        """Write it into `out`, whatever float type and device that has."""
        out.copy_(self.tensor())

    @abstractmethod
    def split(self) -> list[SourceTensor]:
        """Its slices along the first dimension, where they lie: the experts of a stack."""

    @abstractmethod
    def release(self) -> None:
        """Give the pages of the mapped file that were read for it back to the system."""


@dataclass(slots=True)
class FloatTensor(SourceTensor):
    """A tensor that is a view of a mapped safetensors file."""

    name: str
    view: torch.Tensor
    file: SafetensorsFile | None = None  # what `view` is a view of

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """In torch order."""
        return tuple(self.view.shape)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """As stored."""
        return self.view.nbytes

    def tensor(self) -> torch.Tensor:
        """The view."""
        return self.view

    def split(self) -> list[SourceTensor]:
        """Views of the view."""
        return [FloatTensor(f"{self.name}.{i}", v, self.file) for i, v in enumerate(self.view)]

    def release(self) -> None:
        """With all else of its file that was read."""
        if self.file is not None:
            self.file.release()


@dataclass(slots=True)
class BlockTensor(SourceTensor):
    """A GGUF tensor. num_heads: if not 0, its rows are interleaved within each of so many heads."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: torch.Tensor
    num_heads: int = 0
    file: GGUFFile | None = None  # what `data` is a view of

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """As stored."""
        return self.data.nbytes

    def rows(self) -> torch.Tensor:
        """The stored bytes, uint8 (rows, bytes per row), rows in the order of Hugging Face."""
        rows = self.data.view(self.shape[0], -1)
        if not self.num_heads:
            return rows
        by_pair = rows.view(self.num_heads, self.shape[0] // self.num_heads // 2, 2, -1)
        return by_pair.transpose(1, 2).reshape(self.shape[0], -1)

    def tensor(self) -> torch.Tensor:
        """A view of stored floats, or dequantised float32."""
        if self.type_name in FLOAT_TYPES:
            return self.rows().reshape(-1).view(FLOAT_TYPES[self.type_name]).view(self.shape)
        return dequantize(self.rows(), self.type_name, self.shape)

    def copy_into(self, out: torch.Tensor) -> None:
        """Dequantise straight into `out`."""
        if out.device.type == "cpu" and out.is_contiguous():
            dequantize_into(self.rows(), self.type_name, out)
        else:
            out.copy_(self.tensor())

    def split(self) -> list[SourceTensor]:
        """Views of the blocks."""
        kind, shape = self.type_name, self.shape[1:]
        pieces = self.data.view(self.shape[0], -1)
        return [
            BlockTensor(f"{self.name}.{i}", shape, kind, piece, file=self.file)
            for i, piece in enumerate(pieces)
        ]

    def release(self) -> None:
        """Give its pages of the mapped file back to the system."""
        if self.file is not None:
            self.file.release(self.data.numpy())


class WeightSource(ABC):
    """All tensors of a model, by their Hugging Face names."""

    path: Path

    @abstractmethod
    def tensors(self) -> dict[str, SourceTensor]:
        """Every tensor, in the order of the files."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """The model's numbers."""


class FolderSource(WeightSource):
    """A Hugging Face folder: one safetensors file, or shards with an index."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> ModelConfig:
        """From config.json."""
        return ModelConfig.from_hf(cached_load_hf_config(self.path))

    def tensors(self) -> dict[str, SourceTensor]:
        """By the index, or of all files."""
        stored = self._stored()
        renames = ARCHITECTURES[self.config().model_type].renames
        if not renames:
            return stored
        for tensor in stored.values():
            tensor.name = ".".join(renames.get(part, part) for part in tensor.name.split("."))
        return {tensor.name: tensor for tensor in stored.values()}

    def _stored(self) -> dict[str, SourceTensor]:
        """By their stored names."""
        index = self.path / INDEX_FILE
        if index.is_file():
            return self._read_indexed(read_json(index).get("weight_map"))
        files = sorted(self.path.glob("*.safetensors"))
        if self.path / SINGLE_FILE in files:  # some folders hold the weights in two formats
            files = [self.path / SINGLE_FILE]
        if not files:
            raise ModelLoadError(f"{self.path} has no *.safetensors files")
        found: dict[str, SourceTensor] = {}
        for file in files:
            for name, tensor in _open_safetensors(file).items():
                if name in found:
                    raise ModelLoadError(f"{file}: tensor {name!r} is in two files")
                found[name] = tensor
        return found

    def _read_indexed(self, weight_map: object) -> dict[str, SourceTensor]:
        """Tensors by the index, shard after shard."""
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{self.path / INDEX_FILE} has no weight_map")
        shards: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelLoadError(f"{self.path / INDEX_FILE}: {file!r} is no file name")
            shards.setdefault(file, []).append(name)
        found: dict[str, SourceTensor] = {}
        for file, names in shards.items():
            if not (self.path / file).is_file():
                raise ModelLoadError(f"{self.path} lacks {file}, which its index names")
            stored = _open_safetensors(self.path / file)
            for name in names:
                if name not in stored:
                    raise ModelLoadError(f"{self.path / file} lacks {name!r} of the index")
                found[name] = stored[name]
        return found


def _open_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Views of all tensors of one file; nothing is read yet."""
    file = SafetensorsFile(path)
    found: dict[str, SourceTensor] = {}
    for name, dtype, shape, start, stop in file.entries:
        if dtype not in FLOAT_DTYPES:
            raise ModelLoadError(f"{path}: {name!r} is stored as {dtype}, only floats can be read")
        flat = torch.empty(0, dtype=FLOAT_DTYPES[dtype])
        if start < stop:
            count = (stop - start) // flat.itemsize
            flat = torch.frombuffer(file.data, dtype=flat.dtype, count=count, offset=start)
        found[name] = FloatTensor(name, flat.view(shape), file)
    return found


class SafetensorsFile:
    """A mapped safetensors file. It stays mapped as long as the object or a view of a tensor lives.

    entries: (name, type, shape, first byte, byte after the last), in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np"):  # checks all lengths, types and offsets
                pass
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(begin - 8))
                # Copy-on-write: torch takes views of it without a warning about read-only memory.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            damaged = f"the file seems truncated or damaged, fetch it again ({error})"
            problem = error if isinstance(error, OSError) else damaged
            raise ModelLoadError(f"{path} cannot be read: {problem}") from error
        header.pop("__metadata__", None)
        spans = {name: [begin + at for at in e["data_offsets"]] for name, e in header.items()}
        self.entries = sorted(
            ((name, e["dtype"], e["shape"], *spans[name]) for name, e in header.items()),
            key=lambda entry: entry[3:],
        )

    def release(self) -> None:
        """Let what was read leave the process, all of it: the next read asks the file again.

        A view that is kept was not read yet. What is mapped around a page that is read can be as
        large as a huge page, so giving back tensor by tensor would leave much behind.
        """
        self.data.madvise(mmap.MADV_DONTNEED)


_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GGUF_OTHER_BLOCK_NAMES = {  # where an architecture means something else or more
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_GGUF_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GGUF_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # until April 2024


class GGUFSource(WeightSource):
    """A GGUF file. Names are mapped, q and k of Llama un-permuted, stacked experts taken apart.

    Gemma's norms stay as stored, 1 added to what Hugging Face stores; its config says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def file(self) -> GGUFFile:
        """The mapped file."""
        return open_gguf(self.path)

    def config(self) -> ModelConfig:
        """From the metadata and the list of tensors."""
        factors: dict[str, list[float]] = {}
        for name in ROPE_FACTORS:
            stored = self.file.tensors.get(f"{name}.weight")
            if stored is not None:
                factors[name] = self._block(name, stored).tensor().flatten().tolist()
        return ModelConfig.from_gguf(self.file.metadata, self.file.tensors, factors)

    def tensors(self) -> dict[str, SourceTensor]:
        """All tensors but those that belong to the config."""
        arch = self.file.field("general.architecture", str)
        blocks = _GGUF_BLOCK_NAMES | _GGUF_OTHER_BLOCK_NAMES.get(arch, {})
        permuted: dict[str, int] = {}
        if arch == "llama":
            config = self.config()
            permuted = {"attn_q": config.num_qo_heads, "attn_k": config.num_kv_heads}
        found: dict[str, SourceTensor] = {}
        for name, stored in self.file.tensors.items():
            if name.removesuffix(".weight") in ROPE_FACTORS:
                continue
            match = _BLOCK.fullmatch(name)
            layer, part, kind = match.groups() if match else ("", "", "")
            if part in _GGUF_EXPERTS:
                for tensor in self._experts(f"model.layers.{layer}.mlp.experts", part, stored):
                    found[tensor.name] = tensor
                continue
            hf_name = _GGUF_NAMES.get(name, name)
            if match := _GGUF_EXPERT.fullmatch(name):
                layer, side, expert = match.groups()
                hf_name = f"model.layers.{layer}.mlp.experts.{expert}.{side}_proj.weight"
            if part in blocks:
                hf_name = f"model.layers.{layer}.{blocks[part]}.{kind}"
            num_heads = permuted.get(part, 0)
            if num_heads and stored.shape[0] % (2 * num_heads):
                raise ModelLoadError(f"{self.path}: {name} does not divide into {num_heads} heads")
            found[hf_name] = self._block(hf_name, stored, num_heads)
        return found

    def _block(self, name: str, stored: GGUFTensor, num_heads: int = 0) -> BlockTensor:
        data = torch.from_numpy(stored.data)
        return BlockTensor(name, tuple(stored.shape), stored.type_name, data, num_heads, self.file)

    def _experts(self, prefix: str, part: str, stored: GGUFTensor) -> list[SourceTensor]:
        if len(stored.shape) != 3:
            raise ModelLoadError(f"{self.path}: {stored.name} is not 3-D but {stored.shape}")
        experts = self._block(stored.name, stored).split()
        for index, expert in enumerate(experts):
            expert.name = f"{prefix}.{index}.{_GGUF_EXPERTS[part]}.weight"
        return experts


_last_opened: list[tuple[tuple[str, int, int], WeightSource]] = []


def open_source(path: str | os.PathLike[str]) -> WeightSource:
    """The weights that `path` means; the last one opened is kept, so asking twice is cheap."""
    resolved = resolve_model(path)
    stat = resolved.path.stat()
    key = (str(resolved.path), stat.st_mtime_ns, stat.st_size)
    if not _last_opened or _last_opened[0][0] != key:
        kind = GGUFSource if resolved.kind == "gguf" else FolderSource
        _last_opened[:] = [(key, kind(resolved.path))]
    return _last_opened[0][1]


def close_sources() -> None:
    """Let go of the file that was opened last."""
    _last_opened.clear()


def load_model_config(path: str | os.PathLike[str]) -> ModelConfig:
    """The config of a model folder or a GGUF file (whatever `resolve_model` finds at `path`)."""
    return open_source(path).config()
