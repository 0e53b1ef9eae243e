"""One JSON object, character by character: is it still one, and where do its members lie?

Standard library only. Invariant: what is refused cannot be continued to a JSON object; nesting
costs a list entry, never recursion.
"""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_SCALAR = re.compile(r"(true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?)\Z")


class JsonScanner:
    """Takes the characters of an object in.

    members: (start, end) in `chars` of each complete value of the outermost object, by key. key:
    the last of those keys that was read. value_start: where its value starts, None before.
    """

    def __init__(self) -> None:
        self.chars: list[str] = []
        self.members: dict[str, tuple[int, int]] = {}
        self.key: str | None = None
        self.value_start: int | None = None
        self.is_done = False
        self._stack: list[str] = []
        self._expects = "object"
        self._is_key = False
        self._start = 0  # of the string or scalar that is being read
        self._num_hex = 0

    def text(self, start: int = 0, end: int | None = None) -> str:
        """What was taken in, or a part of it."""
        return "".join(self.chars[start:end])

    def push(self, char: str) -> bool:
        """Take one character in; False if no object goes on like this."""
        if self.is_done:
            return False
        if self._expects == "scalar" and char in ",]} \t\n\r":
            if not _SCALAR.match(self.text(self._start)):
                return False
            self._end_value()
        if not self._take(char):
            return False
        self.chars.append(char)
        return True

    def _take(self, char: str) -> bool:
        expects = self._expects
        if expects == "string":
            return self._take_in_string(char)
        if expects == "escape":
            self._expects, self._num_hex = ("hex", 4) if char == "u" else ("string", 0)
            return char == "u" or char in _ESCAPES
        if expects == "hex":
            self._num_hex -= 1
            if not self._num_hex:
                self._expects = "string"
            return char in _HEX
        if expects == "scalar":
            return char.isascii() and (char.isalnum() or char in "+-.")
        if char in _SPACE and expects != "object":
            return True
        if expects == "colon":
            self._expects = "value"
            return char == ":"
        if expects == "comma":
            return self._take_after_value(char)
        if expects in ("key", "first key"):
            if char == "}" and expects == "first key":
                return self._close(char)
            self._begin_string(is_key=True)
            return char == '"'
        if expects == "object":
            return char == "{" and self._begin_value(char)
        if char == "]" and expects == "first value":
            return self._close(char)
        return self._begin_value(char)

    def _take_in_string(self, char: str) -> bool:
        if char == "\\":
            self._expects = "escape"
        elif char == '"':
            if not self._is_key:
                self._end_value(len(self.chars) + 1)
            else:
                self._expects = "colon"
                if len(self._stack) == 1:
                    self.key = json.loads(self.text(self._start) + '"')
                    self.value_start = None
        return char >= " "

    def _take_after_value(self, char: str) -> bool:
        if char == ",":
            self._expects = "key" if self._stack[-1] == "{" else "value"
            return True
        return self._close(char)

    def _begin_string(self, *, is_key: bool) -> None:
        self._expects, self._is_key, self._start = "string", is_key, len(self.chars)

    def _begin_value(self, char: str) -> bool:
        if len(self._stack) == 1:
            self.value_start = len(self.chars)
        if char in _CLOSERS:
            self._stack.append(char)
            self._expects = "first key" if char == "{" else "first value"
        elif char == '"':
            self._begin_string(is_key=False)
        else:
            self._expects, self._start = "scalar", len(self.chars)
            return char in "-0123456789tfn"
        return True

    def _close(self, char: str) -> bool:
        if char != _CLOSERS[self._stack.pop()]:
            return False
        self._end_value(len(self.chars) + 1)
        return True

    def _end_value(self, end: int | None = None) -> None:
        self._expects = "comma"
        self.is_done = not self._stack
        if len(self._stack) == 1 and self.key is not None and self.value_start is not None:
            self.members[self.key] = (self.value_start, len(self.chars) if end is None else end)


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object and nothing else."""
    scanner = JsonScanner()
    return all(scanner.push(char) for char in text.strip(_SPACE)) and scanner.is_done
