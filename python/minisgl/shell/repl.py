"""The loop of the chat: read a line, do what it says. Works on a terminal and on a pipe.

May import `llm` and below. Invariant: Ctrl-C during an answer stops that answer and keeps the
session; at the prompt it clears the line; pressed twice, it leaves. On a pipe nobody can react:
Ctrl-C, or an error that will come again with every line, ends the session.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator

from minisgl.params import ConfigError, MinisglError

from .conversation import Conversation
from .interrupt import EXIT_INTERRUPTED, interrupt_calls

PROMPT = "> "
MAX_LINE_BYTES = 1 << 20

HELP = """\
/help           this list
/reset          forget the conversation
/system TEXT    take another system message, and begin anew
/exit           end the session (so does Ctrl-D)
Ctrl-C          stop the answer and keep the session"""

WELCOME = "Type a message. /help lists the commands, Ctrl-D ends the session."


def run_repl(chat: Conversation, answer: Callable[[str], None], note: Callable[[str], None]) -> int:
    """Read lines until the end. answer: streams the answer to a text; note: tells the human."""
    is_terminal = sys.stdin.isatty()
    failed = False
    if is_terminal:
        note(WELCOME)
    for line in _terminal_lines() if is_terminal else _piped_lines():
        text = line.strip()
        if not text:
            continue
        if text.startswith("/"):
            if not _command(chat, text, note):
                break
            continue
        try:
            with interrupt_calls(chat.stop):
                answer(text)
        except MinisglError as error:
            failed = True
            note(f"minisgl: {error}")
            if not is_terminal and chat.is_final(error):
                break
        if chat.is_stopped and not is_terminal:
            return EXIT_INTERRUPTED
    return int(failed and not is_terminal)


def _command(chat: Conversation, text: str, note: Callable[[str], None]) -> bool:
    """Carry out a command; False ends the session."""
    name, _, rest = text.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/help":
        note(HELP)
    elif name == "/reset":
        chat.reset()
        note("(forgotten)")
    elif name == "/system":
        chat.set_system(rest.strip())
        note("(a new conversation)")
    else:
        note(f"there is no command {name}; /help lists them")
    return True


def _terminal_lines() -> Iterator[str]:
    """Lines typed on a terminal, with editing and a history that lives as long as the session."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    session: PromptSession[str] = PromptSession(history=InMemoryHistory())
    was_interrupted = False
    while True:
        try:
            line = session.prompt(PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            if was_interrupted:
                return
            was_interrupted = True
            print("(once more, or Ctrl-D, ends the session)", file=sys.stderr)
            continue
        was_interrupted = False
        yield line


def _piped_lines() -> Iterator[str]:
    """Lines of a pipe or a file, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a long line comes in several pieces
    while data := sys.stdin.buffer.readline(MAX_LINE_BYTES):
        try:
            text = decoder.decode(data, final=len(data) < MAX_LINE_BYTES)
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not UTF-8 text: {error.reason}") from error
        yield text
