"""From a checked request to the pieces of its answers: what streams and whole answers share.

May import `params`, `message` and the server's modules. Invariant: both kinds of answer are made of
the same pieces; closing them aborts whatever of the request still runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from minisgl import __version__
from minisgl.config import ServerArgs
from minisgl.message import TokenizeMsg, UserReply
from minisgl.params import MAX_SEED, InvalidRequestError, SamplingParams
from minisgl.utils import init_logger

from .bounds import MAX_CHOICES_BYTES
from .errors import ApiError, bad_request, failure, from_invalid, unavailable
from .frontend import Frontend, RequestFailed, Unavailable
from .metrics import Metrics
from .protocol import check_model, renamed
from .reasoning import prompt_opens_reasoning, template_reasons
from .replies import CachedTokens, Reply, Usage
from .stream import DONE, event

logger = init_logger(__name__)

MAX_TEMPLATE_VARIANTS = 64
FINGERPRINT = f"minisgl-{__version__}"
_PROBE = [{"role": "user", "content": "-"}]


@dataclass(slots=True)
class Server:
    """What the routes of one app share."""

    frontend: Frontend
    args: ServerArgs
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    _opening: dict[str, bool] = field(default_factory=dict)  # by template arguments

    def defaults(self) -> SamplingParams:
        """How to sample where a request is silent."""
        return SamplingParams(**self.frontend.info.sampling_defaults)

    def model_name(self, asked: str | None) -> str:
        """The name that answers carry: the one asked for, if it is served; else `ApiError` 404."""
        check_model(asked, self.args.served_model_name)
        return asked or self.frontend.info.name

    async def opens_reasoning(self, template_args: dict[str, Any]) -> bool | None:
        """Whether the template opens the tag of reasoning; None if the model does not reason."""
        if not template_reasons(self.frontend.info.chat_template):
            return None
        key = json.dumps(template_args, sort_keys=True)
        if key not in self._opening:
            try:
                ids = await self.frontend.tokenize(_PROBE, template_args=template_args)
                prompt = await self.frontend.detokenize(ids)
            except RequestFailed:
                return False  # the request itself will tell why
            if len(self._opening) >= MAX_TEMPLATE_VARIANTS:
                self._opening.clear()
            self._opening[key] = prompt_opens_reasoning(prompt)
        return self._opening[key]


def server_of(request: Request) -> Server:
    """The state of the app that a request came to."""
    server: Server = request.app.state.server
    return server


def failed(
    error: RequestFailed, request_id: str, names: Mapping[str, str] | None = None
) -> ApiError:
    """The answer to a request that failed behind the frontend; names: how a client calls fields."""
    if isinstance(error, Unavailable):
        return unavailable(str(error))
    if error.kind.value == "failed":
        logger.error("%s failed: %s", request_id, error)
    told = renamed(InvalidRequestError(str(error), error.param), names or {})
    return failure(error.kind, str(told), told.param, request_id)


class Generation:
    """The choices of one HTTP request: `n` for each prompt, and the counts of their tokens.

    prompts: texts, ids or messages. fields: more of `TokenizeMsg`. names: what the client calls
    the fields of `SamplingParams`, for errors. The choice of index i answers prompt i // n.
    """

    def __init__(
        self,
        request: Request,
        model: str,
        prompts: list[Any],
        params: SamplingParams,
        *,
        n: int = 1,
        names: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        self.server = server_of(request)
        self.request_id: str = request.state.request_id
        self.model = model
        self.created = int(time.time())
        self.n = n
        self._state = request.scope["state"]
        self._names = names or {}
        self._num_prompt: dict[int, tuple[int, int]] = {}  # of each prompt: tokens, cached ones
        self._num_generated = 0
        self.msgs: list[TokenizeMsg] = []
        if n * request.state.num_body_bytes > MAX_CHOICES_BYTES:  # each choice carries a prompt
            raise bad_request(f"n times the request is over {MAX_CHOICES_BYTES} bytes", "n")
        new_uid = self.server.frontend.new_uid
        for prompt in prompts:
            uids = [new_uid() for _ in range(n)]
            for i, uid in enumerate(uids):
                own = params if i == 0 else _with_own_seed(params, i)
                group = uids[0] if n > 1 else None
                self.msgs.append(TokenizeMsg(uid, prompt, own, group=group, **fields))

    async def replies(self) -> AsyncGenerator[tuple[int, UserReply], None]:
        """(index of the choice, its next piece) until all have ended; raises `ApiError`."""
        start = time.perf_counter()
        last = [start] * len(self.msgs)
        metrics = self.server.metrics
        try:
            async with aclosing(self._merged()) as merged:
                async for i, reply in merged:
                    now = time.perf_counter()
                    num_new = len(reply.token_ids)
                    if last[i] == start:
                        metrics.first_token.observe(now - start)
                        self._num_prompt.setdefault(
                            i // self.n, (reply.num_prompt_tokens, reply.num_cached_tokens)
                        )
                    elif num_new:
                        metrics.between_tokens.observe((now - last[i]) / num_new)
                    last[i] = now
                    self._num_generated += num_new
                    if reply.finished:
                        metrics.whole.observe(now - start)
                    yield i, reply
        except RequestFailed as error:
            raise failed(error, self.request_id, self._names) from error
        except InvalidRequestError as error:
            raise from_invalid(renamed(error, self._names)) from error
        finally:
            self._state["usage"] = self.usage()

    def _merged(self) -> AsyncGenerator[tuple[int, UserReply], None]:
        return self._single() if len(self.msgs) == 1 else self._several()

    async def _single(self) -> AsyncGenerator[tuple[int, UserReply], None]:
        replies = self.server.frontend.generate(self.msgs[0])
        async with aclosing(replies):  # type: ignore[type-var]
            async for reply in replies:
                yield 0, reply

    async def _several(self) -> AsyncGenerator[tuple[int, UserReply], None]:
        """The pieces of all choices as they come; what fails one fails all."""
        queue: asyncio.Queue[tuple[int, UserReply | BaseException]]
        queue = asyncio.Queue(maxsize=len(self.msgs))

        async def pump(i: int, replies: AsyncIterator[UserReply]) -> None:
            try:
                async with aclosing(replies):  # type: ignore[type-var]
                    async for reply in replies:
                        await queue.put((i, reply))
            except Exception as error:
                await queue.put((i, error))

        generate = self.server.frontend.generate
        tasks = [asyncio.ensure_future(pump(i, generate(msg))) for i, msg in enumerate(self.msgs)]
        try:
            num_left = len(tasks)
            while num_left:
                i, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= item.finished
                yield i, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def usage(self) -> Usage:
        """The counts so far."""
        num_prompt = sum(tokens for tokens, _ in self._num_prompt.values())
        num_cached = sum(cached for _, cached in self._num_prompt.values())
        total = num_prompt + self._num_generated
        return Usage(num_prompt, self._num_generated, total, CachedTokens(num_cached))

    def drop_generated(self) -> None:
        """Count no generated tokens: the client asked for none."""
        self._num_generated = 0

    def reply(self, id: str, object: str, choices: list[Any], **usage: Any) -> Reply:
        """The frame of an answer or of a chunk."""
        return Reply(
            id=id,
            object=object,
            created=self.created,
            model=self.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            **usage,
        )

    async def chunks(
        self, prefix: str, object: str, choices: AsyncGenerator[Any, None], has_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Pieces of choices as server-sent events; has_usage: the last one tells the counts."""
        usage: dict[str, Any] = {"usage": None} if has_usage else {}
        chunk = self.reply(new_id(prefix), object, [], **usage)
        async with aclosing(choices):
            async for choice in choices:
                chunk.choices = [choice]
                yield event(chunk)
        if has_usage:
            chunk.choices, chunk.usage = [], self.usage()
            yield event(chunk)
        yield DONE


def _with_own_seed(params: SamplingParams, i: int) -> SamplingParams:
    """The parameters of choice i: with one seed for all, they would all be the same."""
    if params.seed is None:
        return params
    seed = params.seed + i if params.seed + i <= MAX_SEED else params.seed - i
    return dataclasses.replace(params, seed=seed)


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{uuid.uuid4().hex}"
