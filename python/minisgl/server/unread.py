"""What lies between the replies of one request and a consumer that may be slow.

Invariant: however many replies come before the consumer reads, they are one reply here.
"""

from __future__ import annotations

import asyncio

from minisgl.message import UserReply


class UnreadReplies:
    """The replies of one request that its consumer has not read: joined into one, or an error."""

    __slots__ = ("_error", "_unread", "_waiter")

    def __init__(self) -> None:
        self._unread: UserReply | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_unread(self) -> int:
        """Tokens that wait to be read."""
        return len(self._unread.token_ids) if self._unread else 0

    def put(self, reply: UserReply) -> None:
        """Add a reply to what is unread."""
        unread = self._unread
        if unread is None:
            self._unread = reply
        else:
            unread.incremental_output += reply.incremental_output
            unread.token_ids += reply.token_ids
            unread.logprobs += reply.logprobs
            unread.finished, unread.finish_reason = reply.finished, reply.finish_reason
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error; what is unread is dropped."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> UserReply:
        """Everything that is unread, as one reply; waits for it, or raises the error."""
        if self._error is None and self._unread is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        reply, self._unread = self._unread, None
        assert reply is not None
        return reply
