"""`minisgl chat`: the shell, with the flags of the command line. May import all below `cli`."""

from __future__ import annotations

import argparse

from minisgl.shell import Chat, run_repl

from .options import sampling_params
from .output import Stats, note, opened, write


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends the session."""
    with opened(args) as llm:
        chat = Chat(llm, sampling_params(args), system=args.system)

        def answer(text: str) -> None:
            stats = Stats()
            for event in stats.watch(chat.ask(text)):
                write(event.text)
            write("\n")
            if not args.quiet:
                note(f"({stats.line()})")

        return run_repl(chat, answer, note)
