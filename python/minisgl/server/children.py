"""The processes of a server besides its own: one scheduler per rank, and the tokenizers.

Invariant: a child is alive only as long as this process; whatever ends this process ends them all,
because each holds the reading end of a pipe that nobody else can write to.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
import time
from pathlib import Path

from minisgl.config import SchedulerConfig, ServerArgs
from minisgl.utils.process import (
    END_SECONDS,
    SAVE_SECONDS,
    Addresses,
    make_socket_folder,
    start_child,
)

POLL_SECONDS = 0.02
FORCED_END_SECONDS = 0.2


class Children:
    """Starts the processes that `args` asks for, and ends them.

    engine: "module:name" of what makes the engine in each scheduler process.
    """

    def __init__(self, args: ServerArgs, engine: str) -> None:
        self.args = args
        self.addresses = Addresses(make_socket_folder())
        self._engine = engine
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def names(self) -> list[str]:
        """Of all processes, as logs and /health call them."""
        return list(self._processes)

    def start(self) -> None:
        """Start all of them; they report to the frontend when they are ready."""
        args = self.args
        names = [field.name for field in dataclasses.fields(SchedulerConfig)]
        config = {name: getattr(args, name) for name in names}
        if args.tp_info.size > 1 and args.distributed_port == 0:
            config["distributed_port"] = _free_port()
        config["model_path"], config["dtype"] = str(args.model_path), _name(args.dtype)
        config["kv_dtype"] = _name(args.kv_dtype)
        common = {"folder": self.addresses.folder}
        for rank in range(args.tp_info.size):
            task = {
                "config": {**config, "tp_info": {"rank": rank, "size": args.tp_info.size}},
                "rank": rank,
                "num_tokenizers": args.num_tokenizer,
                "engine": self._engine,
            }
            name = "scheduler" if rank == 0 else f"scheduler {rank}"
            self._processes[name] = start_child("minisgl.worker", {**common, **task})
        for index in range(args.num_tokenizer):
            task = {
                "index": index,
                "model": str(args.model_path),
                "advice": args.sampling_defaults == "model",
            }
            self._processes[f"tokenizer {index}"] = start_child(
                "minisgl.tokenizer.worker", {**common, **task}
            )

    def dead(self) -> dict[str, str]:
        """How those that are no longer there have ended, by name."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: _ending(code) for name, code in codes.items() if code is not None}

    def stop(self, *, in_order: bool) -> None:
        """End all of them and remove their sockets; unless `in_order` by force, very soon."""
        for process in self._processes.values():
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        seconds = END_SECONDS if self.args.kv_prefix_file is None else SAVE_SECONDS
        deadline = time.monotonic() + (seconds + 1 if in_order else FORCED_END_SECONDS)
        while time.monotonic() < deadline and len(self.dead()) < len(self._processes):
            time.sleep(POLL_SECONDS)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(Path(self.addresses.folder), ignore_errors=True)


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _name(dtype: object) -> str:
    """A dtype by name: the children get their settings as text."""
    return str(dtype).removeprefix("torch.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
