"""A frontend without processes: the tiny model's scheduler on a thread, or answers from a script.

It has the methods of `minisgl.server.frontend.Frontend` that the routes call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.config import SchedulerConfig
from minisgl.engine import Engine
from minisgl.llm.answer import Answer
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    DetokenizeMsg,
    EngineStats,
    ExitMsg,
    TokenizeMsg,
    UserMsg,
    UserReply,
)
from minisgl.params import ErrorKind, FinishReason, InvalidRequestError
from minisgl.scheduler import Scheduler
from minisgl.server.frontend import Health, ModelInfo, RequestFailed, State
from minisgl.tokenizer import TokenizeManager, load_tokenizer, sampling_defaults

End = UserReply | RequestFailed


class Base:
    """What both kinds share."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.stats = EngineStats()
        self.state = State.READY
        self.aborted: list[int] = []
        self.submitted: list[TokenizeMsg] = []
        self._uids = itertools.count(1)

    def new_uid(self) -> int:
        return next(self._uids)

    def health(self) -> Health:
        return Health(self.state, {}, 0)

    async def tokenize(self, text: Any, **options: Any) -> list[int]:
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        raise NotImplementedError


class LocalFrontend(Base):
    """The real scheduler and engine of a model folder, on a thread of this process."""

    def __init__(self, model: Path, **fields: Any) -> None:
        config = SchedulerConfig(str(model), **fields)
        self.tokenizer = load_tokenizer(model)
        engine = Engine(config)
        super().__init__(
            ModelInfo(
                name=model.name,
                max_seq_len=engine.max_seq_len,
                vocab_size=engine.vocab_size,
                num_pages=engine.num_pages,
                page_size=config.page_size,
                sampling_defaults=sampling_defaults(model),
            )
        )
        self._tokenize = TokenizeManager(self.tokenizer)
        self._inbox: queue.Queue[BaseBackendMsg] = queue.Queue()
        self._answers: dict[int, tuple[Answer, asyncio.Queue[End], Any, int]] = {}
        self.scheduler = Scheduler(
            config, engine, self, eos_token_ids=self.tokenizer.eos_token_ids
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with torch.inference_mode():
            self.scheduler.run_forever()

    def close(self) -> None:
        self._inbox.put(ExitMsg())
        self._thread.join(30)
        self.scheduler.shutdown()
        self.scheduler.engine.shutdown()

    # The scheduler's side

    def receive(self, blocking: bool) -> list[BaseBackendMsg]:
        found = [self._inbox.get()] if blocking else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        for msg in replies:
            if msg.uid not in self._answers:
                continue
            answer, waiting, loop, num_prompt = self._answers[msg.uid]
            if msg.error is not None:
                failure = RequestFailed(msg.error_kind, msg.error, msg.error_param)
                loop.call_soon_threadsafe(waiting.put_nowait, failure)
                continue
            found = answer.take(msg)
            if found is None:
                continue
            ends = found.finish_reason is not None
            if ends and not msg.finished:
                self._inbox.put(AbortBackendMsg(msg.uid))
            reply = UserReply(
                msg.uid, found.text, ends, found.finish_reason, found.token_ids, num_prompt
            )
            loop.call_soon_threadsafe(waiting.put_nowait, reply)
            if ends:
                self._answers.pop(msg.uid, None)

    # The routes' side

    async def generate(self, msg: TokenizeMsg) -> AsyncIterator[UserReply]:
        self.submitted.append(msg)
        ids = await self._ids(msg.text, msg.tools, msg.template_args)
        waiting: asyncio.Queue[End] = asyncio.Queue()
        answer = Answer(msg.uid, self.tokenizer, msg.sampling_params.stop)
        self._answers[msg.uid] = (answer, waiting, asyncio.get_running_loop(), len(ids))
        self._inbox.put(UserMsg(msg.uid, ids, msg.sampling_params))
        ended = False
        try:
            while not ended:
                reply = await waiting.get()
                ended = isinstance(reply, RequestFailed) or reply.finished
                if isinstance(reply, RequestFailed):
                    raise reply
                yield reply
        finally:
            self._answers.pop(msg.uid, None)
            if not ended:
                self.aborted.append(msg.uid)
                self._inbox.put(AbortBackendMsg(msg.uid))

    async def _ids(self, text: Any, tools: Any = None, args: Any = None) -> list[int]:
        if isinstance(text, list) and text and isinstance(text[0], int):
            return text
        try:
            return self._tokenize.encode(text, tools, args)
        except InvalidRequestError as error:
            raise RequestFailed(ErrorKind.INVALID, str(error), error.param) from None

    async def tokenize(self, text: Any, **options: Any) -> list[int]:
        if isinstance(text, str):
            return self.tokenizer.encode(text, add_special_tokens=options["add_special_tokens"])
        return await self._ids(text, options.get("tools"), options.get("template_args"))

    async def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        return self.tokenizer.decode(list(token_ids))


class ScriptedFrontend(Base):
    """Answers every request with the same pieces: texts, replies, errors, or events to wait for.

    A text is a reply of one token; the last item ends the answer unless it is an error or an event.
    """

    def __init__(self, *script: Any, **info: Any) -> None:
        super().__init__(
            ModelInfo(
                **{
                    "name": "scripted",
                    "max_seq_len": 1024,
                    "vocab_size": 256,
                    "num_pages": 1024,
                    "page_size": 1,
                    **info,
                }
            )
        )
        self.script = script
        self.ended = asyncio.Event()

    async def generate(self, msg: TokenizeMsg) -> AsyncIterator[UserReply]:
        self.submitted.append(msg)
        has_ended = False
        try:
            for i, item in enumerate(self.script):
                is_last = i == len(self.script) - 1
                if isinstance(item, Exception):
                    has_ended = True
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                if isinstance(item, str):
                    reason = FinishReason.STOP if is_last else None
                    item = UserReply(msg.uid, item, is_last, reason, [i], 3, 1)
                has_ended = item.finished
                yield item
        finally:
            if not has_ended:
                self.aborted.append(msg.uid)
            self.ended.set()

    async def tokenize(self, text: Any, **options: Any) -> list[int]:
        text = text if isinstance(text, str) else "".join(m["content"] for m in text)
        return list(text.encode())

    async def detokenize(self, token_ids: Sequence[int], **options: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")
