"""Every environment variable that minisgl reads, parsed once.

`ENV.<NAME>.value` is the parsed value, read from `MINISGL_<NAME>` when the module is imported, and
may be assigned at run time. A value that does not parse is an `EnvError` at start, never a silent
default. Imports the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PREFIX = "MINISGL_"

_EXPECTED: dict[Any, str] = {int: "use a whole number", float: "use a number"}


class EnvError(ValueError):
    """An environment variable whose value cannot be used."""


def parse_bool(text: str) -> bool:
    """Parse the usual spellings of yes and no; `ValueError` on anything else."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("use one of true, false, 1, 0, yes, no, on, off")


def parse_optional_bool(text: str) -> bool | None:
    """Like `parse_bool`; an empty text means "not set"."""
    return None if not text.strip() else parse_bool(text)


class EnvVar(Generic[T]):
    """One variable: its default, its parser, and the value in force."""

    def __init__(
        self,
        name: str,
        default: T,
        parse: Callable[[str], T],
        help: str,
        *,
        is_secret: bool = False,
    ) -> None:
        self.name = PREFIX + name
        self.is_secret = is_secret
        self.default = default
        self.parse = parse
        self.help = help
        self.value: T = default

    @property
    def shown(self) -> str:
        """The value as it may be printed."""
        return "(secret)" if self.is_secret and self.value else str(self.value)

    def read(self) -> None:
        """Take the value from the process environment; `EnvError` if it does not parse."""
        text = os.environ.get(self.name)
        if text is None:
            self.value = self.default
            return
        try:
            self.value = self.parse(text)
        except ValueError as error:
            expected = _EXPECTED.get(self.parse, error)
            raise EnvError(f"{self.name}={text!r} cannot be used: {expected}") from error


class EnvVars:
    """All variables, as attributes. See `describe()` for the list with help texts."""

    def __init__(self) -> None:
        self.DISABLE_OVERLAP_SCHEDULING: EnvVar[bool | None] = EnvVar(
            "DISABLE_OVERLAP_SCHEDULING",
            None,
            parse_optional_bool,
            "unset: overlap on CUDA only; true: never; false: always",
        )
        self.SHELL_MAX_TOKENS = EnvVar("SHELL_MAX_TOKENS", 2048, int, "longest answer in the shell")
        self.SHELL_TEMPERATURE = EnvVar("SHELL_TEMPERATURE", 0.6, float, "temperature of the shell")
        self.SHELL_TOP_K = EnvVar("SHELL_TOP_K", -1, int, "top-k of the shell, -1 for all")
        self.SHELL_TOP_P = EnvVar("SHELL_TOP_P", 1.0, float, "top-p of the shell")
        self.LOG_LEVEL = EnvVar(
            "LOG_LEVEL", "INFO", _parse_log_level, "DEBUG, INFO, WARNING, ERROR"
        )
        self.CACHE_DIR = EnvVar("CACHE_DIR", "", str, "where fetched models are kept")
        self.NUM_THREADS = EnvVar("NUM_THREADS", 0, _parse_count, "CPU threads, 0 for automatic")
        self.ISA = EnvVar("ISA", "", _parse_isa, "instruction set of the CPU kernels, empty: best")
        self.API_KEY = EnvVar("API_KEY", "", str, "the server's API key", is_secret=True)
        for var in self.all():
            var.read()

    def all(self) -> list[EnvVar[Any]]:
        """Every variable, in the order of definition."""
        return [value for value in vars(self).values() if isinstance(value, EnvVar)]

    def describe(self) -> str:
        """One aligned line per variable: name, value in force, what it does."""
        return "\n".join(f"{var.name:<36} {var.shown:<10} {var.help}" for var in self.all())


def _parse_log_level(text: str) -> str:
    level = text.strip().upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("use one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    return level


def _parse_isa(text: str) -> str:
    name = text.strip().lower()
    if name not in ("", "portable", "avx2", "avxvnni", "avx512", "neon"):
        raise ValueError("use one of portable, avx2, avxvnni, avx512, neon")
    return name


def _parse_count(text: str) -> int:
    word = text.strip()
    if not (word.isdecimal() and len(word) <= 3 and int(word) <= 256):
        raise ValueError("use 0 for automatic, or 1 to 256")
    return int(word)


ENV = EnvVars()
