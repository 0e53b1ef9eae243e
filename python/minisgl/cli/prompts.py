"""The prompts of a command: arguments, the lines of a file, or standard input.

May import `params`. Invariant: a prompt that cannot be used is told before anything is loaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import BinaryIO

from minisgl.params import ConfigError

MAX_INPUT_BYTES = 64 << 20


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts: arguments, else the lines of a file, else all of standard input as one."""
    if args.prompts and args.file:
        raise ConfigError("give PROMPT or --file, not both")
    prompts = list(args.prompts)
    if args.file:
        prompts = read_lines(args.file, "--file")
    elif not prompts and not sys.stdin.isatty():
        text = _read(sys.stdin.buffer, "standard input")
        prompts = [text.removesuffix("\n").removesuffix("\r")]
    if not any(prompts):
        raise ConfigError("there is no prompt: give PROMPT, --file FILE, or pipe a text in")
    if "" in prompts:
        place = prompts.index("") + 1
        raise ConfigError(f"PROMPT {place} of {len(prompts)} is empty: give it a text, or drop it")
    return prompts


def read_lines(file: str, flag: str) -> list[str]:
    """The lines of a file that are not blank; `-` is standard input. flag: named in errors."""
    if file == "-":
        return _lines(_read(sys.stdin.buffer, "standard input"))
    try:
        with Path(file).open("rb") as stream:
            return _lines(_read(stream, file))
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror}") from error


def _read(stream: BinaryIO, name: str) -> str:
    data = stream.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise ConfigError(f"{name} holds more than {MAX_INPUT_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error.reason}") from error


def _lines(text: str) -> list[str]:
    """The lines as `wc -l` counts them, the blank ones left out."""
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
