"""The way from a request to the engine and back: uids, streams of replies, the state of it all.

One `Frontend` lives in the API process, on its event loop. Invariant: every request that was
accepted ends exactly once, by a finished reply, by an error, or because its consumer went away; and
what it holds here is bounded, however slowly the consumer reads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minisgl.message import (
    AbortMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchFrontendMsg,
    DecodeMsg,
    DecodeReply,
    EncodeMsg,
    EncodeReply,
    EngineReady,
    EngineStats,
    ErrorReply,
    FromWire,
    LoadProgress,
    StartFailed,
    TokenizeMsg,
    TokenizerReady,
    TokenizerStats,
    UserReply,
    to_wire,
)
from minisgl.params import ErrorKind, MinisglError
from minisgl.utils import ZmqPushQueue, init_logger
from minisgl.utils.mp import AsyncPullQueue

from .unread import UnreadReplies

logger = init_logger(__name__)

MAX_OPEN_REQUESTS = 4096
MAX_UNREAD_TOKENS = 8192


class RequestFailed(MinisglError):
    """A request that ended in an error. kind: whose fault; param: the field at fault, if one is."""

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param


class Unavailable(RequestFailed):
    """The server takes no requests: it starts, it drains, or its engine is gone (HTTP 503)."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.FAILED, message)


class State(str, Enum):
    """Where a server is in its life; it only moves forward."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """`state` of the whole; `processes` by name: "starting", "ready" or how it ended.

    reason: why it is dead, for the log and not for clients.
    """

    state: State
    processes: dict[str, str]
    num_requests: int
    reason: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.state is State.READY


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model when everything is ready.

    name: what clients call it. max_seq_len: most tokens of prompt and answer together. vocab_size:
    rows of the embedding, so ids are below it. sampling_defaults: fields of `SamplingParams` that
    its authors advise. chat_template, tool_template: their sources, None if there is none.
    """

    name: str
    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None


