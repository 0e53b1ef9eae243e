"""A child process and its parent: how it is started, told what to do, and ends with its parent.

The child's standard input is a pipe that only the parent holds. Its first line says what to do, as
JSON; its end says that the parent is gone, however it died. Signals meant for the whole group or
service go to the parent alone, which decides. May import `env`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import msgspec

MAX_ADDRESS_CHARS = 100  # of a Unix socket's path; the system takes 107
END_SECONDS = 4.0
SAVE_SECONDS = 60.0  # to end, with cached prefixes to be saved


def start_child(module: str, task: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Run `python -m module` with `task` as its first line; closing `.stdin` ends it."""
    paths = [path for path in sys.path if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(task) + b"\n")
        child.stdin.flush()
    except BrokenPipeError:  # it has died already, which whoever watches it will see
        pass
    return child


def read_task() -> dict[str, Any]:
    """In the child, first of all: what the parent wants."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit(1)
    task: dict[str, Any] = msgspec.json.decode(line)
    return task


def end_with_parent(
    folder: str, is_over: Callable[[], None] | None = None, seconds: float = END_SECONDS
) -> None:
    """In the child: when the parent is gone, remove `folder` and end.

    `is_over` is called first, in a thread of its own, and may end the process in good order; it has
    `seconds` for that.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if is_over is None:
            _leave(folder)
        else:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            timer = Timer(seconds, _leave, (folder,))
            timer.daemon = True
            timer.start()
            is_over()

    Thread(target=watch, name="parent", daemon=True).start()


def _leave(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def make_socket_folder() -> str:
    """A new folder with a random name that only this user can enter, for Unix sockets."""
    folder = tempfile.mkdtemp(prefix="minisgl-")
    if len(folder) > MAX_ADDRESS_CHARS - len("/tokenizer-99"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="minisgl-", dir="/tmp")
    return folder


class Addresses:
    """Where the processes of one server find each other: sockets in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.frontend = self._at("frontend")
        self.scheduler = self._at("scheduler")
        self.ranks = self._at("ranks")

    def tokenizer(self, index: int) -> str:
        """The inbox of tokenizer process `index`."""
        return self._at(f"tokenizer-{index}")

    def _at(self, name: str) -> str:
        return f"ipc://{Path(self.folder) / name}"
