"""What the subcommands share when they talk: opening the model, streaming text, statistics.

May import everything below `cli`; what needs torch is imported when the model is opened. Answers go
to standard output, all else to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minisgl.params import FinishReason
from minisgl.shell import Piece, is_stopping

from .options import engine_options, set_log_level
from .progress import LiveLine, Loading

if TYPE_CHECKING:
    from minisgl.llm import LLM, StreamEvent
    from minisgl.scheduler import StepRecord

RESERVED_VARIABLES = {"messages", "tokenize"}  # set for each conversation, whatever is asked
STOPPING = "stopping after this step (Ctrl-C again: at once)"

# Control characters but tab, newline and carriage return: a model must not steer the terminal.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


@dataclass
class Stats:
    """Counts and times of one call; seconds on a clock that only goes forward."""

    num_tokens: int = 0
    num_cut: int = 0
    start: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    is_interrupted: bool = False

    def watch(self, events: Iterable[StreamEvent]) -> Iterator[StreamEvent]:
        """Pass `events` on, counting; Ctrl-C ends them, and is remembered."""
        try:
            for event in events:
                self.count(len(event.token_ids), event.finish_reason)
                yield event
        except KeyboardInterrupt:
            self.is_interrupted = True

    def count(self, num_tokens: int, finish_reason: FinishReason | None) -> None:
        """Tokens that have just arrived, and why there are no more, if there are none."""
        self.last = time.perf_counter()
        if num_tokens and self.first is None:
            self.first = self.last
        self.num_tokens += num_tokens
        self.num_cut += finish_reason is FinishReason.LENGTH

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
    if args.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    loading = Loading()
    with LiveLine(loading.text, _wants_progress(args)):
        from minisgl.llm import LLM

        llm = LLM(args.model, progress=loading.progress, **options)
    yield llm
    llm.shutdown()


def warn_of_template_args(llm: LLM, args: argparse.Namespace) -> None:
    """One line if a `--template-arg` has no effect on the model's chat template."""
    if args.template_args:
        usable = llm.tokenizer.template_variables - RESERVED_VARIABLES
        unused = sorted({name for name, _ in args.template_args} - usable)
        if unused:
            note(
                f"minisgl: --template-arg {', '.join(unused)} has no effect: the model's chat "
                f"template understands {printable(', '.join(sorted(usable))) or 'none'}"
            )


@contextmanager
def working(
    llm: LLM, args: argparse.Namespace, told: Callable[[int, int], str]
) -> Iterator[LiveLine]:
    """A live line about a stream. told: the line, from tokens read and tokens written so far."""
    num_read = num_written = 0

    def count(step: StepRecord) -> None:
        nonlocal num_read, num_written
        num_read += step.num_prompt_tokens
        num_written += step.num_tokens - step.num_prompt_tokens

    def text() -> str:
        return STOPPING if is_stopping() else told(num_read, num_written)

    llm.step_listeners.append(count)
    try:
        with LiveLine(text, _wants_progress(args)) as line:
            yield line
    finally:
        llm.step_listeners.remove(count)


def reading(llm: LLM, args: argparse.Namespace) -> AbstractContextManager[LiveLine]:
    """A live line that says how much of the prompt has been read."""

    def told(num_read: int, num_written: int) -> str:
        return "reading the prompt" + (f": {num_read} tokens" if num_read else "")

    return working(llm, args, told)


def waiting(args: argparse.Namespace) -> AbstractContextManager[LiveLine]:
    """A live line about a server that has not begun to answer."""
    return LiveLine(lambda: "waiting for the server", _wants_progress(args))


def stream_out(
    events: Iterable[StreamEvent] | Iterable[Piece], line: AbstractContextManager[LiveLine]
) -> None:
    """Write one answer as it comes; `line` is shown until it begins."""
    with line as shown:
        for event in events:
            if event.text:
                shown.close()
                write(event.text)


def _wants_progress(args: argparse.Namespace) -> bool:
    return not (args.quiet or args.verbose)  # log lines would break it


def cut_hint(num_tokens: int, max_tokens: int, way_out: str = "") -> str:
    """Why an answer of `num_tokens` was cut. way_out: from a context that is full."""
    if num_tokens >= max_tokens:
        return f"(cut at --max-tokens {max_tokens})"
    return f"(cut: the context is full{way_out})"


def printable(text: str) -> str:
    """The text without characters that steer a terminal."""
    return text.translate(_UNPRINTABLE)


def write(text: str) -> None:
    """Write a piece of an answer at once; on a terminal without its control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line to the human, beside the answer."""
    print(text, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    """The text in a faint colour, where there are colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain or not sys.stderr.isatty() else f"\x1b[2m{text}\x1b[0m"
