"""What the subcommands share when they talk: opening the model, streaming text, statistics.

May import everything below `cli`. Answers go to standard output, all else to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from minisgl.llm import LLM, StreamEvent

from .options import engine_options, set_log_level

ProgressFn = Callable[[int, int], None]
SLOW_LOAD_SECONDS = 1.0

# Control characters but tab, newline and carriage return: a model must not steer the terminal.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


@dataclass
class Stats:
    """Counts and times of one call; seconds on a clock that only goes forward."""

    num_tokens: int = 0
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def watch(self, events: Iterable[StreamEvent]) -> Iterator[StreamEvent]:
        """Pass `events` on, counting."""
        for event in events:
            self.last = time.perf_counter()
            if event.token_ids and self.first is None:
                self.first = self.last
            self.num_tokens += len(event.token_ids)
            yield event

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the whole time, the prompt's included."""
        return self.num_tokens / max((self.last or self.start) - self.start, 1e-9)

    def line(self) -> str:
        """One line for a human."""
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        if self.first is None or self.last is None:
            return tokens
        return (
            f"{tokens} in {self.last - self.start:.2f} s: {self.tokens_per_second:.1f} tokens/s, "
            f"first token after {self.first - self.start:.2f} s"
        )


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[LLM]:
    """The `LLM` that the flags describe, shut down at the end; an error ends the process anyway."""
    set_log_level(args)
    options = {"dtype": "auto", **engine_options(args)}
    with _load_progress() as progress:
        llm = LLM(args.model, progress=progress, **options)
    yield llm
    llm.shutdown()


@contextmanager
def _load_progress() -> Iterator[ProgressFn | None]:
    """A progress bar for a load that takes its time, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress

    start = time.perf_counter()
    columns = ("loading the model", BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("load", total=None)

    def progress(done: int, total: int) -> None:
        if time.perf_counter() - start > SLOW_LOAD_SECONDS:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()


def write(text: str) -> None:
    """Write a piece of an answer at once; on a terminal without its control characters."""
    sys.stdout.write(text.translate(_UNPRINTABLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line to the human, beside the answer."""
    print(text, file=sys.stderr, flush=True)
