"""`minisgl generate`: prompts in, answers out; one is streamed, several show a progress bar.

May import everything below `cli`. Answers are printed in the order of their prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from minisgl.llm import LLM, StreamEvent
from minisgl.params import ConfigError, FinishReason
from minisgl.shell import interruptible

from .options import sampling_params
from .output import Stats, note, opened, write

MAX_INPUT_BYTES = 64 << 20
TITLE_WIDTH = 60


@dataclass
class _Answer:
    """One prompt and what has come of it."""

    index: int
    prompt: str
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def take(self, event: StreamEvent) -> None:
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.error = event.error

    def as_json(self) -> str:
        fields: dict[str, Any] = {
            "index": self.index,
            "prompt": self.prompt,
            "text": "".join(self.pieces),
            "token_ids": self.token_ids,
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
        }
        if self.error is not None:
            fields["error"] = self.error
        return json.dumps(fields, ensure_ascii=False)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts of the command line, a file or standard input."""
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: a plain prompt has no system message")
    prompts = read_prompts(args)
    with opened(args) as llm:
        inputs = [_model_input(llm, args, prompt) for prompt in prompts]
        answers = [_Answer(index, prompt) for index, prompt in enumerate(prompts)]
        stats = Stats()
        events = stats.watch(interruptible(llm.stream(inputs, sampling_params(args))))
        if args.json or len(prompts) > 1:
            _print_many(args, answers, events)
        else:
            _print_one(answers[0], events)
        if not args.quiet:
            note(stats.line())
    for answer in answers:
        if answer.error is not None:
            note(f"minisgl: prompt {answer.index}: {answer.error}")
    return int(any(answer.error is not None for answer in answers))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts: arguments, else the lines of a file, else all of standard input as one."""
    if args.prompts and args.file:
        raise ConfigError("give PROMPT or --file, not both")
    prompts = list(args.prompts)
    if args.file == "-":
        prompts = _lines(_read(sys.stdin.buffer, "standard input"))
    elif args.file:
        try:
            with Path(args.file).open("rb") as stream:
                prompts = _lines(_read(stream, args.file))
        except OSError as error:
            raise ConfigError(f"--file: {args.file}: {error.strerror}") from error
    elif not prompts and not sys.stdin.isatty():
        prompts = [_read(sys.stdin.buffer, "standard input").removesuffix("\n")]
    if not any(prompts):
        raise ConfigError("there is no prompt: give PROMPT, --file FILE, or pipe a text in")
    return prompts


def _read(stream: BinaryIO, name: str) -> str:
    data = stream.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ConfigError(f"{name} holds more than {MAX_INPUT_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error.reason}") from error


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _model_input(llm: LLM, args: argparse.Namespace, prompt: str) -> list[int]:
    if not args.chat:
        return llm.tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return llm.chat_prompt(messages)


def _print_one(answer: _Answer, events: Iterable[StreamEvent]) -> None:
    for event in events:
        answer.take(event)
        write(event.text)
    write("\n")


def _print_many(
    args: argparse.Namespace, answers: list[_Answer], events: Iterable[StreamEvent]
) -> None:
    """Print each answer when it and all before it are complete."""
    shows_bar = sys.stderr.isatty() and not args.quiet and len(answers) > 1
    # A bar and answers on one terminal would overwrite each other: then answers come last.
    comes_last = shows_bar and sys.stdout.isatty()
    printed = 0
    with _progress(len(answers), shows_bar) as advance:
        for event in events:
            answers[event.index].take(event)
            advance(event)
            while not comes_last and printed < len(answers) and answers[printed].finish_reason:
                _print_answer(args, answers[printed])
                printed += 1
    for answer in answers[printed:]:
        _print_answer(args, answer)


def _print_answer(args: argparse.Namespace, answer: _Answer) -> None:
    if args.json:
        write(answer.as_json() + "\n")
        return
    title = " ".join(answer.prompt.split())
    title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 3] + "..."
    write(f"[{answer.index}] {title}\n{''.join(answer.pieces)}\n\n")


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Any]:
    """A function that takes each event; with a bar of finished prompts if one is shown."""
    if not is_shown:
        yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=total)

        def advance(event: StreamEvent) -> None:
            if event.finish_reason is not None:
                bar.advance(task)

        yield advance
