"""Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings.

Free of torch. May import `params`, `message` and `utils`. Chat templates are imported at their
first use: plain prompts need no jinja2.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .answer import WITHOUT_TOKEN, GrowingAnswer
from .decoder import IncrementalDecoder, TokenBytes
from .detokenize import DetokenizeManager, find_printable_text
from .generation import GENERATION_FILE, sampling_defaults
from .load import load_tokenizer
from .stop import StopStringFilter
from .tokenize import TokenizeManager
from .tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

__all__ = [
    "GENERATION_FILE",
    "WITHOUT_TOKEN",
    "ChatTemplate",
    "DetokenizeManager",
    "Encoding",
    "GrowingAnswer",
    "IncrementalDecoder",
    "StopStringFilter",
    "TokenBytes",
    "TokenizeManager",
    "Tokenizer",
    "find_printable_text",
    "load_tokenizer",
    "sampling_defaults",
]


def __getattr__(name: str) -> Any:
    if name == "ChatTemplate":
        return import_module(".chat_template", __name__).ChatTemplate
    raise AttributeError(f"module 'minisgl.tokenizer' has no attribute {name!r}")
