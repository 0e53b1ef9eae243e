"""What a process holds for a model: its weights, the KV that is used, and little else."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.kernel import native
from minisgl.llm import LLM

pytestmark = pytest.mark.skipif(
    not native.available() or not os.access("/proc/self/clear_refs", os.W_OK),
    reason="needs native kernels and Linux",
)

SCRIPT = """
import json
import torch
from minisgl import LLM, SamplingParams
import minisgl.llm

def read(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = read("VmRSS")
llm = LLM({model!r}, dtype="auto", num_threads=2, max_seq_len_override=1024)
found = {{"loading": read("VmHWM") - before, "loaded": read("VmRSS") - before}}
llm.generate([list(range(1000, 1992))], SamplingParams(max_tokens=32, ignore_eos=True))
report = llm.engine.memory_report
found["filled"] = read("VmHWM") - before
found["weights"] = report.weight_bytes
found["kv"] = report.kv_bytes // (report.num_pages + 1) * 1024
print(json.dumps(found))
"""


def test_a_model_takes_its_weights_and_the_kv_in_use(default_model_path: Path) -> None:
    script = SCRIPT.format(model=str(default_model_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Measured: 1.10, 1.30 and 1.47.
    assert found["loading"] < 1.2 * found["loaded"]
    assert found["loaded"] < 1.5 * found["weights"]
    assert found["filled"] < 1.75 * (found["weights"] + found["kv"])


def resident_pages(tensor: torch.Tensor, first: int, last: int) -> list[bool]:
    """Of each whole page under rows [first, last) of a tensor, whether it has memory."""
    row = tensor.stride(0) * tensor.itemsize
    begin = -(-(tensor.data_ptr() + first * row) // mmap.PAGESIZE)
    end = (tensor.data_ptr() + last * row) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * max(end - begin, 0))()
    if not found:
        return []
    address, size = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return [bool(page & 1) for page in found]


def test_idle_threads_ask_for_the_memory_of_the_kv_to_come(default_model_path: Path) -> None:
    with LLM(str(default_model_path), dtype="auto", num_threads=2) as llm:
        pool = llm.engine.kv_cache
        layers = range(pool.num_layers)
        parts = [pool.k_cache(i) for i in layers] + [pool.v_cache(i) for i in layers]
        parts += [part for i in layers if (part := pool.v_scale(i)) is not None]
        ahead = (24 << 20) // pool.page_bytes
        assert not any(any(resident_pages(part, 100, 2 * ahead)) for part in parts)
        for count in (20, 300):  # some of it, then all of it is used
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            llm.generate([list(range(count, 2 * count))], params)
            used = 301 if count == 300 else 21
            deadline = time.monotonic() + 30
            # The page where a stretch ends may be missing.
            while not all(all(resident_pages(part, used, used + ahead // 2)) for part in parts):
                assert time.monotonic() < deadline, "nobody asked for it"
                time.sleep(0.01)
        pages = [resident_pages(part, used + 2 * ahead, used + 4 * ahead) for part in parts]
        assert not any(map(any, pages)), "too much was asked for"
