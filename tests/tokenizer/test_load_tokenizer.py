"""Tokenizers load from GGUF files and folders, and give the ids of the model's own tokenizer."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minisgl.env import ENV
from minisgl.params import InvalidRequestError, ModelLoadError, TokenizerError
from minisgl.tokenizer import Tokenizer, load_tokenizer, merges
from minisgl.tokenizer.merges import merges_from_scores
from minisgl.tokenizer.pre_tokenizers import RULES, find_rule

GOLDEN = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    "": [],
}


@pytest.fixture(scope="session")
def reference(model_file: Path) -> Any:
    """transformers' reading of the file, which misses that this model cuts digits one by one."""
    found = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return found


def test_known_texts_have_their_known_ids(tokenizer: Tokenizer) -> None:
    assert {text: tokenizer.encode(text) for text in GOLDEN} == GOLDEN
    assert {text: tokenizer(text).input_ids for text in GOLDEN} == GOLDEN


def test_ids_and_texts_equal_those_of_the_reference(
    tokenizer: Tokenizer, reference: Any, texts: list[str]
) -> None:
    assert len(texts) > 2000
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == reference.decode(ids)
        skipped = reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped


def test_decoding_gives_back_every_text(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_the_default_tokenizer_has_its_known_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == len(tokenizer) == len(tokenizer.get_vocab()) == 49152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.all_special_ids == list(range(17))
    assert tokenizer.convert_ids_to_tokens([1, 28]) == ["<|im_start|>", ","]
    assert tokenizer.convert_tokens_to_ids("Ġ") == 216


def test_calling_a_tokenizer_works_as_with_hugging_face(tokenizer: Tokenizer) -> None:
    one = tokenizer("Hello world!")
    assert one.input_ids == one["input_ids"] == [19556, 905, 17]
    assert one.attention_mask == [1, 1, 1]
    assert tokenizer(["\n", "Hello"]).input_ids == [[198], [19556]]
    assert tokenizer.batch_decode([[198], [19556, 905]]) == ["\n", "Hello world"]
    assert tokenizer.decode(198) == "\n"


def test_what_is_no_text_or_no_id_is_a_typed_error(tokenizer: Tokenizer) -> None:
    for text in ["lone \ud800 surrogate", 5, None, b"bytes"]:
        with pytest.raises(InvalidRequestError):
            tokenizer.encode(text)  # type: ignore[arg-type]
    for ids in [[-1], [2**40], ["x"], [1.5]]:
        with pytest.raises(InvalidRequestError):
            tokenizer.decode(ids)
    assert tokenizer.decode([49152, 198, 2**31]) == "\n"


def test_loading_the_default_tokenizer_is_fast(model_file: Path) -> None:
    load_tokenizer(model_file)
    started = time.process_time()
    load_tokenizer(model_file)
    assert time.process_time() - started < 0.5


def test_tokenizing_imports_neither_torch_nor_transformers(run_python: Any) -> None:
    program = "import sys, minisgl.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python("-c", program).stdout == "set()\n"


CUTS = {
    "gpt-2": ["It", "'s", "Ġ12345", "!?", "Ċ", "Ġx"],
    "smollm": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!?", "Ċ", "Ġx"],
    "llama-bpe": ["It", "'s", "Ġ", "123", "45", "!?Ċ", "Ġx"],
    "qwen2": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!?Ċ", "Ġx"],
    "gpt-4o": ["It's", "Ġ", "123", "45", "!?Ċ", "Ġx"],
    "tekken": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "!?Ċ", "Ġx"],
    "deepseek-v3": ["It", "'s", "Ġ", "123", "45", "!?Ċ", "Ġx"],
}


@pytest.mark.parametrize("name", CUTS)
def test_each_pre_tokenizer_cuts_in_its_own_way(name: str) -> None:
    cut = find_rule(name, "file").pre_tokenizer().pre_tokenize_str("It's 12345!?\n x")
    assert [piece for piece, _ in cut] == CUTS[name]


LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["Ġ"]
TOKENS = [*LETTERS, "ab", "abc", "Ġx", "<|end|>", "<tool>", "<pad>", "[PAD33]"]
TYPES = [1] * 30 + [3, 4, 3, 5]
BPE_FIELDS: dict[str, Any] = {
    "pre": "gpt-2",
    "merges": ["a b", "ab c", "Ġ x"],
    "token_type": TYPES,
    "bos_token_id": 32,
    "eos_token_id": 30,
    "eot_token_id": 32,
}


