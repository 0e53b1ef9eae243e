"""The tokenizer process: text to ids on the way in, ids to text on the way out.

`python -m minisgl.tokenizer.worker` is started by the server. Everything that waits is taken in at
once and leaves as one batch in each direction. Invariant: it holds state for a request from its
submit to its end, and forgets it then, whichever way it ends. May import `params`, `message` and
`utils`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BaseBackendMsg,
    BaseFrontendMsg,
    BaseTokenizerMsg,
    BatchBackendMsg,
    BatchFrontendMsg,
    BatchTokenizerMsg,
    DecodeMsg,
    DecodeReply,
    DetokenizeMsg,
    EncodeMsg,
    EncodeReply,
    ErrorReply,
    FromWire,
    StartFailed,
    TokenizeMsg,
    TokenizerReady,
    TokenizerStats,
    UserMsg,
    VocabularyMsg,
    to_wire,
)
from minisgl.params import ErrorKind, InvalidRequestError, MinisglError
from minisgl.utils import ZmqPullQueue, ZmqPushQueue, init_logger
from minisgl.utils.process import Addresses, end_with_parent, read_task

from .answer import GrowingAnswer
from .decoder import TokenBytes
from .generation import sampling_defaults
from .load import load_tokenizer
from .tokenize import TokenizeManager

logger = init_logger(__name__)

STATS_SECONDS = 0.5


class TokenizerWorker:
    """What the process does with messages, without its sockets.

    tokenizer: of the model. `answers` holds the state of each request that has not ended.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.answers: dict[int, GrowingAnswer] = {}
        self._manager = TokenizeManager(tokenizer)
        self._bytes = TokenBytes(tokenizer)
        self._to_scheduler: list[BaseBackendMsg] = []
        self._to_frontend: list[BaseFrontendMsg] = []

    def process(
        self, messages: Iterable[BaseTokenizerMsg]
    ) -> tuple[list[BaseBackendMsg], list[BaseFrontendMsg]]:
        """Act on messages in order; what to send to the scheduler, and to the frontend."""
        self._to_scheduler, self._to_frontend = [], []
        for msg in messages:
            self._one(msg)
        return self._to_scheduler, self._to_frontend

    def _one(self, msg: BaseTokenizerMsg) -> None:
        if isinstance(msg, DetokenizeMsg):
            self._detokenize(msg)
        elif isinstance(msg, BatchTokenizerMsg):
            for item in msg.data:
                self._one(item)
        elif isinstance(msg, TokenizeMsg):
            try:
                self._submit(msg)
            except Exception:  # a bug of ours: the other requests go on
                logger.exception("request %d cannot be submitted", msg.uid)
                self.answers.pop(msg.uid, None)
                self._refuse(msg.uid, InvalidRequestError("the request cannot be submitted"))
        elif isinstance(msg, AbortMsg):
            self.answers.pop(msg.uid, None)
            self._to_scheduler.append(AbortBackendMsg(msg.uid))
        elif isinstance(msg, (EncodeMsg, DecodeMsg)):
            self._to_frontend.append(self._convert(msg))

    def _submit(self, msg: TokenizeMsg) -> None:
        ids = self._manager.tokenize([msg])[0]
        if isinstance(ids, InvalidRequestError):
            self._refuse(msg.uid, ids)
            return
        self.answers[msg.uid] = GrowingAnswer(
            msg.uid, self.tokenizer, msg.sampling_params.stop, self._bytes, holds_tokens=True
        )
        self._to_scheduler.append(
            UserMsg(
                msg.uid,
                ids,
                msg.sampling_params,
                group=msg.group,
                salt=msg.salt,
                priority=msg.priority,
                deadline=msg.deadline,
            )
        )

    def _refuse(self, uid: int, error: InvalidRequestError) -> None:
        self._to_frontend.append(ErrorReply(uid, str(error), error.param, ErrorKind.INVALID))

    def _detokenize(self, msg: DetokenizeMsg) -> None:
        answer = self.answers.get(msg.uid)
        if answer is None:  # aborted, or stopped by a string, while this was on its way
            return
        if msg.error is not None:
            del self.answers[msg.uid]
            self._to_frontend.append(
                ErrorReply(msg.uid, msg.error, msg.error_param, msg.error_kind)
            )
            return
        reply = answer.take(msg)
        if reply is None:
            return
        self._to_frontend.append(reply)
        if reply.finished:
            del self.answers[msg.uid]
            if not msg.finished:
                self._to_scheduler.append(AbortBackendMsg(msg.uid))

    def _convert(self, msg: EncodeMsg | DecodeMsg) -> BaseFrontendMsg:
        try:
            if isinstance(msg, DecodeMsg):
                text = self.tokenizer.decode(
                    msg.token_ids, skip_special_tokens=msg.skip_special_tokens
                )
                return DecodeReply(msg.uid, text)
            if isinstance(msg.text, str):
                ids = self.tokenizer.encode(msg.text, add_special_tokens=msg.add_special_tokens)
            else:
                ids = self._manager.encode(msg.text, msg.tools, msg.template_args)
            return EncodeReply(msg.uid, list(ids))
        except InvalidRequestError as error:
            return ErrorReply(msg.uid, str(error), error.param, ErrorKind.INVALID)
        except Exception:
            logger.exception("message %d cannot be converted", msg.uid)
            return ErrorReply(msg.uid, "the text cannot be converted", None, ErrorKind.INVALID)


def main() -> int:
    """Load the model's tokenizer, tell everyone, and work until the parent is gone."""
    task = read_task()
    addresses, index = Addresses(task["folder"]), int(task["index"])
    end_with_parent(addresses.folder)
    to_frontend: ZmqPushQueue[BaseFrontendMsg] = ZmqPushQueue(addresses.frontend, False, to_wire)
    to_scheduler: ZmqPushQueue[BaseBackendMsg] = ZmqPushQueue(addresses.scheduler, False, to_wire)
    inbox: ZmqPullQueue[BaseTokenizerMsg] = ZmqPullQueue(
        addresses.tokenizer(index), True, FromWire(BaseTokenizerMsg)
    )
    try:
        tokenizer = load_tokenizer(task["model"])
        defaults = sampling_defaults(task["model"]) if task["advice"] else {}
    except MinisglError as error:
        to_frontend.put(StartFailed(f"tokenizer {index}", str(error)))
        to_frontend.stop()
        return 1
    eos = sorted(tokenizer.eos_token_ids)
    if index == 0:
        to_scheduler.put(VocabularyMsg(eos))
    to_frontend.put(
        TokenizerReady(
            index,
            eos,
            tokenizer.vocab_size,
            defaults,
            tokenizer.chat_template,
            tokenizer.tool_template,
        )
    )
    worker = TokenizerWorker(tokenizer)
    told, told_at = -1, 0.0
    while True:
        held = len(worker.answers)
        is_due = held != told and (not held or time.monotonic() - told_at >= STATS_SECONDS)
        if is_due and to_frontend.try_put(TokenizerStats(index, held)):
            told, told_at = held, time.monotonic()
        messages = inbox.get_all(None if held == told else STATS_SECONDS)
        backend, frontend = worker.process(messages)
        if backend:
            to_scheduler.put(BatchBackendMsg(backend))
        if frontend:
            to_frontend.put(BatchFrontendMsg(frontend))


if __name__ == "__main__":
    sys.exit(main())
