"""The flags of `minisgl bench`, and help that teaches. May import `cli.options`.

Invariant: a value without meaning is refused here, before anything is sent or loaded.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .options import DEFAULT_URL, add_engine_flags

if TYPE_CHECKING:
    from .parser import Parser

SERVE_EXAMPLES = """\
examples:
  minisgl bench serve                                  8 users, 100 requests in all
  minisgl bench serve --users 64 --requests 500 --shared-prefix 200 --input-tokens 300
  minisgl bench serve --rate 4 --duration 60           4 requests a second arrive, for a minute
  minisgl bench serve --prompts questions.jsonl --output-tokens 128 --json result.json
  minisgl bench serve --url https://example.org/v1 --model some-model --api completions

Users (a closed loop) show what a server can do: each asks again when it has its answer. A rate (an
open loop, Poisson arrivals) shows what visitors feel: they come whether or not the server keeps up,
and waiting counts from the moment at which a request was due.

What is measured: the time to the first token; the time between two pieces of text; the time per
output token of a request, after its first; and the time to the whole answer. Refused and failed
requests are counted by their status and left out of the latencies. Ctrl-C ends the run and prints
what was measured so far.

A file of prompts has one prompt a line, or one JSON object a line with "prompt" or "messages", and
"max_tokens" if it likes. Without a file, prompts are random words, about one token each. The same
seed sends the same requests at the same moments."""

OFFLINE_EXAMPLES = """\
examples:
  minisgl bench offline
  minisgl bench offline --model path/to/model.gguf --requests 256 --max-input 1024"""


def parse_range(text: str) -> tuple[int, int]:
    """(least, most) of `128` or `64-256`."""
    least, is_range, most = text.partition("-")
    try:
        low, high = int(least), int(most if is_range else least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number and no range as 64-256") from error
    if not 1 <= low <= high <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range from 1 to {1 << 20:,}")
    return low, high


def add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `bench` and its two commands."""
    bench = commands.add_parser(
        "bench",
        usage="minisgl bench COMMAND [options]",
        help="measure a server, or the engine alone",
        description="Measure a server under load, or the engine without a server.",
        epilog="examples:\n  minisgl bench serve --users 16\n  minisgl bench offline\n\n"
        "`minisgl bench COMMAND --help` shows the flags, and what is measured.",
    )
    kinds = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(kinds)
    _add_offline(kinds)


def _add_serve(kinds: argparse._SubParsersAction[Parser]) -> None:
    summary = "send requests to a running server, any that speaks OpenAI's API"
    parser = kinds.add_parser(
        "serve",
        usage="minisgl bench serve [options]",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}, and tell how fast it answers.",
        epilog=SERVE_EXAMPLES,
    )
    parser.set_defaults(module="minisgl.cli.bench", command="serve")
    add = parser.add_argument_group("the server").add_argument
    add("--url", default=DEFAULT_URL, metavar="URL", help=f"its address (default {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help="what it asks for (default: MINISGL_API_KEY)")
    add("--model", metavar="NAME", help="the model to ask for (default: the server's first)")
    add(
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="/v1/chat/completions (the default) or /v1/completions",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="for an answer (default 600)")
    add = parser.add_argument_group("the load").add_argument
    add("--users", type=int, metavar="N", help="N users, one request each at a time (default 8)")
    add("--rate", type=float, metavar="R", help="R requests a second arrive; inf: all at once")
    add("--requests", type=int, metavar="N", help="how many (default: 100, or the file's)")
    add("--duration", type=float, metavar="S", help="send nothing new after S seconds")
    add(
        "--warmup",
        type=int,
        default=1,
        metavar="N",
        help="short requests before the clock starts (default 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
    add = parser.add_argument_group("what is asked").add_argument
    add("--prompts", metavar="FILE", help="prompts, one a line, or JSON lines; - is stdin")
    add(
        "--input-tokens",
        type=parse_range,
        metavar="N[-M]",
        help="words of a prompt, about one token each, without FILE (default 128)",
    )
    add(
        "--shared-prefix",
        type=int,
        metavar="N",
        help="words with which all prompts begin, without FILE (default 0)",
    )
    add("--output-tokens", type=parse_range, metavar="N[-M]", help="longest answer (default 64)")
    add("--ignore-eos", action="store_true", help="answers of full length (not every server can)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default 0)")
    add(
        "--extra-body",
        metavar="JSON",
        help='further fields of every request, as {"top_k": 20}',
    )
    add = parser.add_argument_group("what is told").add_argument
    add("--json", metavar="FILE", help="write settings, summary and requests; - is stdout")
    add("-q", "--quiet", action="store_true", help="no progress bar")


def _add_offline(kinds: argparse._SubParsersAction[Parser]) -> None:
    summary = "run requests through the engine in this process"
    parser = kinds.add_parser(
        "offline",
        usage="minisgl bench offline [options]",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}: random tokens and lengths, all at once.",
        epilog=OFFLINE_EXAMPLES,
    )
    parser.set_defaults(module="minisgl.cli.bench", command="offline")
    add = parser.add_argument
    add("--requests", type=int, default=32, metavar="N", help="how many (default 32)")
    add("--max-input", type=int, default=256, metavar="N", help="longest prompt (default 256)")
    add("--max-output", type=int, default=128, metavar="N", help="longest answer (default 128)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (default 0)")
    add("--json", action="store_true", help="print the result as JSON")
    add_engine_flags(parser)
