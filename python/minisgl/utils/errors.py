"""Every error that a user, a file, a message or a peer can cause.

They live below everything else because every layer raises them; `minisgl.params` re-exports them.
An error names the thing that is wrong and the way out. `assert` stays for our own mistakes.
"""

from __future__ import annotations


class MinisglError(Exception):
    """Base of all errors that are not bugs of ours."""


class ConfigError(MinisglError, ValueError):
    """A setting (argument, flag, environment variable) that cannot work."""


class InvalidRequestError(MinisglError, ValueError):
    """A request that cannot be served as asked; `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is missing, fails, or refuses these messages."""


class ModelLoadError(MinisglError, ValueError):
    """A model file or folder that is missing, damaged or not usable."""


class UnsupportedModelError(ModelLoadError):
    """A sound model of a kind that this build cannot run."""


class TokenizerError(ModelLoadError):
    """A vocabulary that cannot be turned into a tokenizer."""


class MessageError(MinisglError, ValueError):
    """A message between processes that does not decode."""


class EngineError(MinisglError, RuntimeError):
    """A forward pass that failed; the requests in it end with this error."""


class StartError(MinisglError, RuntimeError):
    """The server could not start; the message says which part of it, and why."""
