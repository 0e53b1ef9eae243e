"""minisgl: a compact engine that serves large language models, on a CPU and on GPUs.

`from minisgl import LLM, SamplingParams` is all that a program needs. Importing the package itself
loads neither torch nor a model: names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "minisgl.llm", "SamplingParams": "minisgl.params"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
