"""Messages to bytes and back, for the queues between our own processes.

Most messages travel as the msgpack of what `encoder()` gives. The tokens of a step, and the pieces
of text that they become, travel as a bare list of their fields: msgspec writes and reads that
thirty times as fast. Either way the declared types are what is decoded. May import `params`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from minisgl.params import MessageError

from .codec import Message, pack, unpack
from .frontend import BaseFrontendMsg, BatchFrontendMsg, UserReply
from .tokenizer import BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg

Family = TypeVar("Family", bound=Message)

_KINDS = {BatchTokenizerMsg: DetokenizeMsg, BatchFrontendMsg: UserReply}  # of batches sent as lists
_READERS: dict[type[Message], tuple[Any, Any]] = {  # by family: the batch, the reader of its list
    BaseTokenizerMsg: (BatchTokenizerMsg, msgspec.msgpack.Decoder(list[DetokenizeMsg]).decode),
    BaseFrontendMsg: (BatchFrontendMsg, msgspec.msgpack.Decoder(list[UserReply]).decode),
}
_write_list = msgspec.msgpack.Encoder().encode


def to_wire(message: Message) -> bytes:
    """The bytes of a message."""
    if isinstance(message, (BatchTokenizerMsg, BatchFrontendMsg)):
        kind = _KINDS[type(message)]
        if all(type(item) is kind for item in message.data):
            return _write_list(message.data)
    return pack(message.encoder())


class FromWire(Generic[Family]):
    """Called with bytes, gives the message of a family that they stand for, or a `MessageError`."""

    takes_bytes = True

    def __init__(self, family: type[Family]) -> None:
        self._family = family
        self._batch, self._read_list = _READERS.get(family, (None, None))

    def __call__(self, data: bytes) -> Family:
        """The message."""
        if self._batch is None or not _is_array(data):
            return self._family.decoder(unpack(data))
        try:
            batch: Family = self._batch(self._read_list(data))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"damaged message: {error}") from error
        return batch


def _is_array(data: bytes) -> bool:
    """Whether msgpack bytes begin a list."""
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))
