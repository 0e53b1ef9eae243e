"""Text to token ids and back: tokenizers, chat templates, incremental decoding, stop strings.

Free of torch. May import `params`, `message` and `utils`.
"""

from .chat_template import ChatTemplate
from .detokenize import DetokenizeManager, IncrementalDecoder, find_printable_text
from .load import load_tokenizer
from .stop import StopStringFilter
from .tokenize import TokenizeManager
from .tokenizer import Encoding, Tokenizer

__all__ = [
    "ChatTemplate",
    "DetokenizeManager",
    "Encoding",
    "IncrementalDecoder",
    "StopStringFilter",
    "TokenizeManager",
    "Tokenizer",
    "find_printable_text",
    "load_tokenizer",
]
