"""The frontend over real sockets; the test plays the tokenizer process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

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
    TokenizeMsg,
    TokenizerReady,
    UserReply,
)
from minisgl.params import ErrorKind, FinishReason, Logprob, PositionLogprobs, SamplingParams
from minisgl.server.frontend import (
    MAX_UNREAD_TOKENS,
    Frontend,
    RequestFailed,
    State,
    Unavailable,
)
from minisgl.utils import ZmqPushQueue
from minisgl.utils.mp import AsyncPullQueue

SECONDS = 20


class World:
    """A frontend and the other ends of its sockets."""

    def __init__(self, folder: Path, num_tokenizers: int) -> None:
        addrs = [f"ipc://{folder / f't{i}'}" for i in range(num_tokenizers)]
        self.frontend = Frontend(f"ipc://{folder / 'f'}", addrs, "tiny")
        self.tokenizers: list[AsyncPullQueue[BaseTokenizerMsg]] = [
            AsyncPullQueue(addr, True, BaseTokenizerMsg.decoder) for addr in addrs
        ]
        self._replies: ZmqPushQueue[BaseFrontendMsg] = ZmqPushQueue(
            f"ipc://{folder / 'f'}", False, BaseFrontendMsg.encoder
        )

    async def heard(self, index: int = 0) -> BaseTokenizerMsg:
        """The next message to a tokenizer."""
        return await asyncio.wait_for(self.tokenizers[index].get(), SECONDS)

    def say(self, *msgs: BaseFrontendMsg) -> None:
        """Messages to the frontend, as one batch."""
        self._replies.put(BatchFrontendMsg(list(msgs)))

    def stop(self) -> None:
        self.frontend.stop()
        self._replies.stop()
        for tokenizer in self.tokenizers:
            tokenizer.stop()

    def submit(self, **params: object) -> AsyncIterator[UserReply]:
        msg = TokenizeMsg(self.frontend.new_uid(), "hi", SamplingParams(**params))
        return self.frontend.generate(msg)

    async def settled(self) -> None:
        """Until all that was said before has been taken in."""
        mark = EngineStats(running=self.frontend.stats.running + 1)
        self.say(mark)
        while self.frontend.stats != mark:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(folder: Path, num_tokenizers: int = 1) -> AsyncIterator[World]:
    world = World(folder, num_tokenizers)
    try:
        world.frontend.open_for_requests()
        yield world
    finally:
        world.stop()


def with_world(
    test: Callable[[World], Awaitable[None]], num_tokenizers: int = 1
) -> Callable[[Path], None]:
    """A test that pytest can call, run on an event loop of its own."""

    def run(tmp_path: Path) -> None:
        async def body() -> None:
            async with opened(tmp_path, num_tokenizers) as world:
                await asyncio.wait_for(test(world), SECONDS)

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


def piece(uid: int, text: str, finished: bool = False) -> UserReply:
    ids = [ord(letter) for letter in text]
    reason = FinishReason.LENGTH if finished else None
    return UserReply(uid, text, finished, reason, ids, 2, 1)


@with_world
async def test_replies_reach_the_request_they_belong_to(world: World) -> None:
    one, other = world.submit(), world.submit()
    first = asyncio.ensure_future(anext(one))
    assert await world.heard() == TokenizeMsg(1, "hi", SamplingParams())
    second = asyncio.ensure_future(anext(other))
    assert (await world.heard()).uid == 2
    world.say(piece(2, "b"), piece(1, "a"), piece(77, "nobody's"))
    assert await first == piece(1, "a")
    assert await second == piece(2, "b")
    world.say(piece(1, "c", True), piece(2, "d", True))
    assert [reply async for reply in one] == [piece(1, "c", True)]
    assert [reply async for reply in other] == [piece(2, "d", True)]
    assert world.frontend.health().num_requests == 0


@with_world
async def test_what_a_slow_consumer_has_not_read_is_joined(world: World) -> None:
    answer = world.submit()
    first = asyncio.ensure_future(anext(answer))
    await world.heard()
    world.say(piece(1, "a"))
    await first
    told = PositionLogprobs(Logprob(98, -1.0))
    more = piece(1, "b")
    more.logprobs = [told]
    world.say(more, piece(1, "c"), piece(1, "d", True))
    await world.settled()
    rest = [reply async for reply in answer]
    expected = piece(1, "bcd", True)
    expected.logprobs = [told]
    assert rest == [expected]


@with_world
async def test_a_consumer_that_goes_away_aborts_its_request(world: World) -> None:
    async with aclosing(world.submit()) as answer:
        first = asyncio.ensure_future(anext(answer))
        await world.heard()
        world.say(piece(1, "a"))
        await first
    assert await world.heard() == AbortMsg(1)
    assert world.frontend.health().num_requests == 0


@with_world
async def test_a_consumer_that_is_cancelled_before_the_first_token_aborts_too(
    world: World,
) -> None:
    waiting = asyncio.ensure_future(anext(world.submit()))
    await world.heard()
    waiting.cancel()
    assert await world.heard() == AbortMsg(1)


@with_world
async def test_a_consumer_that_never_reads_is_dropped_at_the_bound(world: World) -> None:
    answer = world.submit()
    first = asyncio.ensure_future(anext(answer))
    await world.heard()
    world.say(piece(1, "a"))
    await first
    for _ in range(MAX_UNREAD_TOKENS // 512):
        world.say(piece(1, "x" * 512))
    await world.settled()
    assert world.frontend.health().num_requests == 1
    world.say(piece(1, "x"))
    assert await world.heard() == AbortMsg(1)
    with pytest.raises(RequestFailed, match="reads too slowly"):
        await anext(answer)


@with_world
async def test_an_error_names_its_kind_and_field(world: World) -> None:
    first = asyncio.ensure_future(anext(world.submit()))
    await world.heard()
    world.say(ErrorReply(1, "queue is full", "p", ErrorKind.OVERLOADED))
    with pytest.raises(RequestFailed, match="queue is full") as caught:
        await first
    assert (caught.value.kind, caught.value.param) == (ErrorKind.OVERLOADED, "p")


@with_world
async def test_what_cannot_travel_is_refused(world: World) -> None:
    for text in ("\ud800", [2**70]):
        with pytest.raises(RequestFailed) as caught:
            await world.frontend.tokenize(text)
        assert caught.value.kind is ErrorKind.INVALID


@with_world
async def test_the_death_of_the_engine_ends_all_that_waits(world: World) -> None:
    waiting = [asyncio.ensure_future(anext(world.submit())) for _ in range(3)]
    call = asyncio.ensure_future(world.frontend.tokenize("x"))
    for _ in range(4):
        await world.heard()
    world.frontend.fail("killed")
    for one in [*waiting, call]:
        with pytest.raises(Unavailable):
            await one
    with pytest.raises(Unavailable):
        await anext(world.submit())
    health = world.frontend.health()
    assert (health.state, health.num_requests, health.reason) == (State.DEAD, 0, "killed")


@with_world
async def test_while_it_drains_nothing_new_is_taken(world: World) -> None:
    running = asyncio.ensure_future(anext(world.submit()))
    await world.heard()
    world.frontend.refuse_requests()
    with pytest.raises(Unavailable, match="shutting down"):
        await anext(world.submit())
    world.say(piece(1, "a", True))
    assert (await running).finished


@with_world
async def test_an_abort_from_outside_ends_the_stream(world: World) -> None:
    waiting = asyncio.ensure_future(anext(world.submit()))
    await world.heard()
    await world.frontend.abort(1)
    await world.frontend.abort(99)
    assert await world.heard() == AbortMsg(1)
    with pytest.raises(RequestFailed, match="aborted"):
        await waiting


@with_world
async def test_texts_and_ids_are_converted_by_a_tokenizer(world: World) -> None:
    call = asyncio.ensure_future(world.frontend.tokenize("hi", add_special_tokens=False))
    assert await world.heard() == EncodeMsg(1, "hi", False)
    world.say(EncodeReply(1, [7]))
    assert await call == [7]
    back = asyncio.ensure_future(world.frontend.detokenize([7]))
    assert await world.heard() == DecodeMsg(2, [7])
    world.say(DecodeReply(2, "hi"))
    assert await back == "hi"


async def _keeps_to_one_tokenizer(world: World) -> None:
    waiting = [asyncio.ensure_future(anext(world.submit())) for _ in range(4)]
    assert [(await world.heard(0)).uid for _ in range(2)] == [2, 4]
    assert [(await world.heard(1)).uid for _ in range(2)] == [1, 3]
    for one in waiting:
        one.cancel()
    assert [await world.heard(0) for _ in range(2)] == [AbortMsg(2), AbortMsg(4)]


test_a_request_keeps_to_one_tokenizer = with_world(_keeps_to_one_tokenizer, 2)


@with_world
async def test_the_model_is_known_when_all_are_ready(world: World) -> None:
    with pytest.raises(Unavailable):
        _ = world.frontend.info
    world.say(EngineReady(100, 260, 50, 2))
    await world.settled()
    assert not world.frontend.is_started()
    world.say(TokenizerReady(0, [257], 260, {"temperature": 0.5}, "{{ x }}", None))
    await world.settled()
    info = world.frontend.info
    assert (info.name, info.max_seq_len, info.vocab_size, info.page_size) == ("tiny", 100, 260, 2)
    assert (info.eos_token_ids, info.sampling_defaults) == ((257,), {"temperature": 0.5})
    assert (info.chat_template, info.tool_template) == ("{{ x }}", None)
