"""Queues between processes: ZeroMQ over Unix sockets, msgpack, every one of them bounded.

A queue is one end: push and pull for work, pub and sub for what all see in one order. `create`
says which end owns the socket file; the other may come first. Invariant: whatever arrives, the
receiving process goes on. What is too long, damaged or unknown is dropped with one log line. May
import `env`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from .errors import MessageError
from .logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")
Encoder = Callable[[Any], Any]  # a message to plain values, or to its bytes
Decoder = Callable[[Any], T]  # from plain values, or from `bytes` if `takes_bytes` is set on it

MAX_QUEUED_MESSAGES = 8192
MAX_MESSAGE_BYTES = 64 << 20
LINGER_MS = 1000


def _open(kind: int, addr: str, create: bool, context: zmq.Context[Any] | None = None) -> Any:
    socket: Any = (context or zmq.Context.instance()).socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # tells of every subscriber, not of the first alone
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    if create:
        socket.bind(addr)
    else:
        socket.connect(addr)
    return socket


def deliver_and_close() -> None:
    """When all queues of this process are stopped: wait until what was put is on its way."""
    zmq.Context.instance().term()


class _SendingEnd(Generic[T]):
    kind: int

    def __init__(self, addr: str, create: bool, encoder: Encoder) -> None:
        self._encoder = encoder
        self._socket = _open(self.kind, addr, create)

    def put(self, obj: T) -> None:
        """Send one message; waits while the queue is full."""
        self._socket.send(_to_bytes(self._encoder, obj))

    def stop(self) -> None:
        """Close this end; what was put is still delivered if the peer is there."""
        self._socket.close()


def _to_bytes(encoder: Encoder, obj: Any) -> bytes:
    encoded = encoder(obj)
    return encoded if isinstance(encoded, bytes) else msgspec.msgpack.encode(encoded)


class ZmqPushQueue(_SendingEnd[T]):
    """Sends messages to the one that pulls."""

    kind = zmq.PUSH

    def try_put(self, obj: T) -> bool:
        """Send one message if the queue has room; whether it had."""
        try:
            self._socket.send(_to_bytes(self._encoder, obj), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class ZmqPubQueue(_SendingEnd[T]):
    """Sends messages to all subscribers; waits for the slowest rather than to drop one."""

    kind = zmq.XPUB

    def __init__(self, addr: str, create: bool, encoder: Encoder) -> None:
        super().__init__(addr, create, encoder)
        self._num_subscribers = 0

    def wait_for_subscribers(self, n: int) -> None:
        """Wait until `n` have subscribed: what is put before is lost to those who are late."""
        while self._num_subscribers < n:
            self._num_subscribers += 1 if self._socket.recv()[:1] == b"\x01" else -1


class _ReceivingEnd(Generic[T]):
    kind: int

    def __init__(self, addr: str, create: bool, decoder: Decoder[T]) -> None:
        self._decoder = decoder
        self._addr = addr
        self._socket = _open(self.kind, addr, create)
        self._ready: deque[T] = deque()

    def get(self) -> T:
        """The next message; waits for it."""
        while not self._ready:
            self._take(self._socket.recv())
        return self._ready.popleft()

    def get_all(self, timeout: float | None = 0.0) -> list[T]:
        """Everything that has arrived; waits `timeout` seconds (None: for ever) for the first."""
        if self.empty() and timeout != 0.0:
            self._socket.poll(None if timeout is None else int(timeout * 1000))
        self._receive_waiting(MAX_QUEUED_MESSAGES)
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def empty(self) -> bool:
        """Whether `get` would have to wait."""
        if not self._ready:
            self._receive_waiting(1)
        return not self._ready

    def _receive_waiting(self, most: int) -> None:
        """Take in what the socket holds, until `most` messages are ready."""
        try:
            while len(self._ready) < most:
                self._take(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return

    def _take(self, data: bytes) -> None:
        message = _from_bytes(self._decoder, data, self._addr)
        if message is not None:
            self._ready.append(message)

    def stop(self) -> None:
        """Close this end; what has arrived and was not taken is lost."""
        self._socket.close(0)


def _from_bytes(decoder: Decoder[T], data: bytes, addr: str) -> T | None:
    """The message, None if it was dropped."""
    if len(data) > MAX_MESSAGE_BYTES:
        logger.warning("dropped a message of %d bytes on %s: too long", len(data), addr)
        return None
    try:
        if getattr(decoder, "takes_bytes", False):
            return decoder(data)
        return decoder(msgspec.msgpack.decode(data))
    except (MessageError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("dropped a message of %d bytes on %s: %s", len(data), addr, error)
        return None


class ZmqPullQueue(_ReceivingEnd[T]):
    """Receives what was pushed, from any number of senders."""

    kind = zmq.PULL


class ZmqSubQueue(_ReceivingEnd[T]):
    """Receives all that is published after it has subscribed."""

    kind = zmq.SUB


class AsyncPullQueue(Generic[T]):
    """`ZmqPullQueue` for an event loop; must be made inside it."""

    def __init__(self, addr: str, create: bool, decoder: Decoder[T]) -> None:
        self._decoder = decoder
        self._addr = addr
        self._socket = _open(zmq.PULL, addr, create, zmq.asyncio.Context.instance())

    async def get(self) -> T:
        """The next message."""
        while True:
            message = _from_bytes(self._decoder, await self._socket.recv(), self._addr)
            if message is not None:
                return message

    def stop(self) -> None:
        """Close this end."""
        self._socket.close(0)
