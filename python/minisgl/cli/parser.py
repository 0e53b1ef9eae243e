"""The flags of every subcommand, and help that teaches by example. Imports `cli.options`, `env`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from minisgl.cli.bench_options import add_bench
from minisgl.cli.options import (
    DEFAULT_MODEL,
    DEFAULT_URL,
    MODEL_HELP,
    add_chat_flags,
    add_engine_flags,
    add_quiet_flag,
    add_sampling_flags,
    check_sampling,
)
from minisgl.cli.server_options import add_server_flags
from minisgl.env import ENV

DESCRIPTION = "Run large language models on this machine, on a CPU or a GPU."

EXAMPLES = """\
examples:
  minisgl demo                                 see the default model answer a question
  minisgl chat                                 talk to it
  minisgl generate "Once upon a time"          continue a text
  minisgl generate --chat "Why is the sky blue?" --model path/to/model.gguf
  minisgl serve                                serve it over HTTP
  minisgl inspect path/to/model.gguf           what it is, what it costs, what fits here
  minisgl bench serve --users 16               put a running server under load

`minisgl COMMAND --help` shows the flags and examples of one command."""

GENERATE_EXAMPLES = """\
examples:
  minisgl generate "Once upon a time" --max-tokens 40
  minisgl generate --chat "Write a haiku." --temperature 0.8 --seed 1
  cat letter.txt | minisgl generate --chat --system "Summarise this in one sentence."
  minisgl generate -f questions.txt --chat --json > answers.jsonl
  minisgl generate "1, 2, 3," --stop 10 --model Qwen/Qwen3-0.6B --dtype float32

The text goes to standard output, statistics and progress to standard error."""

CHAT_EXAMPLES = """\
examples:
  minisgl chat
  minisgl chat --system "You are a pirate." --temperature 0.8
  echo "What is 2 + 2?" | minisgl chat
  minisgl chat --server                        a server on this machine, at port 1919
  minisgl chat --server https://example.org/v1 --model some-model

Inside: /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the session."""

SERVE_EXAMPLES = """\
examples:
  minisgl serve
  minisgl serve --model Qwen/Qwen3-0.6B --port 8000 --served-model-name qwen
  curl http://127.0.0.1:1919/v1/models"""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, and which guesses nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **{**options, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit with code 2."""
        message = message.removeprefix("argument ")
        message = message.replace("invalid int value:", "must be a whole number, not")
        message = message.replace("invalid float value:", "must be a number, not")
        if message.endswith("expected one argument"):
            message += "; one that begins with - is given as --flag=-value"
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The checked arguments; `.module` names the module whose `run(args)` does the work."""
    argv = list(argv)
    if any(flag in argv for flag in ("--shell", "--shell-mode")) and argv[0].startswith("-"):
        argv = ["chat", *(arg for arg in argv if arg not in ("--shell", "--shell-mode"))]
    elif argv and argv[0].split("=")[0] in ("--model", "--model-path"):
        argv = ["serve", *argv]
    parser = build_parser()
    if not argv:
        parser.print_help()
        raise SystemExit(0)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.prog = " ".join([parser.prog, *argv[: 2 if argv[0] == "bench" else 1]])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if "usual" in args:
        check_sampling(args)
    return args


def build_parser() -> Parser:
    """The parser of the whole command."""
    variables = ENV.describe().replace("\n", "\n  ")
    epilog = f"{EXAMPLES}\n\nenvironment variables, their values and what they mean:\n  {variables}"
    parser = Parser(prog="minisgl", description=DESCRIPTION, epilog=epilog)
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_demo(commands)
    _add_inspect(commands)
    add_bench(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version; the package is asked only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        from minisgl import __version__

        print(f"minisgl {__version__}")
        parser.exit()


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "continue texts, or answer questions with --chat"
    parser = commands.add_parser(
        "generate",
        usage="minisgl generate [PROMPT ...] [options]",
        help=summary,
        epilog=GENERATE_EXAMPLES,
        description=f"{summary[0].upper()}{summary[1:]}. Without PROMPT and -f, all of standard "
        "input is one prompt. Several prompts are answered together and printed in their order.",
    )
    parser.set_defaults(module="minisgl.cli.generate")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="each is answered on its own")
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="one prompt per line, blank lines are skipped; - is stdin",
    )
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    add_chat_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    add_quiet_flag(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "talk to a model in the terminal"
    parser = commands.add_parser(
        "chat",
        usage="minisgl chat [options]",
        help=summary,
        epilog=CHAT_EXAMPLES,
        description=f"{summary[0].upper()}{summary[1:]}. Reads one message per line when piped.",
    )
    parser.set_defaults(module="minisgl.cli.chat")
    parser.add_argument(
        "--server",
        nargs="?",
        const=DEFAULT_URL,
        metavar="URL",
        help="talk to a running server, any that speaks OpenAI's API, in place of a model in this "
        f"process (without URL: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="what the server asks for (default: MINISGL_API_KEY)"
    )
    add_chat_flags(parser)
    add_quiet_flag(parser)
    add_sampling_flags(parser, shell=True)
    add_engine_flags(parser)


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "serve",
        usage="minisgl serve [options]",
        help="serve a model over HTTP, as the OpenAI API does",
        epilog=SERVE_EXAMPLES,
        description="Serve a model over HTTP, as the OpenAI API does. The port opens when it "
        "is loaded; SIGTERM and Ctrl-C let what runs finish.",
    )
    parser.set_defaults(module="minisgl.cli.serve")
    add_quiet_flag(parser)
    add_server_flags(parser)
    add_engine_flags(parser)


def _add_demo(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "demo",
        usage="minisgl demo [options]",
        help="ask the default model what the capital of France is",
        description="Ask a model what the capital of France is, and tell how fast it answers.",
    )
    parser.set_defaults(module="minisgl.cli.demo")
    add_quiet_flag(parser)
    add_engine_flags(parser)


def _add_inspect(commands: argparse._SubParsersAction[Parser]) -> None:
    summary = "tell what a model is, what it costs, and what fits on this machine"
    parser = commands.add_parser(
        "inspect",
        usage="minisgl inspect [MODEL] [options]",
        help=summary,
        epilog="examples:\n  minisgl inspect\n  minisgl inspect Qwen/Qwen3-0.6B",
        description=f"{summary[0].upper()}{summary[1:]}. No weights are loaded.",
    )
    parser.set_defaults(module="minisgl.cli.inspect", verbose=False)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
