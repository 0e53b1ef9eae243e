"""Ctrl-C as a request, not as an exception out of nowhere. Imports the standard library only.

Invariant: the engine is never interrupted between two of its own statements; whoever streams looks
at the request between two tokens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

EXIT_INTERRUPTED = 130

_is_stopping = False


def is_stopping() -> bool:
    """Whether Ctrl-C was pressed and the step that is being computed has not ended yet."""
    return _is_stopping


@contextmanager
def interrupt_calls(stop: Callable[[], None]) -> Iterator[None]:
    """Inside the block Ctrl-C calls `stop`; pressed a second time, it ends the process at once.

    Python calls handlers between two bytecodes, which a forward pass delays by seconds; a thread
    that reads the wakeup pipe sees every press when it happens.
    """
    global _is_stopping
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = Thread(target=_watch, args=(reading,), daemon=True)
    watcher.start()
    handler_before = signal.signal(signal.SIGINT, lambda *unused: stop())
    pipe_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe_before)
        signal.signal(signal.SIGINT, handler_before)
        os.close(writing)  # ends the watcher
        watcher.join()
        os.close(reading)
        _is_stopping = False


def _watch(pipe: int) -> None:
    """Read the numbers of signals as they come; the second Ctrl-C ends the process."""
    global _is_stopping
    while number := os.read(pipe, 1):
        if number[0] != signal.SIGINT:
            continue
        if _is_stopping:
            if os.isatty(2):
                os.write(2, b"\n")  # the shell's prompt shall not stand behind ^C
            os._exit(EXIT_INTERRUPTED)
        _is_stopping = True


def interruptible(events: Iterable[T]) -> Iterator[T]:
    """Pass `events` on; after Ctrl-C the next one becomes a `KeyboardInterrupt`."""
    requests: list[bool] = []
    with interrupt_calls(lambda: requests.append(True)):
        for event in events:
            if requests:
                raise KeyboardInterrupt
            yield event
