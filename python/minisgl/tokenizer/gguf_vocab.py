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

from .merges import merges_from_scores
from .pre_tokenizers import find_rule
from .tokenizer import SpecialTokens

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_KEY = "tokenizer.ggml."
_SPACE = "\u2581"
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_PHI_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
_ARCH_RULES = {  # for files from before they named their pre-tokenizer
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
}


def tokenizer_from_gguf(
    gguf: GGUFFile, pre_tokenizer: str | None = None
) -> tuple[Tokenizer, SpecialTokens]:
    """(tokenizer, special tokens) of a GGUF file; `TokenizerError` if it has no usable vocabulary.

    pre_tokenizer: a name that replaces the file's `tokenizer.ggml.pre`.
    """
    model = gguf.field(_KEY + "model", str)
    tokens = list(_strings(gguf, "tokens"))
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(gguf, tokens, pre_tokenizer)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(gguf, tokens), True
    else:
        raise TokenizerError(
            f"{gguf.path}: its vocabulary is of the kind {model!r}; the kinds gpt2 and llama are "
            "read. In Python pass tokenizer_path= with the model's tokenizer.json"
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
    name = gguf.field(_KEY + "pre", str, "default")
    if name == "default":
        name = _ARCH_RULES.get(gguf.field("general.architecture", str, ""), name)
    rule = find_rule(pre_tokenizer or name, gguf.path)
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
    """Changes `tokens`: runs of spaces, which files spell as such, become runs of U+2581 again."""
    scores, types = (_numbers(gguf, name, len(tokens)) for name in ("scores", "token_type"))
    if scores is None:
        raise TokenizerError(f"{gguf.path} has no {_KEY}scores, which its vocabulary needs")
    if types is not None:
        for i in np.flatnonzero(types == _USER_DEFINED).tolist():
            if tokens[i] and not tokens[i].strip(" "):
                tokens[i] = _SPACE * len(tokens[i])
        scores = scores.astype(np.float64)
        scores[types == _USER_DEFINED] = 0.0  # which are never worse than those that were learnt
        scores[np.isin(types, (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)) | np.isnan(scores)] = -np.inf
    is_gemma = gguf.field("general.architecture", str, "").startswith("gemma")
    pairs = merges_from_scores(tokens, scores.tolist(), longest_left=is_gemma)
    merges = [(tokens[left], tokens[right]) for left, right in pairs]
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


def _add_special_tokens(gguf: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Control tokens are matched whole and can be skipped; user-defined ones cannot be.

    Those of Phi 3 swallow the white space behind them, which no field of the file says.
    """
    types = _numbers(gguf, "token_type", len(tokens))
    if types is None:
        return
    is_phi = gguf.metadata.get("general.architecture") == "phi3"
    is_phi = is_phi and gguf.field(_KEY + "model", str) == "llama"
    for kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
        special = kind != _USER_DEFINED
        added = [
            AddedToken(
                tokens[i],
                special=special,
                normalized=False,
                rstrip=is_phi and tokens[i] not in _PHI_PLAIN,
            )
            for i in np.flatnonzero(types == kind).tolist()
            if tokens[i]
        ]
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
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):  # old files name one end of an answer where chats have another
        ends += [end for end in _TURN_ENDS if end in template and end in tokens]
    return SpecialTokens(
        bos=token("bos"),
        eos=ends[0],
        pad=token("padding"),
        unk=token("unknown"),
        more_eos=tuple(end for end in ends[1:] if end is not None),
    )
