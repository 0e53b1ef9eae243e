"""Logging: one line per event on stderr, level from MINISGL_LOG_LEVEL."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from minisgl.env import ENV

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time of the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The current standard error."""
        return sys.stderr


def init_logger(name: str) -> logging.Logger:
    """The logger of one module; the first call sets up the handler of all of them."""
    root = logging.getLogger("minisgl")
    if not root.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
        root.setLevel(ENV.LOG_LEVEL.value)
    return logging.getLogger(name if name.startswith("minisgl") else f"minisgl.{name}")
