"""`minisgl bench`: a server under load, or the engine alone. May import everything below `cli`.

Tables and JSON go to standard output, progress and remarks to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

from minisgl.benchmark import (
    HttpClient,
    Load,
    Plan,
    RepeatedRequests,
    Request,
    SyntheticRequests,
    Workload,
    parse_requests,
    summarise,
)
from minisgl.benchmark.load import MAX_USERS
from minisgl.benchmark.report import print_report, progress_bar
from minisgl.env import ENV
from minisgl.params import ConfigError
from minisgl.shell import EXIT_INTERRUPTED
from minisgl.utils.openai_api import Address, parse_models

from .options import engine_options, set_log_level
from .output import note, printable, write
from .prompts import read_lines

DEFAULT_USERS = 8
DEFAULT_REQUESTS = 100
DEFAULT_INPUT = 128
DEFAULT_OUTPUT = 64
WARMUP_TOKENS = 4


def run(args: argparse.Namespace) -> int:
    """Measure what the subcommand names."""
    return _offline(args) if args.command == "offline" else _serve(args)


# --- the engine alone ----------------------------------------------------------------------------


def _offline(args: argparse.Namespace) -> int:
    for name in ("requests", "max_input", "max_output"):
        _require_positive(args, name)
    set_log_level(args)
    options = {"dtype": "auto", **engine_options(args)}
    from minisgl.benchmark import offline

    result = offline.run(
        args.model, args.requests, args.max_input, args.max_output, seed=args.seed, **options
    )
    if args.json:
        write(json.dumps(result) + "\n")
    else:
        write(
            f"{args.requests} requests, {result['input_tokens']:,} tokens read, "
            f"{result['output_tokens']:,} written in {result['seconds']:.2f} s: "
            f"{result['throughput']:,.1f} tokens/s written\n"
        )
    return 0


# --- a server ------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    address, plan = Address.parse(args.url, args.api_key or ENV.API_KEY.value), _plan(args)
    cpu = time.process_time()
    load, was_stopped = asyncio.run(_drive(args, address, plan))
    summary = summarise(load.records, load.end - load.start)
    summary["client_cpu_seconds"] = time.process_time() - cpu
    _tell_errors(load)
    if args.json:
        _write_json(args, load, summary)
    if args.json != "-":
        print_report(summary)
    return EXIT_INTERRUPTED if was_stopped else int(summary["num_complete"] == 0)


def _plan(args: argparse.Namespace) -> Plan:
    """What the flags ask for; `ConfigError` names the flag that makes no sense."""
    _check_numbers(args)
    workload, usual_count = _file_workload(args) if args.prompts else _synthetic_workload(args)
    fields: dict[str, Any] = {"temperature": args.temperature}
    if args.ignore_eos:
        fields["ignore_eos"] = True
    return Plan(
        workload=workload,
        is_chat=args.api == "chat",
        fields=fields | _extra_body(args),
        users=None if args.rate is not None else args.users or DEFAULT_USERS,
        rate=args.rate,
        num_requests=args.requests or (None if args.duration else usual_count),
        duration=args.duration,
        timeout=args.timeout,
        seed=args.seed,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("users", "rate", "requests", "duration", "timeout"):
        _require_positive(args, name)
    if args.users is not None and args.rate is not None:
        raise ConfigError("give --users or --rate, not both")
    if (args.users or 0) > MAX_USERS:
        raise ConfigError(f"--users must be at most {MAX_USERS}")
    if args.rate == math.inf and args.duration is not None and args.requests is None:
        raise ConfigError("--rate inf has no end with --duration: give --requests")
    if args.warmup < 0:
        raise ConfigError("--warmup must be 0 or more")
    if not 0 <= args.temperature <= 100:
        raise ConfigError("--temperature must be in 0 to 100")


def _require_positive(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if value is not None and not value > 0:  # so written, nan is none either
        raise ConfigError(f"--{name.replace('_', '-')} must be above 0")


def _file_workload(args: argparse.Namespace) -> tuple[Workload, int]:
    for name in ("input_tokens", "shared_prefix"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of synthetic prompts: not of --prompts"
            )
    low, high = args.output_tokens or (None, None)
    if low != high:
        raise ConfigError("--output-tokens must be one number with --prompts")
    lines = read_lines(args.prompts, "--prompts")
    requests = parse_requests(lines, high, args.api == "chat")
    return RepeatedRequests(requests), len(requests)


def _synthetic_workload(args: argparse.Namespace) -> tuple[Workload, int]:
    prefix = args.shared_prefix or 0
    input_tokens = args.input_tokens or (max(prefix, DEFAULT_INPUT),) * 2
    if not 0 <= prefix <= input_tokens[0]:
        raise ConfigError("--shared-prefix must be 0 or more, and at most --input-tokens")
    output_tokens = args.output_tokens or (DEFAULT_OUTPUT,) * 2
    return SyntheticRequests(args.seed, input_tokens, output_tokens, prefix), DEFAULT_REQUESTS


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    try:
        fields = json.loads(args.extra_body or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError('--extra-body must be a JSON object, such as {"top_k": 20}')
    return fields


async def _drive(args: argparse.Namespace, address: Address, plan: Plan) -> tuple[Load, bool]:
    """Run the plan; the load, and whether Ctrl-C ended it. `ServerError` if the warm-up fails."""
    client = HttpClient(address)
    model = args.model or parse_models(await client.get("/models"))[0]
    plan = dataclasses.replace(plan, fields={"model": model, **plan.fields})
    load = Load(client, plan)
    pressed: list[int] = []

    def stop() -> None:
        pressed.append(1)
        load.stop()
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process

    loop = asyncio.get_running_loop()
    await _warm_up(args, client, plan)
    loop.add_signal_handler(signal.SIGINT, stop)
    with progress_bar(load, is_wanted=not args.quiet):
        await load.run()
    client.close()
    return load, bool(pressed)


async def _warm_up(args: argparse.Namespace, client: HttpClient, plan: Plan) -> None:
    """A few short requests that are not counted; the first tells whether the rest make sense."""
    short = RepeatedRequests([Request("Hello", None, WARMUP_TOKENS)])
    for index in range(args.warmup):
        await client.stream(
            plan.path, dataclasses.replace(plan, workload=short).body(index), ignore
        )


def ignore(*unused: object) -> None:
    """Take a line of a warm-up."""


def _tell_errors(load: Load) -> None:
    """The first error of each kind in the server's own words."""
    told: set[str] = set()
    for record in load.records:
        if record.error is not None and record.error not in told:
            told.add(record.error)
            note(printable(f"minisgl: request {record.index}: {record.message}"))


def _write_json(args: argparse.Namespace, load: Load, summary: dict[str, Any]) -> None:
    hidden = {"api_key", "module", "command", "json", "quiet", "version"}
    result = {
        "settings": {name: v for name, v in sorted(vars(args).items()) if name not in hidden},
        "summary": summary,
        "requests": [record.as_dict(load.start) for record in load.records],
    }
    text = json.dumps(result, indent=1) + "\n"
    if args.json == "-":
        write(text)
        return
    try:
        Path(args.json).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {args.json}: {error.strerror}") from error
