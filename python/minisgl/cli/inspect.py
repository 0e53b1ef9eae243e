"""`minisgl inspect`: what a model is, what it costs, and what of it fits on this machine.

May import everything below `cli`. Nothing is loaded: configuration, the list of tensors and the
tokenizer say it all. Text of the model's files is printed as text, never as markup.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.config import SchedulerConfig
from minisgl.params import ChatTemplateError, ModelLoadError

from .options import set_log_level
from .output import printable

if TYPE_CHECKING:
    import torch

    from minisgl.models import ModelConfig
    from minisgl.models.sources import SourceTensor
    from minisgl.models.weights import Slot
    from minisgl.utils.model_files import ResolvedModel

Rows = list[tuple[str, ...]]

LEAST_TOKENS = 1024  # of K and V, that a model may be said to fit

_COMMON_VARIABLES = {"messages", "add_generation_prompt", "bos_token", "eos_token"}


def run(args: argparse.Namespace) -> int:
    """Print the page; 1 if a part of the model cannot be used."""
    set_log_level(args)
    from minisgl.models import open_source
    from minisgl.utils.model_files import resolve_model

    model = resolve_model(args.model, args.revision)
    source = open_source(model.path)
    config, tensors = source.config(), source.tensors()
    slots, fault = _slots(config, model.path)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
        tensors.pop("lm_head.weight", None)
    weights = list(tensors.values())
    _print("Model", [*_model(model, weights), *_architecture(config)])
    _print("Weights", _stored(weights))
    tokenizer, is_usable = _tokenizer(model)
    _print("Tokenizer", tokenizer)
    _print("K and V", _kv_cache(config))
    _print("Here", _machine())
    _print("", _fits(config, slots) if fault is None else [(f"cannot be loaded: {fault}",)])
    return int(fault is not None or not is_usable)


def _slots(config: ModelConfig, path: Path) -> tuple[list[Slot], str | None]:
    """What the model's weights are made of, or why it cannot be loaded.

    As far as the names and shapes of its tensors tell.
    """
    import torch

    from minisgl.models import check_weights, create_model

    try:
        with torch.device("meta"):
            return check_weights(create_model(config), path), None
    except ModelLoadError as error:
        return [], str(error)


def _print(title: str, rows: Rows) -> None:
    """A section: labels, and values in columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for _ in range(max(map(len, rows))):
        table.add_column(overflow="fold")
    for label, *values in rows:
        table.add_row(Text(f"  {label}", "cyan"), *(Text(printable(value)) for value in values))
    if title:
        console.print(Text(f"\n{title}", "bold"))
    console.print(table)


def _model(model: ResolvedModel, weights: list[SourceTensor]) -> Rows:
    from minisgl.engine import human

    kind = "GGUF file" if model.kind == "gguf" else "Hugging Face folder"
    size = human(sum(weight.nbytes for weight in weights))
    return [("name", model.name), (kind, str(model.path)), ("weights", size)]


def _architecture(config: ModelConfig) -> Rows:
    rows: Rows = [
        ("family", config.model_type),
        ("layers", f"{config.num_layers} of width {config.hidden_size:,}"),
        (
            "attention",
            f"{config.num_qo_heads} heads of {config.head_dim} over {config.num_kv_heads} of keys "
            f"and values{_windows(config)}",
        ),
    ]
    if config.is_moe:
        mixed = (
            f"{config.num_experts} experts of {config.moe_intermediate_size:,}, "
            f"{config.num_experts_per_tok} per token, in {len(config.sparse_layers)} layers"
        )
        rows.append(("MLP", mixed))
    if len(config.sparse_layers) < config.num_layers:
        rows.append(("MLP", f"{config.intermediate_size:,}, {config.hidden_act}"))
    head = "the head is the embedding" if config.tie_word_embeddings else "with a head of its own"
    rope = config.rotary_config
    scaling = f", scaled: {rope.scaling['rope_type']}" if rope.scaling else ""
    rows.append(("vocabulary", f"{config.vocab_size:,} tokens, {head}"))
    rows.append(("context", f"{config.max_position:,} tokens, rope base {rope.base:,.0f}{scaling}"))
    return rows


def _windows(config: ModelConfig) -> str:
    windows = Counter(window for window in config.layer_windows if window is not None)
    return "".join(f", the last {size:,} tokens in {n} layers" for size, n in windows.items())


