"""Tool calls in the models' own formats, told apart from text while an answer streams.

A call is announced as soon as its name is known and its arguments begin; they follow piece by piece
as they are written. What turns out not to be a call before that is content. May import
`json_scanner` and `utils.text`. Invariant: the joined pieces do not depend on how the text was cut,
and nothing but tags, separators and white space beside calls is left out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from minisgl.utils.text import possible_start

from .json_scanner import JsonScanner, is_object

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_NAMES, *_ARGUMENTS, "type", "id"))
_SEPARATORS = " \t\r\n[],;"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models spells a call: an object between tags.

    closing: empty if nothing ends a call but the object itself. arguments: the key of the
    arguments. is_bare: an object at the start of the answer is a call without the tag.
    """

    name: str
    opening: str
    closing: str = ""
    arguments: str = "arguments"
    is_bare: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")  # Qwen, SmolLM, Hermes
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", arguments="parameters", is_bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]")
TOOL_FORMATS = {style.name: style for style in (HERMES, LLAMA3, MISTRAL)}


def tool_format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; Hermes', the most common, if it shows none."""
    for style in TOOL_FORMATS.values():
        if template is not None and style.opening in template:
            return style
    return HERMES


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of the `index`th call: first its id and name, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolPiece:
    """What one piece of text adds: text that is no call, and pieces of calls, each in order."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def new_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Takes one answer apart.

    names: of the tools that there are; without a tag only an object with one of these is a call.
    num_calls: how many were announced; with any, `finish_reason` is "tool_calls".
    """

    def __init__(
        self,
        style: ToolFormat,
        names: Collection[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = style
        self._names = frozenset(names)
        self._new_id = new_id
        self.num_calls = 0
        self._buffer = ""  # not looked at yet
        self._space = ""  # white space that is content, unless a call comes next
        self._opened = ""  # tag and separators since the last call or text: content, if none comes
        self._is_bare = style.is_bare
        self._scanner = JsonScanner()
        self._num_told = 0  # characters of the object up to where its arguments have been told
        self._step = self._start if style.is_bare else self._content
        self._piece = ToolPiece()

    def push(self, text: str) -> ToolPiece:
        """What is certain after the next piece of the answer."""
        self._buffer += text
        while self._buffer and self._step():
            pass
        return self._take_piece()

    def flush(self) -> ToolPiece:
        """The rest; to be called when no more text comes. An unfinished call stays unfinished."""
        if self._step == self._raw:
            self._tell(self._buffer)
        elif self._step == self._head:
            self._say(self._opened + self._scanner.text())
        elif self._step != self._inside or self._opened.startswith(self._format.opening):
            self._say(self._opened + self._buffer)
        if self._space and not self.num_calls:
            self._piece.content += self._space
        self._buffer = self._opened = self._space = ""
        return self._take_piece()

    def _take_piece(self) -> ToolPiece:
        piece, self._piece = self._piece, ToolPiece()
        return piece

    # The states. Each takes from the buffer what it can; False: it needs more text.

    def _start(self) -> bool:
        """The start of an answer where an object without a tag may be a call."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._opened, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
        if rest[0] == "{":
            self._begin_object()
        else:
            self._to_content()
        return True

    def _content(self) -> bool:
        """Text, up to the next tag."""
        tag = self._format.opening
        at = self._buffer.find(tag)
        if at < 0:
            keep = possible_start(self._buffer, tag)
            self._say(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        self._say(self._buffer[:at])
        self._buffer, self._opened = self._buffer[at + len(tag) :], tag
        self._is_bare, self._step = False, self._inside
        return True

    def _inside(self) -> bool:
        """Behind the tag or an object, where separators stand."""
        rest = self._buffer.lstrip(_SEPARATORS)
        self._opened += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer, closing = rest, self._format.closing
        if not rest:
            return False
        can_close = closing and not self._opened.startswith(self._format.opening)
        if rest[0] == "{":
            self._begin_object()
        elif can_close and rest.startswith(closing):
            self._buffer, self._opened = rest[len(closing) :], ""
            self._step = self._content
        elif can_close and closing.startswith(rest):
            return False
        else:
            self._to_content()
        return True

    def _head(self) -> bool:
        """An object that is not a call yet."""
        scanner = self._scanner
        for i, char in enumerate(self._buffer):
            if not scanner.push(char):
                self._buffer = scanner.text() + self._buffer[i:]
                return self._to_content()
            if self._is_something_else():
                self._buffer = scanner.text() + self._buffer[i + 1 :]
                return self._to_content()
            if self._begins_arguments():
                self._buffer = self._buffer[i + 1 :]
                self._announce()
                self._tell_arguments()
                self._step = self._arguments
                return True
            if scanner.is_done:
                self._buffer = self._buffer[i + 1 :]
                self._finish_object()
                return True
        self._buffer = ""
        return False

    def _arguments(self) -> bool:
        """The arguments of a call that was announced."""
        scanner = self._scanner
        for i, char in enumerate(self._buffer):
            if not scanner.push(char):
                self._tell_arguments()
                self._buffer, self._step = self._buffer[i:], self._raw
                return True
            if scanner.key in scanner.members:
                self._tell_arguments()
                self._buffer, self._step = self._buffer[i + 1 :], self._tail
                return True
        self._tell_arguments()
        self._buffer = ""
        return False

    def _tail(self) -> bool:
        """The rest of the object behind the arguments, which says nothing more."""
        for i, char in enumerate(self._buffer):
            is_taken = self._scanner.push(char)
            if self._scanner.is_done or not is_taken:
                self._buffer, self._step = self._buffer[i + is_taken :], self._inside
                return True
        self._buffer = ""
        return False

    def _raw(self) -> bool:
        """Arguments that are not JSON: told as they are, up to the closing tag."""
        closing = self._format.closing
        at = self._buffer.find(closing) if closing else -1
        if at >= 0:
            self._tell(self._buffer[:at])
            self._buffer, self._step = self._buffer[at + len(closing) :], self._content
            return True
        keep = possible_start(self._buffer, closing) if closing else len(self._buffer)
        self._tell(self._buffer[:keep])
        self._buffer = self._buffer[keep:]
        return False

    # What the states do

    def _begin_object(self) -> None:
        self._scanner, self._num_told, self._step = JsonScanner(), 0, self._head

    def _to_content(self) -> bool:
        """What was held since the tag is text, and so is what comes."""
        opened, self._opened = self._opened, ""
        self._say(opened)
        self._step = self._content
        return True

    def _say(self, text: str) -> None:
        text = self._space + text
        told = text.rstrip()
        self._piece.content += told
        self._space = text[len(told) :]

    def _name(self) -> str | None:
        """The name of the function, None while there is no usable one."""
        for key in _NAMES:
            if key in self._scanner.members:
                name = json.loads(self._scanner.text(*self._scanner.members[key]))
                is_known = not self._is_bare or not self._names or name in self._names
                return name if is_known and _is_text(name) and name else None
        return None

    def _is_something_else(self) -> bool:
        """Whether an object without a tag is just JSON."""
        scanner = self._scanner
        if not self._is_bare or scanner.key is None:
            return False
        has_name = any(key in scanner.members for key in _NAMES)
        return scanner.key not in _KEYS or (has_name and self._name() is None)

    def _begins_arguments(self) -> bool:
        scanner = self._scanner
        if scanner.key not in _ARGUMENTS or scanner.value_start != len(scanner.chars) - 1:
            return False
        return scanner.chars[-1] == "{" and self._name() is not None

    def _finish_object(self) -> None:
        """An object whose arguments could not be told on the way: all of it now, or it is text."""
        scanner, arguments = self._scanner, "{}"
        for key in _ARGUMENTS:
            if key in scanner.members:
                arguments = scanner.text(*scanner.members[key])
        if arguments.startswith('"'):  # some models write JSON in JSON
            arguments = json.loads(arguments)
        is_whole = arguments == "null" or (_is_text(arguments) and is_object(arguments))
        if self._name() is None or not is_whole:
            self._buffer = scanner.text() + self._buffer
            self._to_content()
            return
        self._announce()
        self._tell("{}" if arguments == "null" else arguments)
        self._step = self._inside

    def _announce(self) -> None:
        self._opened = self._space = ""
        self._piece.calls.append(ToolCallDelta(self.num_calls, self._new_id(), self._name()))
        self.num_calls += 1

    def _tell_arguments(self) -> None:
        """What has come of the arguments since the last time."""
        scanner = self._scanner
        start = max(self._num_told, scanner.value_start or 0)
        self._num_told = len(scanner.chars)
        self._tell(scanner.text(start))

    def _tell(self, arguments: str) -> None:
        calls = self._piece.calls
        if arguments and calls and calls[-1].id is None:
            arguments = calls.pop().arguments + arguments
        if arguments:
            calls.append(ToolCallDelta(self.num_calls - 1, arguments=arguments))


def _is_text(value: Any) -> bool:
    """Whether a value from JSON is a text of whole characters: escapes can spell half ones."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
