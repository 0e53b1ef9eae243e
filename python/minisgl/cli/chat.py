"""`minisgl chat`: the shell, on a model in this process or as a client of a server.

May import everything below `cli`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from minisgl.env import ENV
from minisgl.params import ConfigError
from minisgl.shell import Chat, Conversation, Piece, run_repl
from minisgl.shell.remote import RemoteChat
from minisgl.utils.openai_api import Address

from .options import DEFAULT_MODEL, engine_flags, request_fields, sampling_params
from .output import (
    Stats,
    cut_hint,
    dim,
    note,
    opened,
    reading,
    stream_out,
    waiting,
    warn_of_template_args,
    write,
)
from .progress import LiveLine


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends the session."""
    if args.server is not None:
        for flag in engine_flags(args):
            raise ConfigError(f"{flag} is of a model in this process: a server has its own")
        return run_client(args.server, args)
    if args.api_key is not None:
        raise ConfigError("--api-key needs --server")
    with opened(args) as llm:
        llm.tokenizer.check_chat_template()
        warn_of_template_args(llm, args)
        chat = Chat(
            llm,
            sampling_params(args, llm.default_sampling_params),
            system=args.system,
            template_args=dict(args.template_args),
        )
        return _talk(chat, args, lambda: reading(llm, args))


def run_client(url: str, args: argparse.Namespace) -> int:
    """Talk to the server at `url`. args: as of `chat`, but flags of the engine do not count."""
    fields = request_fields(args)
    if args.model != DEFAULT_MODEL:
        fields["model"] = args.model
    address = Address.parse(url, args.api_key or ENV.API_KEY.value)
    chat = RemoteChat(address, fields, system=args.system)
    return _talk(chat, args, lambda: waiting(args))


def _talk(
    chat: Conversation,
    args: argparse.Namespace,
    line: Callable[[], AbstractContextManager[LiveLine]],
) -> int:
    """Read lines and answer them. line: makes what is shown until an answer begins."""

    def answer(text: str) -> None:
        stats = Stats()

        def counted() -> Iterator[Piece]:
            for piece in chat.ask(text):
                stats.count(piece.num_tokens, piece.finish_reason)
                yield piece

        stream_out(counted(), line())
        write("\n")
        if stats.num_cut:
            note(dim(cut_hint(stats.num_tokens, args.max_tokens, "; /reset begins anew")))
        if not args.quiet:
            note(f"({stats.line()})")

    return run_repl(chat, answer, note)
