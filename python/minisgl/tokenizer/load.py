"""Find a model's tokenizer on disk and load it. May import `params` and `utils`.

A Hugging Face folder: tokenizer.json, with tokenizer_config.json, special_tokens_map.json,
chat_template.jinja, config.json and generation_config.json where they exist. A GGUF file: its own
vocabulary. Invariant: whatever is wrong with the files is a `ModelLoadError` (`TokenizerError`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tokenizers

from minisgl.params import TokenizerError
from minisgl.utils.gguf import open_gguf
from minisgl.utils.model_files import read_json, resolve_model

from .generation import read_generation_config
from .gguf_vocab import set_edges, tokenizer_from_gguf
from .tokenizer import SpecialTokens, Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
_CLASSES_WITH_EDGES = ("Llama", "CodeLlama", "Gemma", "Cohere")


def load_tokenizer(
    model_path: str | os.PathLike[str],
    *,
    tokenizer_path: str | os.PathLike[str] | None = None,
    pre_tokenizer: str | None = None,
) -> Tokenizer:
    """The tokenizer of a model (anything that `resolve_model` takes).

    tokenizer_path: a folder or tokenizer.json to use instead of the model's own vocabulary.
    pre_tokenizer: for GGUF files, a known name that replaces the file's `tokenizer.ggml.pre`.
    """
    if tokenizer_path is not None:
        place = Path(tokenizer_path)
        return _from_folder(place.parent if place.name == "tokenizer.json" else place)
    if (Path(model_path) / "tokenizer.json").is_file():
        return _from_folder(Path(model_path))
    model = resolve_model(model_path)
    if model.kind == "hf":
        return _from_folder(model.path)
    gguf = open_gguf(model.path)
    backend, special = tokenizer_from_gguf(gguf, pre_tokenizer)
    template, tool_template = (
        value
        if isinstance(value := gguf.metadata.get(f"tokenizer.chat_template{name}"), str)
        else None
        for name in ("", ".tool_use")
    )
    return Tokenizer(
        backend,
        special,
        name_or_path=str(model_path),
        chat_template=template,
        tool_template=tool_template,
    )


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        found = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
        what = f"only {found[0]}" if found else "no tokenizer.json"
        hint = "convert it to tokenizer.json" if found else "put the model's tokenizer.json there"
        hint += " (AutoTokenizer(...).save_pretrained writes one)"
        way = "in Python pass tokenizer_path= to load_tokenizer"
        raise TokenizerError(f"{folder} has {what}: {hint}, or {way}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{file} cannot be used: {error}") from error
    config = _read_optional(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    _add_listed_tokens(backend, config)
    _apply_edge_flags(backend, config, special)
    template, tool_template = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        special,
        name_or_path=str(folder),
        chat_template=template,
        tool_template=tool_template,
        more_eos_ids=_configured_eos_ids(folder),
    )


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _text_of(token: Any) -> str | None:
    """A token in these files is a string, or an object with its text under "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> SpecialTokens:
    fallback = _read_optional(folder / "special_tokens_map.json")
    found: dict[str, str | None] = {}
    for role in ("bos", "eos", "pad", "unk"):
        key = f"{role}_token"
        found[role] = _text_of(config.get(key, fallback.get(key)))
    return SpecialTokens(found["bos"], found["eos"], found["pad"], found["unk"])


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Enter the tokens that only tokenizer_config.json lists, in order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = backend.get_added_tokens_decoder()
    entries = [(int(key), entry) for key, entry in listed.items() if str(key).isdecimal()]
    for token_id, entry in sorted(entries, key=lambda item: item[0]):
        text = _text_of(entry)
        if token_id in known or text is None:
            continue
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        flags = {name: bool(entry[name]) for name in names if name in entry}
        backend.add_tokens([tokenizers.AddedToken(text, **flags)])


def _apply_edge_flags(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: SpecialTokens
) -> None:
    """Honour add_bos_token and add_eos_token for the classes that look at them."""
    name = str(config.get("tokenizer_class", ""))
    wanted = config.get("add_bos_token"), config.get("add_eos_token")
    if not name.startswith(_CLASSES_WITH_EDGES) or not any(isinstance(w, bool) for w in wanted):
        return
    probe = backend.encode("a").ids
    edges = []
    for flag, token, place in zip(wanted, (special.bos, special.eos), (0, -1), strict=True):
        token_id = None if token is None else backend.token_to_id(token)
        present = token_id is not None and bool(probe) and probe[place] == token_id
        edges.append(
            token if token_id is not None and (present if flag is None else flag) else None
        )
    if edges == [None, None]:
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    set_edges(backend, *edges)


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """(template, template when there are tools) from *.jinja, JSON, or tokenizer_config.json."""
    default = _read_template(folder / "chat_template.jinja")
    if default is not None:
        return default, _read_template(folder / "additional_chat_templates" / "tool_use.jinja")
    found = _read_optional(folder / "chat_template.json").get("chat_template")
    found = config.get("chat_template") if found is None else found
    named: dict[Any, Any] = {"default": found}
    if isinstance(found, list):  # several, by name
        named = {e.get("name"): e.get("template") for e in found if isinstance(e, dict)}
    one, other = (
        text if isinstance(text := named.get(name), str) else None
        for name in ("default", "tool_use")
    )
    return one, other


def _read_template(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise TokenizerError(f"{file} has more than {MAX_TEMPLATE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _configured_eos_ids(folder: Path) -> list[int]:
    """`eos_token_id` of config.json and generation_config.json: an id, a list of ids, or absent."""
    found: list[int] = []
    advice = read_generation_config(folder, warn=True)
    for config in (_read_optional(folder / "config.json"), advice):
        for holder in (config, config.get("text_config")):
            value = holder.get("eos_token_id") if isinstance(holder, dict) else None
            values = value if isinstance(value, list) else [value]
            found += [
                v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0
            ]
    return found