def test_a_byte_level_vocabulary_merges_and_marks_its_tokens(write_gguf: Any) -> None:
    found = load_tokenizer(write_gguf("gpt2", TOKENS, **BPE_FIELDS))
    assert found.encode("abcab x<tool><|end|>") == [28, 27, 29, 31, 30]
    assert found.decode([28, 29, 31, 30], skip_special_tokens=True) == "abc x<tool>"
    assert found.all_special_ids == [30, 32]
    assert (found.vocab_size, found.eos_token_ids) == (34, {30, 32})
    assert found.chat_template is None


def test_bos_and_eos_are_added_as_the_file_says(write_gguf: Any) -> None:
    both = {**BPE_FIELDS, "add_bos_token": True, "add_eos_token": True}
    found = load_tokenizer(write_gguf("gpt2", TOKENS, **both))
    assert found.encode("ab") == [32, 27, 30]
    assert found.encode("ab", add_special_tokens=False) == [27]
    llama3 = {**BPE_FIELDS, "pre": "llama-bpe"}
    assert load_tokenizer(write_gguf("gpt2", TOKENS, **llama3)).encode("ab") == [32, 27]
    llama3["add_bos_token"] = False
    assert load_tokenizer(write_gguf("gpt2", TOKENS, **llama3)).encode("ab") == [27]


def test_llama_3_takes_whole_words_whatever_the_merges_say(write_gguf: Any) -> None:
    tokens = [*TOKENS[:-1], "xyz"]
    fields = {**BPE_FIELDS, "token_type": [*TYPES[:-1], 1], "add_bos_token": False}
    assert load_tokenizer(write_gguf("gpt2", tokens, **fields)).encode("xyz") == [23, 24, 25]
    fields["pre"] = "llama3"
    assert load_tokenizer(write_gguf("gpt2", tokens, **fields)).encode("xyz") == [33]


def test_an_unknown_pre_tokenizer_names_the_ways_out(write_gguf: Any, write_folder: Any) -> None:
    path = write_gguf("gpt2", TOKENS, **{**BPE_FIELDS, "pre": "novel"})
    with pytest.raises(
        TokenizerError, match=r"pre-tokenizer 'novel' is not known.*tokenizer_path="
    ) as e:
        load_tokenizer(path)
    assert "pre_tokenizer=" in str(e.value) and all(name in str(e.value) for name in RULES)
    assert load_tokenizer(path, pre_tokenizer="gpt-2").encode("abc") == [28]
    folder = write_folder({})
    for place in (folder, folder / "tokenizer.json"):
        assert len(load_tokenizer(path, tokenizer_path=place).encode("abc")) == 3


@pytest.mark.parametrize(
    ("model", "change", "problem"),
    [
        ("bert", {}, "the kinds gpt2 and llama are read"),
        ("gpt2", {"merges": ["a qq"]}, "merges do not fit its tokens"),
        ("gpt2", {"merges": ["ab"]}, "merges do not fit its tokens"),
        ("gpt2", {"merges": [1, 2]}, "no list of strings tokenizer.ggml.merges"),
        ("gpt2", {"token_type": [1, 2]}, "token_type does not have one number per token"),
        ("gpt2", {"eos_token_id": 34}, "eos_token_id is 34, outside the vocabulary"),
        ("gpt2", {"pre": 5}, "pre is a int, not a str"),
        ("llama", {}, "no tokenizer.ggml.scores"),
        ("llama", {"scores": [0.5]}, "scores does not have one number per token"),
    ],
)
def test_a_broken_vocabulary_is_a_load_error(
    write_gguf: Any, model: str, change: dict[str, Any], problem: str
) -> None:
    path = write_gguf(model, TOKENS, **{**BPE_FIELDS, **change})
    with pytest.raises(ModelLoadError, match=problem):
        load_tokenizer(path)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
