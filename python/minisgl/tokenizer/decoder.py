"""Ids back to text, one token at a time. May import `params`.

Invariant: the pieces of a request join to exactly `tokenizer.decode(ids)`, no piece ends inside a
character, and a token costs the same however long the answer is already.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from minisgl.params import PositionLogprobs

_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"


class _Pieces(Protocol):
    """Turns ids into text that is certain; `finish` gives the rest."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class IncrementalDecoder:
    """The text of a growing list of ids: `push` gives what became certain, `flush` the rest.

    tokenizer: ours, or any object with `decode(ids)` such as one of transformers'.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = False) -> None:
        self._pieces = _choose(tokenizer, skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Add one id; the characters that are now whole, often none."""
        return self._pieces.push(token_id)

    def flush(self) -> str:
        """What is left at the end; characters that never became whole show as U+FFFD."""
        return self._pieces.finish()


def _choose(tokenizer: Any, skip_special_tokens: bool) -> _Pieces:
    """The exact way for the decoders that are known, the general one for all others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        table = _TokenTable.of(backend)
        skipped = table.special_ids if skip_special_tokens else frozenset()
        if table.kind == "bytes":
            return _BytePieces(table, skipped)
        if table.kind == "sentencepiece":
            return _SentencePieces(table, skipped)
    return _GeneralPieces(tokenizer, skip_special_tokens)


def _letter_bytes() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the others for the letters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_LETTER_BYTES = _letter_bytes()


class _TokenTable:
    """What each id decodes to on its own, worked out when first met; one per tokenizer.

    kind: "bytes" (byte-level), "sentencepiece" (spaces, byte fallback), or "other".
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.kind, self.strip_first = self._kind(backend)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    @staticmethod
    def of(backend: Any) -> _TokenTable:
        """The table of a library tokenizer, remembered by the last one asked for."""
        global _last_table
        if _last_table is None or _last_table.backend is not backend:
            _last_table = _TokenTable(backend)
        return _last_table

    @staticmethod
    def _kind(backend: Any) -> tuple[str, bool]:
        if backend.decoder is None:
            return "other", False
        state = json.loads(backend.decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        names = [step["type"] for step in steps]
        if names == ["ByteLevel"]:
            return "bytes", False
        replace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        if steps[:1] == [replace] and names[1:3] == ["ByteFallback", "Fuse"]:
            strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            if steps[3:] in ([], [strip]):
                return "sentencepiece", len(steps) == 4
        return "other", False

    def token(self, token_id: int) -> str | None:
        """The raw spelling; None for what is no id."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a byte-level token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id) or ""
            try:
                found = bytes([_LETTER_BYTES[letter] for letter in token])
            except KeyError:  # an added token, spelled as it is
                found = token.encode()
            self._bytes[token_id] = found
        return found

    def text_of(self, token_id: int) -> str | None:
        """The text of a byte-level token; None if it is not whole characters."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]


_last_table: _TokenTable | None = None


class _BytePieces:
    """Byte-level: through an incremental UTF-8 decoder, which replaces as the library does."""

    def __init__(self, table: _TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # characters

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._is_between and (text := self._table.text_of(token_id)) is not None:
            return text
        text = self._utf8.decode(self._table.bytes_of(token_id))
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieces:
    """SentencePiece: pieces as they are; a run of byte tokens is text only if all of it is UTF-8.

    So a run is held until it ends: that is how the library decodes it, one U+FFFD a byte if not.
    """

    def __init__(self, table: _TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._run = bytearray()
        self._at_start = table.strip_first

    def push(self, token_id: int) -> str:
        token = self._table.token(token_id)
        if token is None or token_id in self._skipped:
            return ""
        byte = _fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._strip(self._end_run() + token.replace(_SPACE, " "))

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._strip(self._end_run())


class TokenBytes(dict[int, bytes]):
    """The bytes that each id stands for, by id, worked out when first asked for.

    Those of an answer join to its text; of a byte that is no character on its own, just that byte.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._table = None if backend is None else _TokenTable.of(backend)

    def __missing__(self, token_id: int) -> bytes:
        raw = self[token_id] = self._work_out(token_id)
        return raw

    def named(self, position: PositionLogprobs) -> PositionLogprobs:
        """The same position with the bytes of each of its tokens."""
        chosen, *top = (
            replace(one, raw=self[one.token_id]) for one in (position.chosen, *position.top)
        )
        return PositionLogprobs(chosen, top)

    def _work_out(self, token_id: int) -> bytes:
        table = self._table
        if table is not None and table.kind == "bytes":
            return table.bytes_of(token_id)
        if table is not None and table.kind == "sentencepiece":
            token = table.token(token_id) or ""
            byte = _fallback_byte(token)
            return token.replace(_SPACE, " ").encode() if byte is None else bytes([byte])
        text: str = self._tokenizer.decode([token_id])
        return text.encode()


def _fallback_byte(token: str) -> int | None:
    """The byte that `<0x0A>` stands for, None if `token` is not of this form."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class _GeneralPieces:
    """Any `decode(ids)`: a short window is decoded with each token, and all ids once at the end.

    Exact if more ids never change the text before them, as with every decoder we have met but
    SentencePiece's broken byte runs.
    """

    WINDOW = 8

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._options = {"skip_special_tokens": True} if skip_special_tokens else {}
        self._ids: list[int] = []
        self._window = 0  # where the window starts
        self._told = 0  # ids before this one have been told
        self._text: list[str] = []

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), **self._options)
        return text

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._told])
        after = self._decode(self._ids[self._window :])
        whole = len(after) > len(before) and not after.endswith(_REPLACEMENT)
        if not whole and len(self._ids) - self._told < self.WINDOW:
            return ""
        self._window, self._told = self._told, len(self._ids)
        piece = after[len(before) :]
        self._text.append(piece)
        return piece

    def finish(self) -> str:
        told = "".join(self._text)
        whole = self._decode(self._ids)
        return whole[len(told) :] if whole.startswith(told) else ""
