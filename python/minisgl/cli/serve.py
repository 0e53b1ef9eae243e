"""`minisgl serve`: from flags to `ServerArgs` to a server. May import all below `cli`."""

from __future__ import annotations

import argparse
import logging
import os

from minisgl.config import ServerArgs
from minisgl.server.launch import serve

from .options import engine_options
from .output import note
from .progress import LiveLine, Loading
from .server_options import server_options


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or a failure ends it."""
    server_args = ServerArgs(args.model, **engine_options(args), **server_options(args))
    if args.quiet:  # the children read it too
        os.environ.setdefault("MINISGL_LOG_LEVEL", "WARNING")
        logging.getLogger("minisgl").setLevel(os.environ["MINISGL_LOG_LEVEL"])
    loading = Loading("starting")
    with LiveLine(loading.text, not args.quiet) as line:

        def ready(name: str, url: str) -> None:
            line.close()
            if not args.quiet:
                note(f"minisgl serves {name} at {url} (Ctrl-C ends it)")

        return serve(server_args, on_progress=loading.progress, on_ready=ready)