SPM_TOKENS += ["▁a", "ab", "▁ab", "b", "a", "▁", "é"]
SPM_FIELDS: dict[str, Any] = {
    "scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(
    write_gguf: Any,
) -> None:
    found = load_tokenizer(write_gguf("llama", SPM_TOKENS, **SPM_FIELDS))
    # ▁a scores better than ab, so ▁ab becomes ▁a + b and then ▁ab; bab becomes b + ab
    assert found.encode("ab bab") == [1, 261, 264, 262, 260]
    assert found.encode("éü") == [1, 264, 265, 3 + 0xC3, 3 + 0xBC]
    assert found.decode([261, 264, 262, 3 + 0xC3, 3 + 0xBC]) == "ab bü"
    assert found.decode([1, 261, 2], skip_special_tokens=True) == "ab"
    assert found.eos_token_ids == {2}
    plain = {**SPM_FIELDS, "add_space_prefix": False, "add_bos_token": False}
    assert load_tokenizer(write_gguf("llama", SPM_TOKENS, **plain)).encode("ab") == [260]


def test_user_defined_runs_of_spaces_merge_as_gemma_publishes_them(write_gguf: Any) -> None:
    tokens = ["<unk>", "▁", "a", "▁a", "  ", "   ", "    ", "<tag>"]
    fields: dict[str, Any] = {
        "scores": [0.0, -9.0, -8.0, -1.0, -1000.0, -1000.0, -1000.0, -1000.0],
        "token_type": [2, 1, 1, 1, 4, 4, 4, 4],
        "add_space_prefix": False,
        "add_bos_token": False,
        "unknown_token_id": 0,
    }
    found = load_tokenizer(write_gguf("llama", tokens, arch="gemma3", **fields))
    assert found.encode("a a  a   a<tag>") == [2, 3, 4, 2, 5, 2, 7]
    assert found.encode(" " * 5 + "a") == [6, 3]
    assert found.decode([2, 4, 5, 7]) == "a     <tag>"
    # of equal scores: the longest left part first, so (3, 1) goes before (2, 2)
    merges = json.loads(found.backend_tokenizer.to_str())["model"]["merges"]
    assert merges[:3] == [["▁▁▁", "▁"], ["▁▁", "▁▁"], ["▁▁", "▁"]]


def test_pieces_that_are_not_text_take_part_in_no_merge() -> None:
    scores = [-2.0, -3.0, -1.0, float("-inf")]
    assert merges_from_scores(["a", "b", "ab", "aab"], scores, longest_left=False) == [(0, 1)]


def test_the_merges_of_a_large_vocabulary_are_kept_and_survive_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENV.CACHE_DIR, "value", str(tmp_path / "cache"))
    monkeypatch.setattr(merges, "CACHED_FROM", 4)
    pieces, scores = ["a", "b", "ab", "abab", "ba"], [-5.0, -5.0, -1.0, -2.0, -3.0]
    expected = merges_from_scores(pieces, scores, longest_left=False)
    assert expected == [(0, 1), (2, 2), (1, 0)]
    (file,) = (tmp_path / "cache" / "merges").iterdir()
    whole = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(merges, "_find", None)  # it is not called
        assert merges_from_scores(pieces, scores, longest_left=False) == expected
        with pytest.raises(TypeError):  # other scores, another file
            merges_from_scores(pieces, [*scores[:-1], -4.0], longest_left=False)
    assert list(file.parent.iterdir()) == [file]
    outside = struct.pack("<6i", 0, 1, 2, 2, 1, 5)
    for content in (
        b"",
        whole[:-1],
        whole[:-8],
        whole + b"x",
        whole[:40] + b"\1" + whole[41:],
        hashlib.sha256(outside).digest() + outside,
    ):
        file.write_bytes(content)
        assert merges_from_scores(pieces, scores, longest_left=False) == expected
        assert file.read_bytes() == whole  # made good
    file.unlink()
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(merges_from_scores, pieces, scores, longest_left=False) for _ in range(64)
        ]
        assert all(job.result() == expected for job in jobs)
    assert file.read_bytes() == whole and len(list(file.parent.iterdir())) == 1
    monkeypatch.setattr(ENV.CACHE_DIR, "value", str(file))  # no folder can be made there
    assert merges_from_scores(pieces, scores, longest_left=False) == expected


def test_a_file_that_does_not_name_its_pre_tokenizer_has_that_of_its_architecture(
    write_gguf: Any,
) -> None:
    tokens = [*TOKENS[:-2], "ĠĠ", "1", "11"]
    fields = {**BPE_FIELDS, "merges": ["1 1"], "token_type": [*TYPES[:-1], 1, 1], "pre": "default"}
    found = load_tokenizer(write_gguf("gpt2", tokens, arch="qwen2", **fields))
    assert found.encode("11") == [33, 33]  # Qwen's digits stand alone
    with pytest.raises(TokenizerError, match="pre-tokenizer 'default' is not known"):
        load_tokenizer(write_gguf("gpt2", tokens, **fields))


