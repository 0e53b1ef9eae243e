"""From the vocabulary in a GGUF file to a tokenizer that equals the model's tokenizer.json.

Two kinds: byte-level BPE ("gpt2", with merges) and SentencePiece BPE ("llama", with scores from
which the merges follow). May import `params` and `utils`.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from minisgl.params import TokenizerError
from minisgl.utils.gguf import GGUFFile

from .pre_tokenizers import find_rule
from .tokenizer import SpecialTokens

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEY = "tokenizer.ggml."
_SPACE = "\u2581"
MAX_PIECE_CHARS = 128


def tokenizer_from_gguf(
    gguf: GGUFFile, pre_tokenizer: str | None = None
) -> tuple[Tokenizer, SpecialTokens]:
    """(tokenizer, special tokens) of a GGUF file; `TokenizerError` if it has no usable vocabulary.

    pre_tokenizer: a name that replaces the file's `tokenizer.ggml.pre`.
    """
    model = gguf.field(_KEY + "model", str)
    tokens = _strings(gguf, "tokens")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(gguf, tokens, pre_tokenizer)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(gguf, tokens), True
    else:
        raise TokenizerError(
            f"{gguf.path}: its vocabulary is of the kind {model!r}; the kinds gpt2 and llama are "
            "read. Pass tokenizer_path= with the model's tokenizer.json"
        )
    _add_special_tokens(gguf, tokenizer, tokens)
    special = _special_tokens(gguf, tokens)
    add_bos = gguf.field(_KEY + "add_bos_token", bool, add_bos)
    add_eos = gguf.field(_KEY + "add_eos_token", bool, False)
    if model == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    set_edges(tokenizer, special.bos if add_bos else None, special.eos if add_eos else None)
    return tokenizer, special


def set_edges(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `tokenizer` put `bos` before and `eos` after a text, if asked for special tokens."""
    edges = [("BOS", bos), ("EOS", eos)]
    ids = [(name, tokenizer.token_to_id(token)) for name, token in edges if token is not None]
    if ids:
        single = f"{'BOS ' if bos else ''}$A{' EOS' if eos else ''}"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _strings(gguf: GGUFFile, name: str) -> list[str]:
    values = gguf.metadata.get(_KEY + name)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise TokenizerError(f"{gguf.path} has no list of strings {_KEY}{name}")
    return values


def _numbers(gguf: GGUFFile, name: str, length: int) -> np.ndarray | None:
    values = gguf.metadata.get(_KEY + name)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or len(values) != length:
        raise TokenizerError(f"{gguf.path}: {_KEY}{name} does not have one number per token")
    return values


def _byte_level(
    gguf: GGUFFile, tokens: list[str], pre_tokenizer: str | None
) -> tuple[Tokenizer, bool]:
    """(tokenizer, whether texts start with BOS unless the file says otherwise)"""
    rule = find_rule(pre_tokenizer or gguf.field(_KEY + "pre", str, "default"), gguf.path)
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(gguf, "merges")]
    tokenizer = _build_bpe(gguf, tokens, merges, ignore_merges=rule.whole_words)
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _build_bpe(gguf: GGUFFile, tokens: list[str], merges: Any, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(dict(zip(tokens, count())), merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{gguf.path}: its merges do not fit its tokens: {error}") from error


def _sentencepiece(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    scores = _numbers(gguf, "scores", len(tokens))
    if scores is None:
        raise TokenizerError(f"{gguf.path} has no {_KEY}scores, which its vocabulary needs")
    merges = _merges_from_scores(tokens, scores.tolist())
    unknown = gguf.field(_KEY + "unknown_token_id", int, 0)
    unk_token = tokens[unknown] if 0 <= unknown < len(tokens) else None
    options = {"unk_token": unk_token, "fuse_unk": True, "byte_fallback": True}
    tokenizer = _build_bpe(gguf, tokens, merges, **options)
    prefix = gguf.field(_KEY + "add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = replace
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever pair gives the best-scored piece; here as an ordered list.

    Where several pairs give one piece they are ordered by id, as in the published conversions.
    """
    ids = dict(zip(tokens, count()))
    found: list[tuple[float, int, int, int]] = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, min(len(piece), MAX_PIECE_CHARS)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-score, ids[piece], left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _add_special_tokens(gguf: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens are matched whole and can be skipped; user-defined ones cannot be."""
    types = _numbers(gguf, "token_type", len(tokens))
    if types is None:
        return
    for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
        special = kind != _USER_DEFINED
        chosen = [tokens[i] for i in np.flatnonzero(types == kind).tolist() if tokens[i]]
        added = [AddedToken(text, special=special, normalized=False) for text in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _special_tokens(gguf: GGUFFile, tokens: list[str]) -> SpecialTokens:
    def token(name: str) -> str | None:
        key = f"{_KEY}{name}_token_id"
        if key not in gguf.metadata:
            return None
        token_id = gguf.field(key, int)
        if not 0 <= token_id < len(tokens):
            raise TokenizerError(f"{gguf.path}: {key} is {token_id}, outside the vocabulary")
        return tokens[token_id]

    ends = [token(name) for name in ("eos", "eot", "eom")]
    return SpecialTokens(
        bos=token("bos"),
        eos=ends[0],
        pad=token("padding"),
        unk=token("unknown"),
        more_eos=tuple(end for end in ends[1:] if end is not None),
    )
