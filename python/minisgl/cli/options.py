"""Flags that several subcommands share, and what they become: `SamplingParams`, `LLM` arguments.

May import `params`, `config`, `env`. Invariant: every flag has the name that errors about its field
mention, and a value without meaning is refused here, before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

from minisgl.config import GIB, SchedulerConfig
from minisgl.env import ENV
from minisgl.params import ConfigError, InvalidRequestError, SamplingParams

DEFAULT_MODEL = "default"
MODEL_HELP = "a folder, a .gguf file, a hub id, or default: SmolLM2-135M-Instruct"
DEFAULT_MAX_TOKENS = 512
DEFAULT_URL = "http://127.0.0.1:1919"  # where `minisgl serve` listens unless told otherwise

Table = Iterable[tuple[str, str, Callable[[str], Any], str, str]]

_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """Bytes from `512M`, `4G`, `1.5GiB` or a plain number."""
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = word[-1:] if word[-1:].isalpha() else ""
    try:
        return int(float(word.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 4G") from error


def parse_template_arg(text: str) -> tuple[str, Any]:
    """(name, value) of `enable_thinking=false`; what is not JSON is a text."""
    name, is_given, value = text.partition("=")
    if not is_given or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


_ENGINE = (  # as in `add_table`
    ("revision", "--revision", str, "REV", "branch, tag or commit of a hub model"),
    ("dtype", "--dtype", str, "TYPE", "of weights: auto, float32, bfloat16 or float16"),
    (
        "kv_dtype",
        "--kv-dtype",
        str,
        "TYPE",
        "of K and V: auto (as --dtype, without it int16 on a CPU), float32, bfloat16, float16, "
        "or on a CPU int16 or int8",
    ),
    (
        "quant",
        "--quant",
        str,
        "HOW",
        "auto: quantised files stay packed on a CPU; q8, q4: pack floats too; none",
    ),
    ("device", "--device", str, "NAME", "auto, cpu or cuda"),
    ("num_threads", "--threads", int, "N", "CPU threads, 0: automatic"),
    ("page_size", "--page-size", int, "N", "tokens per KV page"),
    ("num_page_override", "--num-pages", int, "N", "pages of the KV pool"),
    (
        "cpu_kv_cache_bytes",
        "--kv-memory",
        parse_bytes,
        "SIZE",
        f"most memory of the KV pool on a CPU, as 512M or 4G (default {2 * GIB >> 30}G)",
    ),
    ("memory_ratio", "--memory-ratio", float, "R", "share of a GPU's memory"),
    ("max_running_req", "--max-running-requests", int, "N", "most requests at a time"),
    (
        "max_seq_len_override",
        "--max-seq-len-override",
        int,
        "N",
        "longest request, prompt and answer",
    ),
    (
        "max_extend_tokens",
        "--max-prefill-length --max-extend-length",
        int,
        "N",
        "most prompt tokens of one step",
    ),
    ("cache_type", "--cache-type", str, "TYPE", "radix or naive"),
    (
        "share_prefixes",
        "--share-prefixes",
        int,
        "N",
        "compute a prefix of N or more tokens once for prompts that come together (32 is a good "
        "choice), 0: each on its own (default 0)",
    ),
    (
        "sampling_defaults",
        "--sampling-defaults",
        str,
        "WHOSE",
        "model: what its authors advise counts where a request is silent; none (default model)",
    ),
    (
        "admission",
        "--admission",
        str,
        "POLICY",
        "a request starts if all fit at once at their longest (conservative, the default of all "
        "but serve), or at every later step (peak, which lets more run), or most likely, by the "
        "lengths of the latest answers (optimistic, the default of serve: most run; when memory "
        "runs short the newest waits and goes on later, with the same answer)",
    ),
    (
        "admission_share",
        "--admission-share",
        float,
        "S",
        "optimistic: expect each answer to use this share of what max_tokens still allows it, as "
        "0.5 (default: learnt from the answers)",
    ),
    (
        "kv_spill_bytes",
        "--kv-spill",
        parse_bytes,
        "SIZE",
        "keep so much of what the KV pool has to forget in main memory, as 4G: a prompt that "
        "begins like an earlier one is copied back instead of computed (default 0: forget it)",
    ),
    (
        "kv_spill_dir",
        "--kv-spill-dir",
        str,
        "DIR",
        "keep it in a file in DIR instead; SIZE bytes are taken there, and given back at the end",
    ),
    (
        "kv_prefix_file",
        "--kv-prefix-file",
        str,
        "FILE",
        "remember prompts across runs: load their KV from FILE, save it there at the end; a file "
        "of another model or other settings is ignored",
    ),
    (
        "mixed_chunk",
        "--mixed-chunk",
        int,
        "N",
        "a new prompt rides in the steps of running answers, N tokens in each (256 is a good "
        "choice), so that nobody pauses; 0: prompts first (default 0; of serve 256)",
    ),
    (
        "max_prefill_streak",
        "--max-prefill-streak",
        int,
        "N",
        "running answers get a token after N steps of new prompts at the latest, if steps are not "
        "mixed; 0: when all prompts are computed (default 0)",
    ),
    (
        "queue_order",
        "--queue-order",
        str,
        "ORDER",
        "who starts next: fcfs (as they came, the default), skip (as they came, past those that do "
        "not fit yet), priority (the largest first), longest-prefix (the most cached tokens first)",
    ),
    (
        "max_overtaken",
        "--max-overtaken",
        int,
        "N",
        "so many later ones may start before a request under those orders, then it is next "
        f"(default {SchedulerConfig.max_overtaken})",
    ),
    (
        "max_queued",
        "--max-queued-requests",
        int,
        "N",
        "most requests that wait; one more is refused at once, 0: no limit (default 0)",
    ),
    (
        "attention_backend",
        "--attention-backend --attn",
        str,
        "NAME",
        "auto, native (CPU kernels) or torch",
    ),
)


def add_table(group: argparse._ArgumentGroup, rows: Table) -> None:
    """Add flags that stay out when they are not given.

    rows: (field, its flags, type, what the value is called, help). A `bool` has no value, a `list`
    may be repeated.
    """
    for dest, flags, kind, metavar, text in rows:
        options: dict[str, Any] = {"type": kind, "metavar": metavar}
        if kind is bool:
            options = {"action": "store_true"}
        elif kind is list:
            options = {"action": "append", "metavar": metavar}
        names = flags.split()
        group.add_argument(*names, dest=dest, default=argparse.SUPPRESS, help=text, **options)


def given(args: argparse.Namespace, rows: Table) -> dict[str, Any]:
    """The values of the flags of a table that were given; lists as tuples."""
    values = {name: getattr(args, name) for name, *_ in rows if name in args}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def add_sampling_flags(parser: argparse.ArgumentParser, *, shell: bool = False) -> None:
    """Add the flags of `SamplingParams`; `shell` takes its defaults from the environment."""
    group = parser.add_argument_group(
        "how tokens are chosen",
        "What is not given is as the model's authors advise, if they do, and else the default.",
    )
    unset = argparse.SUPPRESS
    usual: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0}
    usual |= {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    if shell:
        variables = {name: getattr(ENV, f"SHELL_{name.upper()}", None) for name in usual}
        usual |= {name: var.value for name, var in variables.items() if var}
        is_set = {name: v.value for name, v in variables.items() if v and v.value != v.default}
        parser.set_defaults(**is_set)
    parser.set_defaults(usual=usual, max_tokens=usual["max_tokens"])

    def add(flag: str, **options: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        options["help"] += f" (default {usual[name]})" if name in usual else ""
        if name in usual and parser.get_default(name) is None:
            options["default"] = unset
        group.add_argument(flag, **options)

    add("--max-tokens", type=int, metavar="N", help="longest answer")
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens, -1: all")
    add("--top-p", type=float, metavar="P", help="only the likeliest of total probability P")
    add("--min-p", type=float, metavar="P", help="only P times as likely as the first")
    add("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    add("--stop", action="append", metavar="TEXT", default=[], help="end at TEXT; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a conversation."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--template-arg",
        dest="template_args",
        action="append",
        type=parse_template_arg,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template, such as enable_thinking=false; may be repeated",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that become arguments of `LLM`; unset stays out."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model",
        "--model-path",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=MODEL_HELP,
    )
    add_table(group, _ENGINE)
    group.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")


def add_quiet_flag(parser: argparse.ArgumentParser) -> None:
    """Add `-q`, which every subcommand that talks has."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no statistics, no progress")


