"""One line on the terminal that tells what goes on while nothing is printed.

Imports the standard library only. Invariant: the line is on standard error, on a terminal only, and
gone when its block ends. The cursor stays as it is, so a killed process leaves a sound terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

QUIET_SECONDS = 2.0
REDRAW_SECONDS = 0.5


class LiveLine:
    """`text()` and the seconds so far, redrawn by a thread; nothing while `text()` is empty."""

    def __init__(self, text: Callable[[], str], is_wanted: bool = True) -> None:
        self._text = text
        self._is_wanted = is_wanted
        self._num_drawn = 0
        self._lock = Lock()
        self._is_over = Event()
        self._thread = Thread(target=self._redraw, daemon=True)

    def __enter__(self) -> LiveLine:
        if self._is_wanted and sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the line away for good, and leave its place to what is printed next."""
        if not self._is_over.is_set():
            self._is_over.set()
            if self._thread.is_alive():
                self._thread.join()
            self._draw("")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the line away while the block prints."""
        with self._lock:
            self._draw("")
            yield

    def _redraw(self) -> None:
        start = time.perf_counter()
        seconds = QUIET_SECONDS
        while not self._is_over.wait(seconds):
            seconds = REDRAW_SECONDS
            text = self._text()
            with self._lock:
                self._draw(text and f"{text}, {time.perf_counter() - start:.0f} s")

    def _draw(self, text: str) -> None:
        text = text[: _columns() - 3]  # a ^C behind it still fits, and goes with it
        if text:
            sys.stderr.write("\r" + text.ljust(self._num_drawn))
        elif self._num_drawn:
            sys.stderr.write("\r" + " " * (self._num_drawn + 2) + "\r")
        sys.stderr.flush()
        self._num_drawn = len(text)


class Loading:
    """How far the weights are; `text` tells `first` until the first of them has come."""

    def __init__(self, first: str = "") -> None:
        self._text = first

    def progress(self, done: int, total: int) -> None:
        """Bytes that are there, of all."""
        self._text = f"loading the model: {100 * done // max(total, 1)} %"

    def text(self) -> str:
        """For a `LiveLine`."""
        return self._text


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:  # no terminal of the system's
        return 80
