"""The flags of the HTTP side of a server, and what they become: fields of `ServerArgs`.

May import `env`. Invariant: a flag that is not given stays out, so that `ServerArgs` alone says
what holds without it; the API key may come from the environment, where other users cannot read it.
"""

from __future__ import annotations

import argparse
from typing import Any

from minisgl.env import ENV

_FIELDS = (
    "server_host",
    "server_port",
    "served_model_name",
    "api_key",
    "insecure_bind",
    "max_concurrent_requests",
)
_LISTS = ("allowed_hosts", "cors_origins")


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Add where the server listens and whom it answers."""
    group = parser.add_argument_group("HTTP")
    unset: Any = argparse.SUPPRESS

    def add(flag: str, dest: str, **options: Any) -> None:
        group.add_argument(flag, dest=dest, default=unset, **options)

    add("--host", "server_host", metavar="ADDRESS", help="where to listen (default 127.0.0.1)")
    add("--port", "server_port", type=int, metavar="N", help="0: any free one (default 1919)")
    add(
        "--served-model-name",
        "served_model_name",
        metavar="NAME",
        help="the name of the model in answers; requests for another are refused",
    )
    add(
        "--api-key",
        "api_key",
        metavar="KEY",
        help="what clients must send; better set as MINISGL_API_KEY, which other users cannot see",
    )
    add(
        "--allowed-host",
        "allowed_hosts",
        action="append",
        metavar="NAME",
        help="a name that the server is called by, besides localhost and addresses; * for any",
    )
    add(
        "--cors-origin",
        "cors_origins",
        action="append",
        metavar="ORIGIN",
        help="a web page that may call, as https://example.org; * for any",
    )
    add(
        "--insecure-bind",
        "insecure_bind",
        action="store_true",
        help="listen beyond this machine without an API key",
    )
    add(
        "--max-concurrent-requests",
        "max_concurrent_requests",
        type=int,
        metavar="N",
        help="more are answered 429 (default 1024)",
    )


def http_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerArgs` that were given; `MINISGL_API_KEY` stands in for `--api-key`."""
    options = {name: getattr(args, name) for name in _FIELDS if name in args}
    options |= {name: tuple(getattr(args, name)) for name in _LISTS if name in args}
    if ENV.API_KEY.value:
        options.setdefault("api_key", ENV.API_KEY.value)
    return options
