"""A worker process as the run sees it: start, one job at a time with a limit, stop."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class WorkerError(Exception):
    """A job that failed, took too long, or whose process died."""


class WorkerProcess:
    """One engine with one file in a process of its own."""

    def __init__(
        self,
        python: str | Path,
        script: str,
        options: dict[str, Any],
        environ: dict[str, str],
        log: Path,
    ) -> None:
        self._log = log
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(HERE / script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environ,
                text=True,
                bufsize=1,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_ready(self, seconds: float) -> None:
        """Return when the engine has loaded."""
        self._answer("start", seconds)

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one job. After an error of the process itself it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
        except OSError as error:
            raise WorkerError(f"{job['work']}: the process is gone, see {self._log}") from error
        return self._answer(job["work"], seconds)

    def _answer(self, what: str, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise WorkerError(f"{what}: no answer within {seconds:.0f} s") from None
        if not line:
            raise WorkerError(f"{what}: the process ended, see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{what}: {answer['error']}")
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process, politely first."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(2)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