class Frontend:
    """Submits requests to the tokenizers and hands their replies to those who wait.

    inbox: the address where all replies arrive. tokenizers: the addresses of the tokenizer
    processes; one request keeps to one of them. name: what the model is called. on_progress: called
    with (bytes done, bytes in all) while weights load. Must be made on the event loop that uses it.
    """

    def __init__(
        self,
        inbox: str,
        tokenizers: Sequence[str],
        name: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.stats = EngineStats()
        self.start_failure: StartFailed | None = None
        self.processes: dict[str, str] = {}
        self._name = name
        self._on_progress = on_progress
        self._info: ModelInfo | None = None
        self._engine: EngineReady | None = None
        self._tokenizer: TokenizerReady | None = None
        self._num_tokenizers_ready = 0
        self._held_by_tokenizers: dict[int, int] = {}
        self._state = State.STARTING
        self._reason: str | None = None
        self._uids = itertools.count(1)
        self._streams: dict[int, UnreadReplies] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._progress = asyncio.Event()
        self._inbox: AsyncPullQueue[BaseFrontendMsg] = AsyncPullQueue(
            inbox, True, FromWire(BaseFrontendMsg)
        )
        self._tokenizers: list[ZmqPushQueue[BaseTokenizerMsg]] = [
            ZmqPushQueue(addr, False, to_wire) for addr in tokenizers
        ]
        self._reader = asyncio.get_running_loop().create_task(self._read())

    # For the routes

    @property
    def info(self) -> ModelInfo:
        """The model; `Unavailable` while the server starts."""
        if self._info is None:
            raise Unavailable("the server is starting")
        return self._info

    def new_uid(self) -> int:
        """A number for one request, never given twice."""
        return next(self._uids)

    async def generate(self, msg: TokenizeMsg) -> AsyncIterator[UserReply]:
        """Submit a request (`msg.uid` from `new_uid`) and give its answer piece by piece.

        Pieces that a slow consumer has not read yet are joined into one. The last says `finished`.
        Closing the iterator before aborts the request, so close it (`aclosing`). Raises
        `RequestFailed`, at the first step (`Unavailable`, or OVERLOADED) or any later one.
        """
        stream = self._open(msg)
        try:
            while True:
                reply = await stream.next()
                yield reply
                if reply.finished:
                    return
        finally:
            if self._streams.pop(msg.uid, None) is not None:
                logger.info("Aborting request %d", msg.uid)
                self._send(AbortMsg(msg.uid))
            self._progress.set()

    async def abort(self, uid: int) -> None:
        """End a request from outside: its consumer sees `RequestFailed`. Unknown: nothing."""
        stream = self._streams.pop(uid, None)
        if stream is not None:
            self._send(AbortMsg(uid))
            stream.fail(RequestFailed(ErrorKind.FAILED, "the request was aborted"))

    async def tokenize(
        self,
        text: str | list[Any],
        *,
        add_special_tokens: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template_args: dict[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a text, or of a list of chat messages under the model's template.

        `RequestFailed` (INVALID) if it has none.
        """
        uid = self.new_uid()
        reply = await self._call(
            EncodeMsg(uid, text, add_special_tokens, tools, template_args or {})
        )
        return list(reply.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """The text of some ids."""
        msg = DecodeMsg(self.new_uid(), list(token_ids), skip_special_tokens)
        return str((await self._call(msg)).text)

    def health(self) -> Health:
        """The state of everything, at no cost worth counting."""
        return Health(self._state, self.processes, len(self._streams), self._reason)

    def held(self) -> dict[str, int]:
        """By process, how many requests it keeps anything for: all 0 when nothing is left to do."""
        tokenizers = {f"tokenizer {i}": num for i, num in self._held_by_tokenizers.items()}
        own = len(self._streams) + len(self._calls)
        return {"api": own, **tokenizers, "scheduler": self.stats.held}

    # For the supervisor

    async def changed(self) -> None:
        """Wait until a process reports about its start, or a request ends."""
        self._progress.clear()
        await self._progress.wait()

    def is_started(self) -> bool:
        """Whether engine and all tokenizers are ready; then `info` is known."""
        return self._info is not None

    def open_for_requests(self) -> None:
        """From now on requests are taken."""
        self._state = State.READY

    def refuse_requests(self) -> None:
        """From now on new requests raise `Unavailable`; those that run go on."""
        if self._state is not State.DEAD:
            self._state = State.DRAINING

    def fail(self, reason: str, message: str = "the engine has failed") -> None:
        """End everything that waits with an error; nothing is taken any more."""
        self._state, self._reason = State.DEAD, reason
        self.fail_requests(message)

    def fail_requests(self, message: str) -> None:
        """End every request and call that waits with `Unavailable`."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(Unavailable(message))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(Unavailable(message))
        self._progress.set()

    def stop(self) -> None:
        """Close all sockets."""
        self._reader.cancel()
        self._inbox.stop()
        for tokenizer in self._tokenizers:
            tokenizer.stop()

    # Inside

    def _check_open(self) -> None:
        if self._state is State.READY:
            return
        why = {
            State.STARTING: "the server is starting",
            State.DRAINING: "the server is shutting down",
            State.DEAD: "the engine has failed",
        }
        raise Unavailable(why[self._state])

    def _open(self, msg: TokenizeMsg) -> UnreadReplies:
        self._check_open()
        if len(self._streams) >= MAX_OPEN_REQUESTS or not self._send(msg):
            raise RequestFailed(ErrorKind.OVERLOADED, "too many requests at a time")
        stream = self._streams[msg.uid] = UnreadReplies()
        return stream

    async def _call(self, msg: EncodeMsg | DecodeMsg) -> Any:
        self._check_open()
        if len(self._calls) >= MAX_OPEN_REQUESTS or not self._send(msg):
            raise RequestFailed(ErrorKind.OVERLOADED, "too many requests at a time")
        call = self._calls[msg.uid] = asyncio.get_running_loop().create_future()
        try:
            return await call
        finally:
            self._calls.pop(msg.uid, None)

    def _send(self, msg: Any) -> bool:
        """Whether the tokenizer's queue had room for it."""
        try:
            has_room: bool = self._tokenizers[msg.uid % len(self._tokenizers)].try_put(msg)
        except (UnicodeEncodeError, OverflowError) as error:  # a lone surrogate, a huge number
            message = "the request holds a text or a number that cannot be sent"
            raise RequestFailed(ErrorKind.INVALID, message) from error
        return has_room

    async def _read(self) -> None:
        while True:
            msg = await self._inbox.get()
            for item in msg.data if isinstance(msg, BatchFrontendMsg) else [msg]:
                try:
                    self._take(item)
                except Exception:  # a bug of ours: the others still get their replies
                    logger.exception("a %s could not be handled", type(item).__name__)

    def _take(self, msg: BaseFrontendMsg) -> None:
        if isinstance(msg, UserReply):
            self._take_reply(msg)
        elif isinstance(msg, ErrorReply):
            self._take_error(msg)
        elif isinstance(msg, (EncodeReply, DecodeReply)):
            call = self._calls.get(msg.uid)
            if call is not None and not call.done():
                call.set_result(msg)
        elif isinstance(msg, EngineStats):
            self.stats = msg
        elif isinstance(msg, TokenizerStats):
            self._held_by_tokenizers[msg.index] = msg.held
        else:
            self._take_status(msg)

    def _take_reply(self, reply: UserReply) -> None:
        stream = self._streams.get(reply.uid)
        if stream is None:  # aborted meanwhile
            return
        if reply.finished:
            del self._streams[reply.uid]
        stream.put(reply)
        if stream.num_unread > MAX_UNREAD_TOKENS and not reply.finished:
            logger.warning("request %d is dropped: its client does not read", reply.uid)
            del self._streams[reply.uid]
            self._send(AbortMsg(reply.uid))
            stream.fail(RequestFailed(ErrorKind.TIMEOUT, "the client reads too slowly"))

    def _take_error(self, error: ErrorReply) -> None:
        failure = RequestFailed(error.kind, error.message, error.param)
        stream = self._streams.pop(error.uid, None)
        if stream is not None:
            stream.fail(failure)
        call = self._calls.get(error.uid)
        if call is not None and not call.done():
            call.set_exception(failure)

    def _take_status(self, msg: BaseFrontendMsg) -> None:
        if isinstance(msg, LoadProgress):
            if self._on_progress is not None:
                self._on_progress(msg.done, msg.total)
        elif isinstance(msg, StartFailed):
            self.start_failure = self.start_failure or msg
        elif isinstance(msg, EngineReady):
            self._engine = msg
        elif isinstance(msg, TokenizerReady):
            self._tokenizer = msg
            self._num_tokenizers_ready += 1
        if self._engine and self._tokenizer and self._info is None:
            if self._num_tokenizers_ready == len(self._tokenizers):
                self._info = _model_info(self._name, self._engine, self._tokenizer)
        self._progress.set()


def _model_info(name: str, engine: EngineReady, tokenizer: TokenizerReady) -> ModelInfo:
    return ModelInfo(
        name=name,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.vocab_size,
        num_pages=engine.num_pages,
        page_size=engine.page_size,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        sampling_defaults=tokenizer.sampling_defaults,
        chat_template=tokenizer.chat_template,
        tool_template=tokenizer.tool_template,
    )
