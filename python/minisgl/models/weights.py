"""From stored tensors to a model's weights: merged, sharded, streamed into their final place.

Q, K and V become `qkv_proj`, gate and up become `gate_up_proj`, experts are stacked. One weight is
finished and its source given back before the next is begun, so a load needs the model's memory
and one tensor more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from minisgl.distributed import DistributedInfo, current_tp_info
from minisgl.layers import Parameter, vocab_range
from minisgl.quant import ExpertWeights, Weight
from minisgl.utils.errors import ModelLoadError

from .blocks import CausalLM
from .sources import SourceTensor, close_sources, open_source

Progress = Callable[[int, int], None]
Pack = Callable[[str, list[SourceTensor]], Weight | None]


class _MismatchError(ModelLoadError):
    """The weights are not those that the model's configuration asks for."""


_MERGED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_USELESS = re.compile(r"(.+\.)?rotary_emb\.inv_freq")


@dataclass(slots=True)
class Slot:
    """One weight of the model and the stored tensors it is made of, by (expert, place) in order.

    is_stacked: experts that are stored one by one. A tensor of 3 dimensions has them all.
    """

    name: str
    parts: dict[tuple[int, int], SourceTensor] = field(default_factory=dict)
    num_places: int = 1
    is_stacked: bool = False

    def check_complete(self) -> None:
        """`ModelLoadError` if a part is missing."""
        experts = 1 + max(expert for expert, _ in self.parts)
        wanted = [(expert, place) for expert in range(experts) for place in range(self.num_places)]
        missing = [self._stored_name(*key) for key in wanted if key not in self.parts]
        if missing:
            raise _MismatchError(f"missing {_some(missing)}")

    def _stored_name(self, expert: int, place: int) -> str:
        """What a part is called."""
        owner, _, kind = self.name.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        if self.is_stacked:
            prefix, module, kind = f"{owner}.{expert}", kind, "weight"
        names = [name for name, merged in _MERGED.items() if merged == (module, place)]
        return f"{prefix}.{(names or [module])[0]}.{kind}"

    @property
    def ordered(self) -> list[SourceTensor]:
        """The parts from top to bottom."""
        return [self.parts[key] for key in sorted(self.parts)]

    @property
    def is_experts(self) -> bool:
        """Whether the weight is a stack of matrices, however it is stored."""
        return self.is_stacked or len(self.ordered[0].shape) == 3

    @property
    def matrices(self) -> list[list[SourceTensor]]:
        """The parts of each matrix that the weight consists of: one, or one for each expert."""
        parts = self.ordered
        if self.is_experts and not self.is_stacked:
            return [[expert] for expert in parts[0].split()]
        return [parts[i : i + self.num_places] for i in range(0, len(parts), self.num_places)]


def plan_slots(tensors: dict[str, SourceTensor]) -> dict[str, Slot]:
    """Which stored tensors make up which weight, in the order of the files."""
    slots: dict[str, Slot] = {}
    for name, tensor in tensors.items():
        if _USELESS.fullmatch(name):
            continue
        expert, place, is_stacked = 0, 0, False
        match = _EXPERT.fullmatch(name)
        if match:
            prefix, index, kind = match.groups()
            merged, place = _MERGED.get(kind, (kind, 0))
            slot_name, expert, is_stacked = f"{prefix}.{merged}", int(index), True
        else:
            owner, _, kind = name.rpartition(".")
            prefix, _, module = owner.rpartition(".")
            merged, place = _MERGED.get(module, (module, 0))
            slot_name = f"{prefix}.{merged}.{kind}" if prefix else name
        slot = slots.setdefault(slot_name, Slot(slot_name))
        slot.is_stacked = is_stacked
        if is_stacked or module in _MERGED:
            slot.num_places = _PARTS.get(merged, 1)
        slot.parts[expert, place] = tensor
    for slot in slots.values():
        slot.check_complete()
    return slots


