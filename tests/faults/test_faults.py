"""What a server must survive, and how it must die: real processes, real signals, real sockets.

Every fault that is survived has the same epilogue, `Server.expect_sound`; every fatal one has
another, `expect_truthful_end`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from minisgl.utils.mp import MAX_MESSAGE_BYTES

from tests.llm.tiny import write_model
from tests.server.harness import Server, Stream, clock, is_alive, running, wait_until

slow = pytest.mark.slow  # each starts a server; those without it are one of each kind
SLOW_STEPS = {"SIM_SECONDS": "0.02"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def expect_truthful_end(server: Server, streams: list[Stream], pids: dict[str, int]) -> None:
    """Streams end with an error within 2 s, /health is 503, all is gone within 10 s, and not 0."""
    start = clock()
    for stream in streams:
        assert "error" in stream.lines()[-1]
    assert clock() - start < 2
    status, health = server.get("/health")
    assert (status, health["state"]) == (503, "dead")
    assert server.ask("POST", "/generate", {"prompt": "late", "max_tokens": 1})[0] == 503
    assert server.end(10) == 1
    for name, pid in pids.items():
        wait_until(lambda pid=pid: not is_alive(pid), 1, f"{name} has ended")
    assert clock() - start < 10


def open_streams(server: Server, num: int = 4) -> list[Stream]:
    streams = [server.stream(f"stream {i}", max_tokens=4000) for i in range(num)]
    for stream in streams:
        assert stream.next()["text"]
    return streams


# --- fatal: a process dies, a step fails ----------------------------------------------------------


def kill(module: str) -> Callable[[Server], None]:
    return lambda server: os.kill(server.children()[module], signal.SIGKILL)


def send(prompt: str) -> Callable[[Server], None]:
    def fault(server: Server) -> None:
        stream = server.stream(prompt, max_tokens=4)
        stream.response  # noqa: B018 - the fault happens when it is computed
        stream.close()

    return fault


FATAL = {
    "kill -9 of the scheduler": (kill("minisgl.worker"), 1),
    "kill -9 of a tokenizer": (kill("minisgl.tokenizer.worker"), 1),
    "a forward raises": (send("#raise0"), 1),
    "a forward raises on one rank only": (send("#raise1"), 2),
    "the scheduler ends by itself in a step": (send("#exit"), 1),
}
QUICK = ("kill -9 of the scheduler", "a forward raises on one rank only")


def some_slow(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """All names; those that are not in `quick` are marked slow."""
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize("name", some_slow(FATAL, QUICK))
def test_a_fatal_fault_ends_everything_and_says_so(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    fault, tp_size = FATAL[name]
    with running(tmp_path, tiny_model, env=SLOW_STEPS, tp_size=tp_size) as server:
        pids = server.children()
        assert len(pids) == tp_size + 1
        streams = open_streams(server)
        fault(server)
        expect_truthful_end(server, streams, pids)


def test_kill_9_of_the_server_ends_its_children_and_the_port_is_free_at_once(
    tmp_path: Path, tiny_model: Path
) -> None:
    with running(tmp_path, tiny_model, env=SLOW_STEPS) as server:
        pids = server.children()
        open_streams(server, 2)
        server.process.kill()
        with running(tmp_path / "again", tiny_model, server_port=server.address[1]) as again:
            again.expect_sound()
        for name, pid in pids.items():
            wait_until(lambda pid=pid: not is_alive(pid), 10, f"{name} has ended")
        assert server.end() == -signal.SIGKILL


# --- survived -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """One for all faults that a server survives: each must leave it as it was."""
    with running(
        tmp_path_factory.mktemp("server"), tiny_model, env=SLOW_STEPS, max_running_req=4
    ) as server:
        yield server


def nan_in_one_row(server: Server) -> None:
    others = open_streams(server, 2)
    bad = server.stream("#nan", max_tokens=4)
    assert "NaN" in bad.lines()[-1]["error"]
    for stream in others:
        assert stream.next()["text"]
        stream.close()


def gone_before_the_first_token(server: Server) -> None:
    stream = server.stream("gone", max_tokens=4000)
    stream.close()


def gone_in_mid_stream(server: Server) -> None:
    for stream in open_streams(server):
        stream.close()


def gone_while_queued(server: Server) -> None:
    running = open_streams(server)  # all rows are taken
    queued = [server.stream("queued", max_tokens=4000) for _ in range(4)]
    wait_until(lambda: server.get("/stats")[1]["waiting"] == 4, 5, "four wait")
    for stream in queued:
        stream.close()
    wait_until(lambda: server.get("/stats")[1]["waiting"] == 0, 5, "none waits")
    for stream in running:
        stream.close()


def gone_at_the_last_token(server: Server) -> None:
    for _ in range(4):
        stream = server.stream("brief", max_tokens=2)
        stream.next()
        stream.close()


def garbage_on_every_queue(server: Server) -> None:
    (folder,) = server.sockets.glob("minisgl-*")
    garbage = [
        b"",
        b"\xc1",
        b"\x93\x01",
        b'{"__type__":1}',
        b"\x81\xa8__type__\xa3Bad",
        b"x" * 9999,
        bytes(MAX_MESSAGE_BYTES + 1),
    ]
    with zmq.Context() as context:
        for name in ("frontend", "scheduler", "tokenizer-0"):
            with context.socket(zmq.PUSH) as socket:
                socket.connect(f"ipc://{folder / name}")
                for data in garbage:
                    socket.send(data)
    wait_until(
        lambda: server.stderr.count("dropped a message") == 3 * len(garbage),
        10,
        "one log line for each",
    )


SURVIVED = [
    nan_in_one_row,
    gone_before_the_first_token,
    gone_in_mid_stream,
    gone_while_queued,
    gone_at_the_last_token,
    garbage_on_every_queue,
]


@pytest.mark.parametrize("fault", SURVIVED, ids=lambda fault: fault.__name__)
def test_a_fault_is_survived(fault: Callable[[Server], None], server: Server) -> None:
    fault(server)
    server.expect_sound()


def test_health_is_cheap_while_the_engine_is_busy(server: Server) -> None:
    streams = open_streams(server)
    start = clock()
    for _ in range(100):
        assert server.get("/health")[0] == 200
    assert clock() - start < 2
    for stream in streams:
        stream.close()
    server.expect_sound()


# --- signals --------------------------------------------------------------------------------------


def test_sigterm_lets_what_runs_finish_and_takes_nothing_new(
    tmp_path: Path, tiny_model: Path
) -> None:
    with running(tmp_path, tiny_model, env=SLOW_STEPS) as server:
        stream = server.stream("last", max_tokens=60)
        assert stream.next()["text"]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health")[0] == 503, 2, "it drains")
        assert server.get("/health")[1]["state"] == "draining"
        assert server.ask("POST", "/generate", {"prompt": "late", "max_tokens": 1})[0] == 503
        assert stream.lines()[-1]["reason"] == "length"
        assert server.end() == 0


@slow
def test_what_outlasts_the_drain_gets_an_error(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model, env=SLOW_STEPS, drain_seconds=0.3) as server:
        streams = open_streams(server)
        server.process.send_signal(signal.SIGINT)
        for stream in streams:
            assert "shutting down" in stream.lines()[-1]["error"]
        assert server.end() == 0


def test_a_second_sigterm_is_immediate(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model, env=SLOW_STEPS) as server:
        pids = server.children()
        open_streams(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health")[0] == 503, 2, "it drains")
        start = clock()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert clock() - start < 1
        assert not any(map(is_alive, pids.values()))


# --- a start that fails ---------------------------------------------------------------------------


def broken(folder: Path, what: str) -> Path:
    """A model that cannot be loaded."""
    if what == "missing":
        return folder / "nothing"
    write_model(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if what == "no weights":
        weights.unlink()
    elif what == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif what == "wrong shapes":
        config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    elif what == "bad config":
        config.write_text("{")
    return folder


REAL = "minisgl.engine:Engine"
FAILING_STARTS = {
    "missing": (REAL, "", "nothing"),
    "no weights": (REAL, "", "safetensors"),
    "truncated weights": (REAL, "", "model.safetensors"),
    "wrong shapes": (REAL, "", "must be (260, 128)"),
    "bad config": (REAL, "", "config.json"),
    "load error": (None, "load error", "cheese"),
    "load crash": (None, "load crash", "the scheduler ended with exit code 7"),
    "load bug": (None, "load bug", "the scheduler ended with exit code 1"),
}


def ended(server: Server) -> int:
    """The exit code of a server that does not start."""
    try:
        return server.end(30)
    finally:
        server.kill_all()


@pytest.mark.parametrize(
    "name", some_slow(FAILING_STARTS, ("missing", "truncated weights", "load crash"))
)
def test_a_start_that_fails_says_why_in_one_line(name: str, tmp_path: Path) -> None:
    engine, fault, words = FAILING_STARTS[name]
    args = {"engine": engine} if engine else {"engine": "tests.server.simulated:make_engine"}
    model = broken(tmp_path / "model", name)
    args |= {"model_path": str(model), "server_port": 0, "num_page_override": 64}
    server = Server(tmp_path, args, {"SIM_FAULT": fault})
    assert ended(server) == 1
    told = [line for line in server.stderr.splitlines() if line.startswith("minisgl:")]
    assert len(told) == 1 and words in told[0], server.stderr
    if name != "load bug":  # of a bug of ours the traceback is welcome
        assert "Traceback" not in server.stderr


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(
    tmp_path: Path, tiny_model: Path
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        args = {"model_path": str(tiny_model), "server_port": port, "engine": "no.such:thing"}
        server = Server(tmp_path, args, {})
        assert ended(server) == 1
        assert f"port (--port) {port} on 127.0.0.1 is taken" in server.stderr
        assert len(server.stderr.splitlines()) == 1


@slow
def test_a_signal_while_loading_ends_it_at_once(tmp_path: Path, tiny_model: Path) -> None:
    args = {"model_path": str(tiny_model), "server_port": 0}
    args["engine"] = "tests.server.simulated:make_engine"
    server = Server(tmp_path, args, {"SIM_FAULT": "load forever"})
    try:
        pids = wait_until(lambda: len(found := server.children()) == 2 and found, 20, "it loads")
        folder = wait_until(lambda: list(server.sockets.glob("*/frontend")), 20, "the loop runs")
        assert folder
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not any(map(is_alive, pids.values()))
    finally:
        server.kill_all()


def test_a_signal_before_the_loop_runs_ends_it_in_order_too(
    tmp_path: Path, tiny_model: Path
) -> None:
    args = {"model_path": str(tiny_model), "server_port": 0}
    args["app"] = "tests.server.signalled_app:create_app"
    server = Server(tmp_path, args, {})
    try:
        assert server.end() == 0
        assert server.stderr == ""
    finally:
        server.kill_all()


def test_a_signal_while_it_tidies_up_ends_it_at_once(tmp_path: Path, tiny_model: Path) -> None:
    with running(tmp_path, tiny_model, env={"SIM_FAULT": "end slowly"}) as server:
        pids = server.children()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "told to end slowly" in server.stderr, 10, "the engine lets go")
        start = clock()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert clock() - start < 1
        assert not any(map(is_alive, pids.values()))
