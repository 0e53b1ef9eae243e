"""The flags of a server, and what they become: fields of `ServerArgs`.

May import `cli.options`, `config`, `env`. Invariant: a flag that is not given stays out, so that
`ServerArgs` alone says what holds without it; the API key may come from the environment, where
other users cannot read it.
"""

from __future__ import annotations

import argparse
from typing import Any

from minisgl.config import DistributedInfo
from minisgl.env import ENV

from .options import add_table, given

_HTTP = (  # as in `add_table`
    ("server_host", "--host", str, "ADDRESS", "where to listen (default 127.0.0.1)"),
    ("server_port", "--port", int, "N", "0: any free one (default 1919)"),
    (
        "served_model_name",
        "--served-model-name",
        str,
        "NAME",
        "the name of the model in answers; requests for another are refused",
    ),
    (
        "api_key",
        "--api-key",
        str,
        "KEY",
        "what clients must send; better set as MINISGL_API_KEY, which other users cannot see",
    ),
    (
        "allowed_hosts",
        "--allowed-host",
        list,
        "NAME",
        "a name that the server is called by, besides localhost and addresses; * for any",
    ),
    (
        "cors_origins",
        "--cors-origin",
        list,
        "ORIGIN",
        "a web page that may call, as https://example.org; * for any",
    ),
    (
        "insecure_bind",
        "--insecure-bind",
        bool,
        "",
        "listen beyond this machine without an API key",
    ),
    (
        "max_concurrent_requests",
        "--max-concurrent-requests",
        int,
        "N",
        "more are answered 429 (default 1024)",
    ),
)

_PROCESSES = (  # as in `add_table`; --tp-size becomes `tp_info`
    ("num_tokenizer", "--num-tokenizer --tokenizer-count", int, "N", "tokenizer processes"),
    ("drain_seconds", "--drain-seconds", float, "S", "after SIGTERM, what runs has S (default 30)"),
    (
        "tp_size",
        "--tp-size --tp --tensor-parallel-size",
        int,
        "N",
        "share the model among N processes, each with its own device",
    ),
    ("moe_backend", "--moe-backend", str, "NAME", "for mixtures of experts, auto: what suits"),
    (
        "cuda_graph_max_bs",
        "--cuda-graph-max-bs --graph",
        int,
        "N",
        "capture CUDA graphs of up to N requests, 0: none",
    ),
    (
        "use_dummy_weight",
        "--dummy-weight",
        bool,
        "",
        "random weights in place of the model's, to measure without them",
    ),
)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add where the server listens, whom it answers, and its processes."""
    add_table(parser.add_argument_group("HTTP"), _HTTP)
    add_table(parser.add_argument_group("processes"), _PROCESSES)


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerArgs` that were given; `MINISGL_API_KEY` stands in for `--api-key`."""
    options = given(args, (*_HTTP, *_PROCESSES))
    if "tp_size" in options:
        options["tp_info"] = DistributedInfo(0, options.pop("tp_size"))
    if ENV.API_KEY.value:
        options.setdefault("api_key", ENV.API_KEY.value)
    return options
