"""Ids back to text, one token at a time. May import `params`, `message` and `utils`.

Invariant: the pieces of a request join to exactly `tokenizer.decode(ids)`, no piece ends inside a
character, and a token costs the same however long the answer is already.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from minisgl.message import DetokenizeMsg
from minisgl.params import FinishReason, PositionLogprobs
from minisgl.utils import init_logger

logger = init_logger(__name__)

_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
_CJK_RANGES = (
    (0x3040, 0x30FF),  # kana
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2FA1F),  # the ideographs beyond the first plane
)


def _is_cjk(char: str) -> bool:
    code = ord(char)
    return any(low <= code <= high for low, high in _CJK_RANGES)


def find_printable_text(text: str) -> str:
    """The part of `text` made of whole words, as a reader would like to see it appear.

    All of it if it ends in a newline or a CJK character, else up to and with the last space.
    """
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    return text[: text.rfind(" ") + 1]


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


_last_table: _TokenTable | None = None


class _BytePieces:
    """Byte-level: through an incremental UTF-8 decoder, which replaces as the library does."""

    def __init__(self, table: _TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._table.bytes_of(token_id))

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


class _RequestState:
    """The decoder of one request, and its text that is not part of a whole word yet."""

    def __init__(self, decoder: IncrementalDecoder) -> None:
        self.decoder = decoder
        self.held: list[str] = []  # holds no space and no other place to cut

    def push(self, token_id: int) -> str:
        """Add one id; the words that are now whole."""
        text = self.decoder.push(token_id)
        if not text:
            return ""
        printable = find_printable_text(text)
        if not printable:
            self.held.append(text)
            return ""
        piece = "".join(self.held) + printable
        self.held = [text[len(printable) :]]
        return piece

    def flush(self) -> str:
        """Everything that was held back."""
        return "".join(self.held) + self.decoder.flush()


class DetokenizeManager:
    """The detokenizer's side of all requests: one message in, one piece of text out.

    decode_map: state by uid, from a request's first token to its last or to `forget`.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.decode_map: dict[int, _RequestState] = {}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer and are no part of its text."""
        for name in ("eos_token_ids", "eos_token_id"):
            found = getattr(self.tokenizer, name, None)
            if found is not None:
                return frozenset([found] if isinstance(found, int) else found)
        return frozenset()

    def detokenize(self, msgs: Sequence[DetokenizeMsg]) -> list[str]:
        """The next piece of text of each message's request, in order; often empty."""
        return [self._one(msg) for msg in msgs]

    def _one(self, msg: DetokenizeMsg) -> str:
        state = self.decode_map.get(msg.uid)
        if state is None:
            decoder = IncrementalDecoder(
                self.tokenizer, skip_special_tokens=self.skip_special_tokens
            )
            state = self.decode_map[msg.uid] = _RequestState(decoder)
        piece = "" if self._is_dropped(msg) else state.push(msg.next_token)
        if msg.finished:
            del self.decode_map[msg.uid]
            piece += state.flush()
        return piece

    def _is_dropped(self, msg: DetokenizeMsg) -> bool:
        """Whether the token is no text: there is none after an error, nor if it stops it."""
        if msg.error is not None or msg.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return True
        if not msg.finished or msg.finish_reason is FinishReason.LENGTH:
            return False
        return msg.finish_reason is FinishReason.STOP or msg.next_token in self.eos_token_ids

    def forget(self, uid: int) -> None:
        """Drop the state of a request that was aborted."""
        self.decode_map.pop(uid, None)
