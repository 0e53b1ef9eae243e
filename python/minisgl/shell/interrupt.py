"""Ctrl-C as a request, not as an exception out of nowhere. Imports the standard library only.

Invariant: the engine is never interrupted between two of its own statements; whoever streams looks
at the request between two tokens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

EXIT_INTERRUPTED = 130


@contextmanager
def interrupt_calls(stop: Callable[[], None]) -> Iterator[None]:
    """Inside the block Ctrl-C calls `stop`; pressed a second time, it ends the process at once."""
    was_pressed = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            os._exit(EXIT_INTERRUPTED)
        was_pressed = True
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interruptible(events: Iterable[T]) -> Iterator[T]:
    """Pass `events` on; after Ctrl-C the next one becomes a `KeyboardInterrupt`."""
    requests: list[bool] = []
    with interrupt_calls(lambda: requests.append(True)):
        for event in events:
            if requests:
                raise KeyboardInterrupt
            yield event
