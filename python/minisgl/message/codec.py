"""The codec: messages to plain dicts and msgpack bytes, and back, by an explicit table of classes.

`msg.encoder()` gives a dict tagged `__type__`; `decoder(dict)` of the family's base class inverts it.
Token ids travel as the bytes of an int32 array, tagged "Tensor". What does not decode, for whatever
reason, is a `MessageError`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import msgspec
import numpy as np

from minisgl.params import MessageError, SamplingParams

if TYPE_CHECKING:
    import torch

TYPE_TAG = "__type__"
MAX_NESTING = 64


class TokenIds:
    """Descriptor of a field of token ids: set from a tensor, an array or a list of ints.

    It reads as a CPU int32 tensor `(n,)` that shares the stored memory.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, obj: Any, owner: type | None = None) -> torch.Tensor:
        if obj is None:
            raise AttributeError(self._slot)  # tells dataclass that there is no default
        import torch  # the one place where a message needs it

        return torch.from_numpy(getattr(obj, self._slot))

    def __set__(self, obj: Any, value: Any) -> None:
        obj.__dict__[self._slot] = token_array(value)


def token_array(value: Any) -> np.ndarray:
    """A flat, contiguous, writable int32 array of the given ids; `MessageError` if they are not ids."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MessageError(f"token ids must be a flat list of integers, got {array.dtype} {array.shape}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise MessageError("token ids must fit in 32 bits")
    return np.require(array, dtype=np.int32, requirements=["C", "W"])


class Message:
    """Base of all messages. A subclass is a dataclass; each family keeps its own table."""

    _table: ClassVar[dict[str, type[Message]]]

    def __init_subclass__(cls, family: bool = False) -> None:
        if family:
            cls._table = {}
        else:
            cls._table[cls.__name__] = cls

    def encoder(self) -> dict[str, Any]:
        """This message as a dict of plain values, tagged with its class name."""
        return _encode_fields(self)

    @classmethod
    def decoder(cls, data: Any) -> Any:
        """The message that `data` encodes; `MessageError` if it is not one of this family."""
        return _decode(data, cls._table, 0)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.encoder() == other.encoder()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _encode_fields(obj: Any) -> dict[str, Any]:
    out: dict[str, Any] = {TYPE_TAG: type(obj).__name__}
    for field in dataclasses.fields(obj):
        raw = obj.__dict__.get(f"_{field.name}")
        out[field.name] = _encode(raw if isinstance(raw, np.ndarray) else getattr(obj, field.name))
    return out


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {TYPE_TAG: "Tensor", "dtype": "int32", "buffer": value.tobytes()}
    if dataclasses.is_dataclass(value):
        return _encode_fields(value)
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode(value: Any, table: dict[str, type[Message]], depth: int) -> Any:
    if depth > MAX_NESTING:
        raise MessageError("message nested too deeply")
    if not isinstance(value, dict) or not isinstance(value.get(TYPE_TAG), str):
        raise MessageError(f"not a message: {type(value).__name__} without {TYPE_TAG}")
    name = value[TYPE_TAG]
    cls: Any = SamplingParams if name == "SamplingParams" else table.get(name)
    if cls is None:
        raise MessageError(f"unknown message type {name!r}")
    known = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(map(str, value)) - set(known) - {TYPE_TAG})
    if unknown:
        raise MessageError(f"{name} has no field {', '.join(unknown)}")
    hints = get_type_hints(cls)
    kwargs = {}
    for key, item in value.items():
        if key != TYPE_TAG:
            kwargs[key] = _decode_field(f"{name}.{key}", item, hints[key], table, depth)
    try:
        return cls(**kwargs)
    except TypeError as error:
        raise MessageError(f"{name} is incomplete: {error}") from error


def _decode_field(label: str, item: Any, hint: Any, table: dict, depth: int) -> Any:
    if isinstance(item, dict) and item.get(TYPE_TAG) == "Tensor":
        buffer = item.get("buffer")
        if item.get("dtype") != "int32" or not isinstance(buffer, bytes) or len(buffer) % 4:
            raise MessageError(f"{label} is not an int32 tensor")
        return np.frombuffer(bytearray(buffer), dtype=np.int32)
    if hint is TokenIds:
        raise MessageError(f"{label} must be a tensor")
    if isinstance(item, dict) and TYPE_TAG in item:
        item = _decode(item, table, depth + 1)
    elif isinstance(item, list) and any(isinstance(x, dict) and TYPE_TAG in x for x in item):
        item = [_decode(x, table, depth + 1) for x in item]
    if dataclasses.is_dataclass(hint) or "Msg" in str(hint) or "Reply" in str(hint):
        return _check_message(label, item, hint)
    try:
        return msgspec.convert(item, hint)
    except msgspec.ValidationError as error:
        raise MessageError(f"{label}: {error}") from error


def _check_message(label: str, item: Any, hint: Any) -> Any:
    items = item if isinstance(item, list) else [item]
    wanted = Message if isinstance(item, list) else hint
    if not all(isinstance(x, wanted) for x in items):
        raise MessageError(f"{label} holds something else than {hint}")
    return item


def pack(message: dict[str, Any]) -> bytes:
    """Msgpack bytes of an encoded message."""
    return msgspec.msgpack.encode(message)


def unpack(data: bytes) -> Any:
    """The dict that msgpack bytes stand for; `MessageError` if they are damaged."""
    try:
        return msgspec.msgpack.decode(data, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"damaged message: {error}") from error
