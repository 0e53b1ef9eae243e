"""Queues between processes: what is put arrives in order, and what is broken is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import zmq

from minisgl.message import AbortBackendMsg, BaseBackendMsg, UserMsg
from minisgl.params import SamplingParams
from minisgl.utils import ZmqPubQueue, ZmqPullQueue, ZmqPushQueue, ZmqSubQueue
from minisgl.utils.mp import MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES

ENCODER, DECODER = BaseBackendMsg.encoder, BaseBackendMsg.decoder


@pytest.fixture
def addr(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('q') / 's'}"


@pytest.fixture
def pull(addr: str) -> Iterator[ZmqPullQueue[BaseBackendMsg]]:
    queue: ZmqPullQueue[BaseBackendMsg] = ZmqPullQueue(addr, create=True, decoder=DECODER)
    yield queue
    queue.stop()


def test_messages_arrive_in_order(addr: str, pull: ZmqPullQueue[BaseBackendMsg]) -> None:
    push: ZmqPushQueue[BaseBackendMsg] = ZmqPushQueue(addr, create=False, encoder=ENCODER)
    sent = [UserMsg(1, [3, 4], SamplingParams(stop=["x"])), *map(AbortBackendMsg, range(99))]
    assert pull.empty()
    for message in sent:
        push.put(message)
    assert pull.get() == sent[0]
    got: list[BaseBackendMsg] = []
    while len(got) < 99:
        got += pull.get_all(5.0)
    assert got == sent[1:]
    assert pull.empty() and pull.get_all() == []
    push.stop()


def test_either_end_may_come_first(addr: str) -> None:
    push: ZmqPushQueue[BaseBackendMsg] = ZmqPushQueue(addr, create=False, encoder=ENCODER)
    push.put(AbortBackendMsg(7))
    pull: ZmqPullQueue[BaseBackendMsg] = ZmqPullQueue(addr, create=True, decoder=DECODER)
    assert pull.get() == AbortBackendMsg(7)
    push.stop()
    pull.stop()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xc1", b"\x91", b"\x81\xa8__type__\xa3Bad", bytes(MAX_MESSAGE_BYTES + 1)],
    ids=["empty", "invalid", "truncated", "unknown", "too long"],
)
def test_garbage_is_dropped_with_one_log_line(
    addr: str,
    pull: ZmqPullQueue[BaseBackendMsg],
    garbage: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(addr)
        socket.send(garbage)
        socket.send(b"\x82\xa8__type__\xafAbortBackendMsg\xa3uid\x05")
        assert pull.get() == AbortBackendMsg(5)
    assert capsys.readouterr().err.count("dropped a message") == 1


def test_a_queue_without_a_reader_is_bounded(addr: str) -> None:
    push: ZmqPushQueue[BaseBackendMsg] = ZmqPushQueue(addr, create=False, encoder=ENCODER)
    taken = sum(push.try_put(AbortBackendMsg(uid)) for uid in range(MAX_QUEUED_MESSAGES + 1))
    assert taken == MAX_QUEUED_MESSAGES
    push._socket.close(0)


def test_every_subscriber_sees_all_in_one_order(addr: str) -> None:
    pub: ZmqPubQueue[BaseBackendMsg] = ZmqPubQueue(addr, create=True, encoder=ENCODER)
    sent = [AbortBackendMsg(uid) for uid in range(20_000)]  # more than a queue holds
    got: list[list[BaseBackendMsg]] = [[], []]

    def listen(index: int) -> None:
        sub: ZmqSubQueue[BaseBackendMsg] = ZmqSubQueue(addr, create=False, decoder=DECODER)
        while len(got[index]) < len(sent):
            got[index].append(sub.get())
        sub.stop()

    threads = [Thread(target=listen, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    pub.wait_for_subscribers(2)
    for message in sent:
        pub.put(message)
    for thread in threads:
        thread.join(30)
    assert got[0] == sent and got[1] == sent
    pub.stop()


def test_a_socket_is_a_file_that_its_owner_makes(addr: str) -> None:
    path = Path(addr.removeprefix("ipc://"))
    assert not path.exists()
    pull: ZmqPullQueue[BaseBackendMsg] = ZmqPullQueue(addr, create=True, decoder=DECODER)
    assert path.is_socket()
    pull.stop()
