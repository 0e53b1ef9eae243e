"""How fast weights load, and how much memory that takes beyond what stays.

    python benchmark/loading.py [--megabytes 300] [--rounds 3] [--case NAME ...]

The bound is what nobody can avoid: reading the file (`cat FILE > /dev/null`, from the page cache)
and then converting every tensor, already in memory, one after the other. "of the bound" is that
time over the time of our load; above 100 % reading and converting overlap. "peak" is the largest
growth of the process while it loads over its growth once every weight has been touched. Each number
comes from a fresh process, the fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

CASES = {  # name: (source, dtype, quant)
    "float16, mapped": ("folder", "float16", "none"),
    "float16 to float32": ("folder", "float32", "none"),
    "float16 to bfloat16": ("folder", "bfloat16", "none"),
    "float16 to q8": ("folder", "float16", "q8"),
    "GGUF, packed": ("gguf", "float16", "stored"),
    "GGUF to float32": ("gguf", "float32", "none"),
    "GGUF to float16": ("gguf", "float16", "none"),
}


def write_folder(folder: Path, megabytes: int) -> None:
    """A random llama of about so many megabytes in float16, without a tokenizer."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocab = 1024, 3072, 32768
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    num_layers = max(1, (megabytes * 10**6 - 2 * vocab * hidden) // layer_bytes)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    for i in range(num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    weights = {f"model.{n}.weight": torch.rand(shape).half() for n, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner}
    config |= {"num_hidden_layers": num_layers, "num_attention_heads": 16, "vocab_size": vocab}
    config |= {"num_key_value_heads": 4, "tie_word_embeddings": True, "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def chosen(dtype: str, quant: str) -> tuple[Any, Any]:
    """The torch dtype and the `pack` argument."""
    from minisgl.models import pack_floats, pack_stored
    from minisgl.utils import resolve_dtype

    packs = {"none": None, "stored": pack_stored, "q8": pack_floats(8)}
    return resolve_dtype(dtype), packs[quant]


def load(path: str, dtype_name: str, quant: str) -> dict[str, float]:
    """Seconds and bytes of one load in this process."""
    import torch

    from minisgl.layers.base import native_parts
    from minisgl.models import create_model, load_model_config, load_model_weights

    dtype, pack = chosen(dtype_name, quant)
    with torch.device("meta"):
        model = create_model(load_model_config(path))
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    load_model_weights(model, path, device="cpu", dtype=dtype, pack=pack)
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - before
    for weight in model.state_dict().values():
        parts = [weight] if weight.shape[1:] == () else native_parts(weight)
        for part in parts:
            if isinstance(part, torch.Tensor):
                part.view(torch.uint8).flatten()[::1024].sum()
    return {"load": seconds, "peak": peak, "stays": memory("VmRSS") - before}


def convert(path: str, dtype_name: str, quant: str) -> dict[str, float]:
    """Seconds that the conversion alone takes, from memory to memory."""
    import torch

    from minisgl.models import open_source
    from minisgl.models.sources import BlockTensor, FloatTensor

    dtype, pack = chosen(dtype_name, quant)
    parts: list[Any] = []
    for part in open_source(path).tensors().values():
        if isinstance(part, FloatTensor):
            parts.append(FloatTensor(part.name, part.view.clone()))
        elif isinstance(part, BlockTensor):
            parts.append(replace(part, data=part.data.clone(), file=None))
    kept: list[Any] = []
    start = time.perf_counter()
    for part in parts:
        packed = pack(part.name, [part]) if pack and len(part.shape) == 2 else None
        if packed is None:
            is_same = isinstance(part, FloatTensor) and part.view.dtype is dtype
            packed = part.view if is_same else torch.empty(part.shape, dtype=dtype)
            if not is_same:
                part.copy_into(packed)
        kept.append(packed)
    return {"convert": time.perf_counter() - start}


def read(path: str) -> float:
    """Seconds of `cat`."""
    start = time.perf_counter()
    subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def measure(paths: dict[str, Path], name: str, rounds: int) -> dict[str, float]:
    """The fastest of each kind of time, the largest peak."""
    source, dtype, quant = CASES[name]
    place = str(paths[source])
    file = place if source == "gguf" else f"{place}/model.safetensors"
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        found.append({"cat": read(file)})
        for part in ("load", "convert"):
            command = [sys.executable, __file__, "--part", part, place, dtype, quant]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(answer.stdout.splitlines()[-1]))
    keys = {key for one in found for key in one}
    return {k: (max if k == "peak" else min)(o[k] for o in found if k in o) for k in keys}


def lines(paths: dict[str, Path], names: list[str], rounds: int) -> Iterator[str]:
    """The table, row by row."""
    heads = (
        f"{'cat s':>8}{'convert s':>11}{'load s':>8}{'of the bound':>14}{'peak':>7}{'stays':>10}"
    )
    yield " " * 22 + heads
    for name in names:
        m = measure(paths, name, rounds)
        bound = (m["cat"] + m["convert"]) / m["load"]
        yield (
            f"{name:22}{m['cat']:8.3f}{m['convert']:11.3f}{m['load']:8.3f}{bound:14.0%}"
            f"{m['peak'] / m['stays']:7.2f}{m['stays'] / 1e6:7.0f} MB"
        )


def main() -> None:
    """Print the table, or, as a child, measure one thing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    parser.add_argument("--model", default="default", help="the GGUF file")
    parser.add_argument("--folder", type=Path, help="keep the random model here, for another run")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part, *what = args.part
        print(json.dumps((load if part == "load" else convert)(*what)))
        return
    from minisgl.utils.model_files import resolve_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_folder(folder, args.megabytes)
        paths = {"folder": folder, "gguf": resolve_model(args.model).path}
        for line in lines(paths, args.case or list(CASES), args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