def _type_name(weight: SourceTensor) -> str:
    from minisgl.models.sources import BlockTensor

    if isinstance(weight, BlockTensor):
        return weight.type_name
    return _name(weight.tensor().dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(weight: SourceTensor) -> int:
    total = 1
    for size in weight.shape:
        total *= size
    return total


def _stored(weights: list[SourceTensor]) -> Rows:
    """How many weights are stored as what, the largest part first."""
    from minisgl.engine import human

    tensors: Counter[str] = Counter(_type_name(weight) for weight in weights)
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for weight in weights:
        numbers[_type_name(weight)] += _count(weight)
        sizes[_type_name(weight)] += weight.nbytes
    rows: Rows = [
        (
            name,
            f"{_short(numbers[name])} parameters",
            f"{size * 8 / max(numbers[name], 1):.2f} bits each",
            human(size),
            f"{tensors[name]} tensors",
        )
        for name, size in sizes.most_common()
    ]
    total, size = sum(numbers.values()), sum(sizes.values())
    if len(rows) > 1:
        row = f"{_short(total)} parameters", f"{size * 8 / total:.2f} bits each", human(size)
        rows.append(("all", *row, f"{len(weights)} tensors"))
    return rows


def _short(count: int) -> str:
    """A number for people: 134.5 M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def _tokenizer(model: ResolvedModel) -> tuple[Rows, bool]:
    """The section, and whether all of it can be used."""
    from minisgl.tokenizer import GENERATION_FILE, load_tokenizer, sampling_defaults
    from minisgl.utils.model_files import read_json

    try:
        tokenizer = load_tokenizer(model.path)
    except ModelLoadError as error:
        return [("cannot be used", str(error))], False
    rows: Rows = [("tokens", f"{len(tokenizer):,}")]
    for role in ("bos", "eos", "pad", "unk"):
        token_id = getattr(tokenizer, f"{role}_token_id")
        if token_id is not None:
            rows.append((role.upper(), f"{getattr(tokenizer, f'{role}_token')} ({token_id})"))
    ends = sorted(tokenizer.eos_token_ids)
    if ends != [tokenizer.eos_token_id]:
        names = [f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ends]
        rows.append(("ends at", ", ".join(names) or "nothing: give max_tokens or stop"))
    begins = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    rows.append(("a text begins", "with BOS" if begins else "without BOS"))
    rows.append(("chat template", _template(tokenizer.chat_template)))
    if tokenizer.tool_template is not None:
        rows.append(("with tools", _template(tokenizer.tool_template)))
    advice = model.path / GENERATION_FILE
    try:
        if advice.is_file():
            read_json(advice)
    except ModelLoadError as error:
        return [*rows, ("advised sampling", f"cannot be used: {error}")], False
    advised = ", ".join(f"{name} {v:g}" for name, v in sampling_defaults(model.path).items())
    return [*rows, ("advised sampling", advised or "none: greedy unless asked otherwise")], True


def _template(source: str | None) -> str:
    from minisgl.tokenizer import ChatTemplate

    if source is None:
        return "none: plain prompts only"
    try:
        variables = sorted(ChatTemplate(source).variables - _COMMON_VARIABLES)
    except ChatTemplateError as error:
        return str(error)
    reads = f", understands {', '.join(variables)}" if variables else ""
    return f"{len(source):,} characters{reads}"


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token."""
    import torch

    from minisgl.kvcache import create_kvcache_pool

    pool = create_kvcache_pool(
        num_kv_heads=config.num_kv_heads,
        num_layers=config.num_layers,
        head_dim=config.head_dim,
        num_pages=1,
        page_size=1,
        dtype=dtype,
        device=torch.device("meta"),
    )
    return pool.page_bytes


def _kv_cache(config: ModelConfig) -> Rows:
    from minisgl.engine import human
    from minisgl.utils import AUTO_KV_DTYPE, KV_DTYPES

    rows: Rows = []
    for name in ("float32", "float16", "bfloat16", "int16", "int8"):
        size = _kv_bytes(config, KV_DTYPES[name])
        whole = f"{human(size * config.max_position)} for the whole context"
        rows.append((name, f"{human(size)} per token", whole))
    pool = SchedulerConfig.cpu_kv_cache_bytes
    tokens = _short(pool // _kv_bytes(config, AUTO_KV_DTYPE))
    auto = f"{tokens} tokens in {_name(AUTO_KV_DTYPE)} (--kv-memory)"
    return [*rows, ("on a CPU", f"up to {human(pool)}", auto)]


def _machine() -> Rows:
    import torch

    from minisgl.engine import human
    from minisgl.engine.device import count_threads, free_memory
    from minisgl.kernel import native

    kernels = f"native kernels ({native.isa()})" if native.available() else "no native kernels"
    free = human(free_memory(torch.device("cpu")))
    rows: Rows = [("CPU", f"{count_threads()} threads, {kernels}, {free} free")]
    for i in range(torch.cuda.device_count()):
        free = human(free_memory(torch.device("cuda", i)))
        rows.append((f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {free} free"))
    return rows


def _choices(config: ModelConfig, slots: list[Slot]) -> Iterator[tuple[str, int, torch.dtype]]:
    """(flags, bytes of the weights, type of K and V) of the ways to run it on a CPU."""
    import torch

    from minisgl.kernel import native
    from minisgl.models.packing import loaded_bytes
    from minisgl.utils import AUTO_KV_DTYPE, resolve_dtype

    def size(dtype: torch.dtype, quant: str) -> int:
        return sum(loaded_bytes(slot, dtype, quant) for slot in slots)

    is_packed = False
    if native.available():
        dtype = resolve_dtype(config.dtype)
        stored = size(dtype, "stored")
        is_packed = stored != size(dtype, "none")
        yield "as it is", stored, AUTO_KV_DTYPE
        yield "--kv-dtype int8", stored, torch.int8
        for quant in () if is_packed else ("q8", "q4"):
            yield f"--quant {quant}", size(dtype, quant), AUTO_KV_DTYPE
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        flags = f"--dtype {_name(dtype)}"
        if is_packed and dtype is not torch.float32:
            flags += " --quant none"
        yield flags, size(dtype, "none"), dtype


def _fits(config: ModelConfig, slots: list[Slot]) -> Rows:
    import torch

    from minisgl.engine import human
    from minisgl.engine.device import free_memory

    free = free_memory(torch.device("cpu"))
    rows: Rows = [("", "weights", "tokens of K and V", "whole contexts")]
    for flags, size, kv_dtype in _choices(config, slots):
        tokens = int(free - size) // _kv_bytes(config, kv_dtype)
        room: tuple[str, ...] = ("does not fit",)
        if tokens >= min(config.max_position, LEAST_TOKENS):
            contexts = tokens / config.max_position
            room = (_short(tokens), f"{contexts:,.1f}" if contexts < 100 else f"{contexts:,.0f}")
        rows.append((flags, human(size), *room))
    return rows
