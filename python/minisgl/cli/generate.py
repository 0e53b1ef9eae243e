"""`minisgl generate`: prompts in, answers out; one is streamed, several come one by one.

May import everything below `cli`. Answers are printed in the order of their prompts.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.params import ConfigError, FinishReason, InvalidRequestError
from minisgl.shell import EXIT_INTERRUPTED, interruptible

from .options import sampling_params
from .output import (
    Stats,
    cut_hint,
    note,
    opened,
    reading,
    stream_out,
    warn_of_template_args,
    working,
    write,
)
from .prompts import read_prompts

if TYPE_CHECKING:
    from minisgl.llm import LLM, StreamEvent

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

    def take(self, event: StreamEvent) -> StreamEvent:
        self.pieces.append(event.text)
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.error = event.error
        return event

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
        is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
        return json.dumps(fields, ensure_ascii=not is_utf8)  # elsewhere \u00e9, so nothing is lost


def run(args: argparse.Namespace) -> int:
    """Answer the prompts of the command line, a file or standard input."""
    if not args.chat and (args.system is not None or args.template_args):
        flag = "--system" if args.system is not None else "--template-arg"
        raise ConfigError(f"{flag} needs --chat: a plain prompt has no chat template")
    prompts = read_prompts(args)
    with opened(args) as llm:
        warn_of_template_args(llm, args)
        inputs = [_model_input(llm, args, prompt) for prompt in prompts]
        answers = [_Answer(index, prompt) for index, prompt in enumerate(prompts)]
        stats = Stats()
        try:
            stream = llm.stream(inputs, sampling_params(args, llm.default_sampling_params))
        except InvalidRequestError as error:  # of a single prompt the number says nothing
            is_single = len(prompts) == 1
            text = str(error).removeprefix("prompt 0: ") if is_single else str(error)
            raise InvalidRequestError(text, error.param) from error
        events = stats.watch(interruptible(stream))
        if args.json or len(prompts) > 1:
            _print_many(llm, args, answers, events, stats)
        else:
            stream_out(map(answers[0].take, events), reading(llm, args))
            write("\n")
        if not args.quiet:
            _print_statistics(args, answers, stats)
    return _exit_code(answers, stats)


def _model_input(llm: LLM, args: argparse.Namespace, prompt: str) -> list[int]:
    if not args.chat:
        return llm.tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return llm.chat_prompt(messages, **dict(args.template_args))


def _print_many(
    llm: LLM,
    args: argparse.Namespace,
    answers: list[_Answer],
    events: Iterable[StreamEvent],
    stats: Stats,
) -> None:
    """Print each answer when it and all before it are complete; after Ctrl-C all complete ones."""

    def told(num_read: int, num_written: int) -> str:
        done = sum(answer.finish_reason is not None for answer in answers)
        line = f"{done} of {len(answers)} done, {num_read} tokens read, {num_written} written"
        seconds = (time.perf_counter() - stats.start) / max(done, 1) * (len(answers) - done)
        return f"{line}, {seconds:.0f} s to go" if done else line

    num_printed = 0
    with working(llm, args, told) as line:
        for event in events:
            answers[event.index].take(event)
            while num_printed < len(answers) and answers[num_printed].finish_reason:
                with line.hidden():
                    _print_answer(args, answers[num_printed])
                num_printed += 1
    for answer in answers[num_printed:]:
        if answer.finish_reason is not None:
            _print_answer(args, answer)


def _print_answer(args: argparse.Namespace, answer: _Answer) -> None:
    if args.json:
        write(answer.as_json() + "\n")
        return
    title = " ".join(answer.prompt.split())
    title = title if len(title) <= TITLE_WIDTH else title[: TITLE_WIDTH - 3] + "..."
    write(f"[{answer.index}] {title}\n{''.join(answer.pieces)}\n\n")


def _print_statistics(args: argparse.Namespace, answers: list[_Answer], stats: Stats) -> None:
    if stats.is_interrupted:
        done = sum(answer.finish_reason is not None for answer in answers)
        several = f": {done} of {len(answers)} answers complete" if len(answers) > 1 else ""
        note(f"(interrupted{several})")
    if stats.num_cut and len(answers) == 1:
        note(cut_hint(stats.num_tokens, args.max_tokens))
    elif stats.num_cut:
        note(f"({stats.num_cut} of {len(answers)} answers cut by --max-tokens or a full context)")
    note(stats.line())


def _exit_code(answers: list[_Answer], stats: Stats) -> int:
    failed = [answer for answer in answers if answer.error is not None]
    for answer in failed:
        number = f"prompt {answer.index}: " if len(answers) > 1 else ""
        note(f"minisgl: {number}{answer.error}")
    return EXIT_INTERRUPTED if stats.is_interrupted else int(bool(failed))