def test_special_tokens_of_phi_3_swallow_the_white_space_behind_them(write_gguf: Any) -> None:
    tokens = [*SPM_TOKENS, "<|user|>", "<|endoftext|>"]
    fields = {
        **SPM_FIELDS,
        "scores": [*SPM_FIELDS["scores"], 0.0, 0.0],
        "token_type": [*SPM_FIELDS["token_type"], 3, 3],
        "add_bos_token": False,
    }
    found = load_tokenizer(write_gguf("llama", tokens, arch="phi3", **fields))
    assert found.encode("<|user|> \n a<|endoftext|> b") == [266, 259, 267, 264, 264, 262]
    plain = load_tokenizer(write_gguf("llama", tokens, **fields))
    assert len(plain.encode("<|user|> \n a")) > 2


def test_the_end_of_a_turn_in_the_template_ends_an_answer(write_gguf: Any) -> None:
    tokens = [*TOKENS[:-4], "<|end|>", "<eos>", "<|im_end|>", "x2"]
    fields = {**BPE_FIELDS, "token_type": [*TYPES[:-1], 1], "eos_token_id": 31}
    del fields["eot_token_id"]
    template = "{{ messages }}<|end|>"
    found = load_tokenizer(write_gguf("gpt2", tokens, **fields, chat_template=template))
    assert found.eos_token_ids == {30, 31}
    assert load_tokenizer(write_gguf("gpt2", tokens, **fields)).eos_token_ids == {31}


def test_a_folder_gives_tokens_template_and_every_eos(write_folder: Any) -> None:
    folder = write_folder(
        {
            "tokenizer_config.json": {
                "bos_token": {"__type": "AddedToken", "content": "<s>"},
                "eos_token": "</s>",
                "pad_token": None,
                "chat_template": "old",
                "added_tokens_decoder": {"259": {"content": "<late>", "special": True}},
            },
            "chat_template.jinja": "new {{ bos_token }}",
            "config.json": {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
            "generation_config.json": {"eos_token_id": [257, 9]},
        }
    )
    found = load_tokenizer(folder)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (256, 257, None)
    assert found.eos_token_ids == {257, 7, 8, 9}
    assert found.chat_template == "new {{ bos_token }}"
    assert found.encode("<s>a<x></s><late>")[1:] != [] and found.encode("<late>") == [259]
    assert found.all_special_ids == [256, 257, 259]
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert found.encode("a<s> b<x>") == reference.encode("a<s> b<x>")


@pytest.mark.parametrize(
    ("name", "flags", "ids"),
    [
        ("LlamaTokenizerFast", {"add_bos_token": True}, [256, 64]),
        ("LlamaTokenizer", {"add_bos_token": True, "add_eos_token": True}, [256, 64, 257]),
        ("LlamaTokenizerFast", {"add_bos_token": False}, [64]),
        ("LlamaTokenizerFast", {}, [64]),
        ("PreTrainedTokenizerFast", {"add_bos_token": True}, [64]),
    ],
)
def test_add_bos_token_counts_for_the_classes_that_look_at_it(
    write_folder: Any, name: str, flags: dict[str, bool], ids: list[int]
) -> None:
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", **flags}
    assert load_tokenizer(write_folder({"tokenizer_config.json": config})).encode("a") == ids


def test_templates_are_found_in_all_their_places(write_folder: Any) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    places: list[tuple[dict[str, Any], str | None]] = [
        ({"tokenizer_config.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": named}}, "D"),
        ({"chat_template.json": {"chat_template": "J"}, "tokenizer_config.json": {}}, "J"),
        ({}, None),
    ]
    for i, (files, wanted) in enumerate(places):
        assert load_tokenizer(write_folder(files, f"m{i}")).chat_template == wanted


def test_a_folder_without_a_usable_tokenizer_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"has only tokenizer.model: convert it"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be used"):
        load_tokenizer(tmp_path)


def test_padding_and_truncation_in_tokenizer_json_are_switched_off(write_folder: Any) -> None:
    folder = write_folder({})
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("abcd")) == 4
