"""The command `minisgl`: parse, dispatch, and turn every error into one line and an exit code.

May import everything below it, and does so late: a subcommand's module is imported when it is
called, so `--help` and mistakes in flags cost no torch. Invariant: no traceback for what a user can
cause. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

FAILED, USAGE, INTERRUPTED, READER_GONE = 1, 2, 130, 141
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and give its exit code."""
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old terminal shows ?, it does not end us
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a reader that went away shows here, not in the interpreter's exit
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt shall not stand behind ^C
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return READER_GONE
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        _discard_stdout()
        return _complain(f"the answer cannot be written: {error.strerror}", FAILED)
    return code


def _dispatch(argv: list[str]) -> int:
    try:
        errors = import_module("minisgl.params")
        parser = import_module("minisgl.cli.parser")
    except ValueError as error:  # an environment variable that cannot be used
        return _complain(str(error), USAGE)
    try:
        args = parser.parse(argv)
        return int(import_module(args.module).run(args))
    except errors.ConfigError as error:  # names a field and its flag: here the flag says it all
        return _complain(re.sub(r"\w+ \((--[\w-]+)\)", r"\1", str(error)), USAGE)
    except SystemExit as error:  # argparse has said what there was to say
        return int(error.code or 0)
    except errors.MinisglError as error:
        return _complain(str(error), FAILED)


def _complain(message: str, code: int) -> int:
    print("minisgl:", " ".join(message.split()), file=sys.stderr)
    return code


def _replace_closed_streams() -> None:
    """A process may be started without its streams: then it reads and writes nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _discard_stdout() -> None:
    """Point stdout at nothing, so that what is still buffered does not raise at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is closed, or no file
        return
