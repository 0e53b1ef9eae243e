"""How byte-level vocabularies cut text before merging, by the name that GGUF files give it.

The patterns are facts of the published vocabularies (the `pre_tokenizer` of their tokenizer.json).
Only those that we could compare are listed: a wrong cut gives wrong ids in silence, so an unknown
name is an error that says how to go on.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from minisgl.params import TokenizerError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = _CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + _WORD + r"|\p{N}" + _TAIL
_GPT4O = (
    f"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _TAIL_WITH_SLASH
)
_TEKKEN = f"{_CASED[0]}|{_CASED[1]}" + r"|\p{N}" + _TAIL_WITH_SLASH
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One way of cutting. splits: regular expressions applied in turn; none: GPT-2's own.

    whole_words: a cut piece that is in the vocabulary is taken whole, whatever the merges say.
    add_bos: what holds if the file does not say.
    """

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        """The library's object for it; the last step always spells bytes as letters."""
        steps: list[PreTokenizer] = [
            pre_tokenizers.Split(Regex(text), "isolated") for text in self.splits
        ]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]

    def normalizer(self) -> Normalizer | None:
        """The library's normalizer for it, if there is one."""
        return normalizers.NFC() if self.nfc else None


_GPT2_RULE = PreTokenizerRule()
_DIGITS_RULE = PreTokenizerRule(single_digits=True)
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,), nfc=True)
_GPT4O_RULE = PreTokenizerRule((_GPT4O,))

RULES: dict[str, PreTokenizerRule] = {
    "gpt-2": _GPT2_RULE,
    "gpt2": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": PreTokenizerRule((_QWEN2,)),
    "deepseek-v3": PreTokenizerRule(_DEEPSEEK3),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
    "tekken": PreTokenizerRule((_TEKKEN,), whole_words=True, add_bos=True),
}


def find_rule(name: str, path: str) -> PreTokenizerRule:
    """The rule called `name`; `TokenizerError` with the ways out if it is not known."""
    if name not in RULES:
        raise TokenizerError(
            f"{path}: its pre-tokenizer {name!r} is not known here. In Python pass tokenizer_path= "
            "with the model's tokenizer.json, or pre_tokenizer= with the one it equals, of "
            f"{', '.join(sorted(RULES))}"
        )
    return RULES[name]