def sampling_params(
    args: argparse.Namespace, advised: SamplingParams | None = None
) -> SamplingParams:
    """What the flags mean; where they are silent, what is `advised` goes before what is usual."""
    usual = SamplingParams()
    advised = advised or usual
    values = dict(args.usual)
    values |= {name: v for name, v in vars(advised).items() if v != getattr(usual, name)}
    return SamplingParams(**(values | {n: getattr(args, n) for n in _SAMPLING if n in args}))


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags mean in a request to a server; where they are silent, it decides.

    But for the length and the temperature: OpenAI's own defaults make a poor shell.
    """
    fields = {n: getattr(args, n) for n in _SAMPLING if n in args}
    fields = {n: v for n, v in fields.items() if v is not None and v is not False and v != []}
    if args.template_args:
        fields["chat_template_kwargs"] = dict(args.template_args)
    return {"temperature": args.usual["temperature"], **fields}


def check_sampling(args: argparse.Namespace) -> None:
    """Raise `ConfigError` naming the flag whose value has no meaning."""
    try:
        sampling_params(args).validate()
    except InvalidRequestError as error:
        field = error.param or ""
        flag = "--" + field.replace("_", "-")
        raise ConfigError(f"{flag} {str(error).removeprefix(field).lstrip()}") from error


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the engine that were given."""
    return [flags.split()[0] for name, flags, *_ in _ENGINE if name in args]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM` that were given, checked."""
    options = given(args, _ENGINE)
    SchedulerConfig(model_path=args.model, **options)  # raises before torch is loaded
    return options


def set_log_level(args: argparse.Namespace) -> None:
    """Keep the engine quiet unless the user asked to hear it."""
    if "MINISGL_LOG_LEVEL" not in os.environ:
        ENV.LOG_LEVEL.value = "INFO" if args.verbose else "WARNING"
        logging.getLogger("minisgl").setLevel(ENV.LOG_LEVEL.value)
