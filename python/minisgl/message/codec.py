"""Messages to plain dicts and msgpack bytes, and back, by an explicit table of classes.

`msg.encoder()` gives a dict tagged `__type__`; `decoder(dict)` of the family's base class inverts
it. Token ids travel as the bytes of an int32 array, tagged "Tensor". Decoding follows the declared
type of each field, never the tags that the data claims. Invariant: what does not decode, for
whatever reason, is a `MessageError`. May import `params`.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.params import MessageError, SamplingParams

if TYPE_CHECKING:
    import torch

TYPE_TAG = "__type__"
TENSOR_TAG = "Tensor"
MAX_NESTING = 64

IdArray = npt.NDArray[np.int32]
Self = TypeVar("Self", bound="Message")


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


def token_array(value: Any) -> IdArray:
    """A flat, contiguous, writable int32 array of ids; `MessageError` if `value` is none."""
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise MessageError(f"token ids must be a flat list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        shape = "x".join(map(str, array.shape)) or "single"
        raise MessageError(f"token ids must be a flat list of integers, got {shape} {array.dtype}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise MessageError("token ids must fit in 32 bits")
    return np.require(array, dtype=np.int32, requirements=["C", "W"])


class Message:
    """Base of all messages. A subclass is a dataclass; each family keeps its own table of them."""

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
    def decoder(cls: type[Self], data: Any) -> Self:
        """The message that `data` encodes; `MessageError` if it is not one of this class."""
        return _decode_message(data, cls, 0)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Message)
            and type(self) is type(other)
            and self.encoder() == other.encoder()
        )

    __hash__ = None  # type: ignore[assignment]


def _encode_fields(obj: Any) -> dict[str, Any]:
    cls: Any = type(obj)
    out: dict[str, Any] = {TYPE_TAG: cls.__name__}
    for name, hint in _field_types(cls).items():
        # Ids are encoded from the stored array: no tensor is made, so torch is not loaded.
        out[name] = _encode(obj.__dict__[f"_{name}"] if hint is TokenIds else getattr(obj, name))
    return out


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {TYPE_TAG: TENSOR_TAG, "dtype": "int32", "buffer": value.tobytes()}
    if isinstance(value, (Message, SamplingParams)):
        return _encode_fields(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):  # a plain value, decoded by its declared type
        return msgspec.to_builtins(value, builtin_types=(bytes,))
    return value


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    """The declared type of each field of a message class, in order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _is_message(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Message)


def _decode_message(value: Any, family: type[Self], depth: int) -> Self:
    if depth > MAX_NESTING:
        raise MessageError("message nested too deeply")
    tag = value.get(TYPE_TAG) if isinstance(value, dict) else None
    cls = family._table.get(tag) if isinstance(tag, str) else None
    if cls is None or not issubclass(cls, family):
        raise MessageError(f"not a {family.__name__}: {_short(value if tag is None else tag)}")
    message: Self = _decode_fields(value, cls, depth)
    return message


def _decode_fields(value: dict[Any, Any], cls: Any, depth: int) -> Any:
    types = _field_types(cls)
    fields = {}
    for key, item in value.items():
        if key == TYPE_TAG:
            continue
        if key not in types:
            raise MessageError(f"{cls.__name__} has no field {_short(key)}")
        fields[key] = _decode_as(types[key], item, f"{cls.__name__}.{key}", depth)
    try:
        return cls(**fields)
    except TypeError as error:
        raise MessageError(f"{cls.__name__} is incomplete: {error}") from error


def _decode_as(hint: Any, item: Any, label: str, depth: int) -> Any:
    """The value of type `hint` that `item` encodes; `label` names it in errors."""
    if hint is TokenIds:
        return _decode_ids(item, label)
    if _is_message(hint):
        return _decode_message(item, hint, depth + 1)
    if hint is SamplingParams:
        if not isinstance(item, dict) or item.get(TYPE_TAG) != SamplingParams.__name__:
            raise MessageError(f"{label} is not SamplingParams: {_short(item)}")
        return _decode_fields(item, SamplingParams, depth)
    if get_origin(hint) is list and _is_message(get_args(hint)[0]):
        if not isinstance(item, list):
            raise MessageError(f"{label} is not a list: {_short(item)}")
        return [_decode_message(entry, get_args(hint)[0], depth + 1) for entry in item]
    try:
        return msgspec.convert(item, hint)
    except (msgspec.ValidationError, TypeError, OverflowError, RecursionError) as error:
        raise MessageError(f"{label}: {error}") from error


def _decode_ids(item: Any, label: str) -> IdArray:
    if not isinstance(item, dict) or item.get(TYPE_TAG) != TENSOR_TAG:
        raise MessageError(f"{label} must be a tensor, got {_short(item)}")
    buffer = item.get("buffer")
    if item.get("dtype") != "int32" or not isinstance(buffer, bytes) or len(buffer) % 4:
        raise MessageError(f"{label} is not an int32 tensor")
    return np.frombuffer(bytearray(buffer), dtype=np.int32)


def _short(value: Any) -> str:
    """A value for an error message, cut to one short line."""
    return repr(value)[:80] if isinstance(value, (str, int, float)) else type(value).__name__


def pack(message: dict[str, Any]) -> bytes:
    """Msgpack bytes of an encoded message."""
    return msgspec.msgpack.encode(message)


def unpack(data: bytes) -> Any:
    """The dict that msgpack bytes stand for; `MessageError` if they are damaged."""
    try:
        return msgspec.msgpack.decode(data, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"damaged message: {error}") from error
