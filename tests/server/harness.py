"""A real server as a process of its own, and what a test wants to do to it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "tests.server.simulated:make_engine"
NUM_PAGES = 65536  # of the simulated engine
REFERENCE = "ijklmno"  # what it answers to "hello"


class Clock:
    """Seconds that stand still while this process does: a machine may pause all of them."""

    TICK = 0.01

    def __init__(self) -> None:
        self._num_ticks = 0
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.TICK)
            self._num_ticks += 1

    def __call__(self) -> float:
        """Seconds since the start, at most what the wall clock says."""
        return self._num_ticks * self.TICK


clock = Clock()


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition`, looked at often; an `AssertionError` after `seconds`."""
    deadline = clock() + seconds
    while not (value := condition()):
        assert clock() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


class Server:
    """A server process. tmp: for its log. `sockets` is its TMPDIR, short as a socket's path is."""

    def __init__(self, tmp: Path, args: dict[str, Any], env: dict[str, str]) -> None:
        tmp.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
        self.stderr_file = tmp / "stderr"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.run_server", json.dumps(args)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}",
                "TMPDIR": str(self.sockets),
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=self.stderr_file.open("wb"),
        )
        self.url = ""

    def wait_ready(self) -> None:
        """Until requests are taken."""
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url, f"the server ended: {self.stderr}"

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(errors="replace")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlparse(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def children(self) -> dict[str, int]:
        """Process ids by module."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal():
                    continue
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == self.process.pid and stat[0] != "Z" and b"-m" in words:
                name = words[words.index(b"-m") + 1].decode()
                found[name if name not in found else f"{name} {entry.name}"] = int(entry.name)
        return found

    def get(self, path: str) -> tuple[int, Any]:
        """(status, JSON) of a GET."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            lines = [json.loads(line) for line in response.read().splitlines() if line]
            return response.status, lines[0] if len(lines) == 1 else lines
        finally:
            connection.close()

    def stream(self, prompt: Any, **fields: Any) -> Stream:
        """Begin an answer."""
        return Stream(self, {"prompt": prompt, **fields})

    def text(self, prompt: Any, **fields: Any) -> str:
        """A whole answer."""
        return "".join(line["text"] for line in self.stream(prompt, **fields).lines())

    def wait_idle(self, seconds: float = 5.0) -> dict[str, Any]:
        """Until nothing runs or waits anywhere; the counters then."""

        def idle() -> dict[str, Any] | None:
            stats: dict[str, Any] = self.get("/stats")[1]
            busy = stats["open"] or stats["running"] or stats["waiting"] or stats["owned_pages"]
            return None if busy else stats

        found: dict[str, Any] = wait_until(idle, seconds, "nothing runs")
        return found

    def metrics(self) -> dict[str, float]:
        """What /metrics of the real app tells, by name and labels."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        connection.request("GET", "/metrics", headers={"connection": "close"})
        text = connection.getresponse().read().decode()
        connection.close()
        lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    def left(self, num_pages: int) -> dict[str, float]:
        """What the processes of the real app still hold, by metric; pages that are missing too."""
        found = self.metrics()
        kept = {name: found[name] for name in found if name.startswith("minisgl_held_requests")}
        assert len(kept) >= 3, kept
        free, cached, owned = (
            found[f'minisgl_kv_pages{{state="{state}"}}'] for state in ("free", "cached", "owned")
        )
        kept |= {"owned": owned, "missing": num_pages - free - cached - owned}
        return {name: num for name, num in kept.items() if num}

    def wait_empty(self, num_pages: int, seconds: float = 10.0) -> None:
        """Until no process of the real app holds anything, and all pages are free or cached."""
        with suppress(AssertionError):
            wait_until(lambda: not self.left(num_pages), seconds, "all is given back")
        assert self.left(num_pages) == {}

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        pids = {"api": self.process.pid, **self.children()}
        return {name: _resident(pid) for name, pid in pids.items()}

    def open_files(self) -> dict[str, int]:
        """Open file descriptors of each process."""
        pids = {"api": self.process.pid, **self.children()}
        return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()}

    def kill_all(self) -> None:
        """The quick end of a test, in no order at all."""
        pids = list(self.children().values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.sockets)

    def end(self, seconds: float = 15.0) -> int:
        """Wait for the end; the exit code. Checks that nothing is left behind."""
        wait_until(lambda: self.process.poll() is not None, seconds, "the server has ended")
        assert list(self.sockets.iterdir()) == []
        return int(self.process.wait())

    def expect_sound(self) -> None:
        """What must hold after a fault that is survived: healthy, right, and nothing held."""
        assert self.get("/health")[0] == 200
        assert self.text("hello", max_tokens=7) == REFERENCE
        stats = self.wait_idle()
        assert stats["free_pages"] + stats["cached_pages"] == NUM_PAGES


class Stream:
    """One answer on a connection of its own."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.connection = http.client.HTTPConnection(*server.address, timeout=30)
        self.connection.request("POST", "/generate", json.dumps(body))
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    def next(self) -> dict[str, Any]:
        """The next piece; empty at the end."""
        line = self.response.readline()
        return json.loads(line) if line else {}

    def lines(self) -> list[dict[str, Any]]:
        """All that is left."""
        return [json.loads(line) for line in self.response.read().splitlines() if line]

    def close(self) -> None:
        """Go away."""
        if self._response is not None:
            self._response.close()
        self.connection.close()


@contextmanager
def running(
    tmp: Path, model: Path, *, env: dict[str, str] | None = None, **args: Any
) -> Iterator[Server]:
    """A server of a simulated engine (unless `engine` says otherwise) on a free port."""
    fields = {"model_path": str(model), "server_port": 0, "engine": SIMULATED, **args}
    server = Server(tmp, fields, env or {})
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill_all()