def shard_tensor(
    name: str, w: torch.Tensor, rank: int, size: int, num_kv_heads: int | None = None
) -> torch.Tensor:
    """One rank's part of a stored tensor, a view.

    Q, gate and up are split by output, O and down by input, the vocabulary by row (the last rank
    may have less). K and V are split by head; of fewer heads than ranks, each gets a whole one.
    """
    if size == 1:
        return w
    owner, _, kind = name.rpartition(".")
    module = owner.rpartition(".")[2] if kind in ("weight", "bias") else kind
    if module in ("k_proj", "v_proj") and num_kv_heads is not None and num_kv_heads < size:
        if size % num_kv_heads:
            raise ModelLoadError(f"{num_kv_heads} key-value heads cannot be copied to {size} ranks")
        return _chunk(name, w, 0, rank * num_kv_heads // size, num_kv_heads)
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return _chunk(name, w, 0, rank, size)
    if module in ("o_proj", "down_proj"):
        return w if kind == "bias" else _chunk(name, w, -1, rank, size)
    if module == "gate_up_proj":  # experts already stacked: (experts, gate over up, hidden)
        gate, up = w.chunk(2, dim=-2)
        halves = [_chunk(name, half, -2, rank, size) for half in (gate, up)]
        return torch.cat(halves, dim=-2)
    if module in ("embed_tokens", "lm_head"):
        start, length = vocab_range(w.shape[0], rank, size)
        return w[start : start + length]
    return w


def _chunk(name: str, w: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    if w.shape[dim] % count:
        raise ModelLoadError(f"{name} of shape {tuple(w.shape)} cannot be split {count} ways")
    return w.chunk(count, dim)[index]


def load_weight(
    path: str | os.PathLike[str], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, merged, this rank's part, on `device`, in the stored type.

    What is quantised comes as float32. A tied head that the file stores comes too.
    """
    source = open_source(path)
    tp_info = current_tp_info()
    num_kv_heads = source.config().num_kv_heads if tp_info.size > 1 else None
    for slot in plan_slots(source.tensors()).values():
        parts = [
            shard_tensor(part.name, part.tensor(), tp_info.rank, tp_info.size, num_kv_heads)
            for part in slot.ordered
        ]
        tensor = parts[0] if len(parts) == 1 else torch.cat([p.to(parts[0].dtype) for p in parts])
        if slot.is_stacked:
            tensor = tensor.view(len(parts) // slot.num_places, -1, *tensor.shape[1:])
        yield slot.name, tensor.to(device)


def load_model_weights(
    model: CausalLM,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    pack: Pack | None = None,
) -> None:
    """Give `model` (made on any device, also meta) the weights at `path`, stored as `dtype`.

    progress: called with (bytes done, bytes in all) of the file. pack: may turn the parts of a
    matrix into a packed `Weight`; where it returns None the matrix becomes floats. It is asked for
    each expert, and if it refuses one, all experts of that layer become floats.
    """
    with _mismatch_told(path):
        _load(model, open_source(path).tensors(), torch.device(device), dtype, progress, pack)


def check_weights(model: CausalLM, path: str | os.PathLike[str]) -> list[Slot]:
    """What each weight of `model` is made of at `path`.

    `ModelLoadError` if `load_model_weights` would refuse the names or shapes.
    """
    with _mismatch_told(path):
        slots = checked_slots(model, open_source(path).tensors())
        return [slots[name] for name, _, _ in model.slots()]


@contextmanager
def _mismatch_told(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _MismatchError as error:
        raise ModelLoadError(
            f"{path}: weights: {error}: the configuration and the weights do not belong together, "
            "or the copy is incomplete"
        ) from error


def _load(
    model: CausalLM,
    tensors: dict[str, SourceTensor],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    pack: Pack | None,
) -> None:
    slots = checked_slots(model, tensors)
    owners = {name: (owner, attribute) for name, owner, attribute in model.slots()}
    tp_info = current_tp_info()
    total = sum(part.nbytes for name in owners for part in slots[name].ordered)
    done = 0
    for name, slot in slots.items():
        if name not in owners:
            continue
        owner, attribute = owners[name]
        shape = tuple(getattr(owner, attribute).shape)
        weight: Parameter | None = None
        if pack is not None and len(shape) > 1 and tp_info.size == 1:
            weight = _packed(slot, pack)
        if weight is None:
            is_cheap = len(shape) == 1 and device.type == "cpu"  # norms and biases
            stored_as = torch.float32 if is_cheap else dtype
            weight = _assemble(slot, shape, device, stored_as, model, tp_info)
        setattr(owner, attribute, weight)
        for part in slot.ordered:
            part.release()
            done += part.nbytes
        if progress is not None:
            progress(done, total)
    close_sources()


def _packed(slot: Slot, pack: Pack) -> Weight | ExpertWeights | None:
    """The weight packed, matrix by matrix; None if one of them cannot be."""
    weights: list[Weight] = []
    for parts in slot.matrices:
        weight = pack(slot.name, parts)
        if weight is None:
            return None
        weights.append(weight)
        for part in parts:
            part.release()
    return ExpertWeights(weights) if slot.is_experts else weights[0]


def checked_slots(model: CausalLM, tensors: dict[str, SourceTensor]) -> dict[str, Slot]:
    """The plan for `model`; `ModelLoadError` if names or, on one rank, shapes are not its own.

    Reads no data. What several ranks share is checked while it is taken apart.
    """
    slots = plan_slots(tensors)
    if model.config.tie_word_embeddings and EMBEDDING not in slots and HEAD in slots:
        slots[EMBEDDING] = slots.pop(HEAD)  # of two names of one tensor, writers keep either
    shapes = {name: tuple(getattr(owner, key).shape) for name, owner, key in model.slots()}
    _check_names(shapes, slots, model.ignored_keys())
    if current_tp_info().size == 1:
        for name, shape in shapes.items():
            _check_shape(slots[name], shape)
    return slots


def _check_names(owners: Iterable[str], slots: dict[str, Slot], ignored: set[str]) -> None:
    missing = [name for name in owners if name not in slots]
    if missing:
        raise _MismatchError(f"missing {_some(missing)}")
    extra = [name for name in slots if name not in owners and name not in ignored]
    if extra:
        raise _MismatchError(f"the model has no place for {_some(extra)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _check_shape(slot: Slot, shape: tuple[int, ...]) -> None:
    """The last two parts of a merged weight, k and v or gate and up, are alike."""
    if slot.is_stacked:
        return _check_experts(slot, shape)
    rows, *rest = shape
    has_rest = all(part.shape and part.shape[1:] == tuple(rest) for part in slot.ordered)
    is_even = slot.num_places < 2 or len({part.shape for part in slot.ordered[-2:]}) == 1
    if not has_rest or not is_even or sum(part.shape[0] for part in slot.ordered) != rows:
        raise _wrong_shape(slot, shape)


def _check_experts(slot: Slot, shape: tuple[int, ...]) -> None:
    """Each part by itself: of two wrong ones the sum may be right."""
    wanted = (shape[1] // slot.num_places, *shape[2:])
    for part in slot.ordered:
        if part.shape != wanted:
            raise _MismatchError(f"{part.name} must be {wanted}, the file has {part.shape}")
    num_experts = len(slot.ordered) // slot.num_places
    if num_experts != shape[0]:
        raise _MismatchError(f"{slot.name} has {shape[0]} experts, the file {num_experts}")


def _wrong_shape(slot: Slot, shape: tuple[int, ...]) -> ModelLoadError:
    stored = " + ".join(f"{part.name} {part.shape}" for part in slot.ordered[:3])
    return _MismatchError(f"{slot.name} must be {shape}, the file has {stored}")


def _assemble(
    slot: Slot,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    model: CausalLM,
    tp_info: DistributedInfo,
) -> torch.Tensor:
    """The weight as one float tensor, each part written into its rows."""
    parts = slot.ordered
    if len(parts) == 1 and tp_info.size == 1 and not slot.is_stacked:
        if parts[0].shape != shape:
            raise _wrong_shape(slot, shape)
        if device.type == "cpu" and not hasattr(parts[0], "type_name"):
            return parts[0].tensor().to(dtype)
    out = torch.empty(shape, dtype=dtype, device=device)
    target = out.view(-1, *shape[2:]) if slot.is_stacked else out
    start = 0
    for part in parts:
        sharded: torch.Tensor | None = None
        part_shape = part.shape
        if tp_info.size > 1:
            sharded = shard_tensor(
                part.name, part.tensor(), tp_info.rank, tp_info.size, model.config.num_kv_heads
            )
            part_shape = tuple(sharded.shape)
        stop = start + part_shape[0]
        if stop > len(target) or part_shape[1:] != tuple(target.shape[1:]):
            raise _wrong_shape(slot, shape)
        if sharded is None:
            part.copy_into(target[start:stop])
        else:
            target[start:stop].copy_(sharded)
        start = stop
    if start != len(target):
        raise _wrong_shape(slot, shape)
    return out


def init_dummy_weights(
    model: CausalLM, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> None:
    """Small random weights instead of loaded ones; norms are 1, biases 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, owner, attribute in list(model.slots()):
        shape = tuple(getattr(owner, attribute).shape)
        weight = torch.empty(shape, dtype=dtype, device=device)
        if "norm" in name:
            weight.fill_(1.0)
        elif name.endswith("bias"):
            weight.zero_()
        else:
            bound = 1.0 / max(1, shape[-1]) ** 0.5
            weight.uniform_(-bound, bound, generator=generator)
        setattr(owner, attribute, weight)
