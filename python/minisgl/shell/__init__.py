"""The terminal chat: a conversation that remembers, and the loop that reads lines.

`remote` has the conversation with a server. May import `llm`, `server` and below. Invariant: an
answer that is stopped or fails leaves the session usable.
"""

from .conversation import Chat, Conversation, Piece
from .interrupt import EXIT_INTERRUPTED, interruptible, is_stopping
from .repl import run_repl

__all__ = [
    "EXIT_INTERRUPTED",
    "Chat",
    "Conversation",
    "Piece",
    "interruptible",
    "is_stopping",
    "run_repl",
]
