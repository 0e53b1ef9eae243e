"""`minisgl chat`: the shell, with the flags of the command line. May import all below `cli`."""

from __future__ import annotations

import argparse

from minisgl.shell import Chat, run_repl

from .options import sampling_params
from .output import Stats, cut_hint, dim, note, opened, stream_out, warn_of_template_args, write


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends the session."""
    with opened(args) as llm:
        llm.tokenizer.check_chat_template()
        warn_of_template_args(llm, args)
        chat = Chat(
            llm,
            sampling_params(args, llm.default_sampling_params),
            system=args.system,
            template_args=dict(args.template_args),
        )

        def answer(text: str) -> None:
            stats = Stats()
            stream_out(llm, args, stats.watch(chat.ask(text)))
            write("\n")
            if stats.num_cut:
                hint = cut_hint(stats.num_tokens, args.max_tokens, "; /reset begins anew")
                note(dim(hint))
            if not args.quiet:
                note(f"({stats.line()})")

        return run_repl(chat, answer, note)
