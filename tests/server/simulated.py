"""A simulated engine for servers: no weights, tokens by arithmetic, as fast or slow as it is told.

`make_engine` is given to `serve(engine=...)` by name. An answer walks through the alphabet from a
letter that depends on the prompt, so it tells whose it is. `SIM_SECONDS` in the environment is how
long a step takes, `SIM_FAULT` what goes wrong while loading or at the end; "#raise0" (on rank 0),
"#exit" and "#nan" in a prompt are faults of the step that computes it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.config import SchedulerConfig
from minisgl.core import Batch
from minisgl.params import InvalidRequestError, ModelLoadError

VOCAB_SIZE = 260
MAX_SEQ_LEN = 4096
FIRST_BYTE = ord("!")  # tests.llm.tiny: id 0 is "!", then as in ASCII
LETTERS = np.arange(ord("a"), ord("z") + 1, dtype=np.int32) - FIRST_BYTE


def letters_of(prompt: list[int], num: int) -> list[int]:
    """The first `num` ids of the answer to a prompt."""
    start, length = sum(prompt), len(prompt)
    return [int(LETTERS[(start + length + i) % len(LETTERS)]) for i in range(num)]


@dataclass
class Output:
    next_tokens_gpu: np.ndarray
    next_tokens_cpu: np.ndarray
    copy_done_event: Any


class _Now:
    def synchronize(self) -> None:
        """The tokens are there."""


class SimulatedEngine:
    """Implements `EngineProtocol` with a pool as large as is asked for."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.device = torch.device("cpu")
        self._rank = config.tp_info.rank
        self.num_pages = config.num_page_override or 65536
        self.vocab_size = VOCAB_SIZE
        self.max_seq_len = min(MAX_SEQ_LEN, self.num_pages * config.page_size)
        rows = (config.max_running_req + 1, self.max_seq_len + config.page_size)
        self.page_table = torch.zeros(rows, dtype=torch.int32)
        self._seconds = float(os.environ.get("SIM_SECONDS", "0"))
        self._sums: dict[int, int] = {}

    def set_grammars(self, grammars: Any) -> None:
        """No constraints here."""

    def check_constraint(self, constraint: Any) -> None:
        raise InvalidRequestError("a simulated engine has no grammars", constraint.kind)

    def pad_batch(self, batch: Batch) -> None:
        """Nothing to pad."""

    def prepare(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def launch_order(self) -> Any:
        return nullcontext()

    def forward(self, batch: Batch) -> Batch:
        if self._seconds:
            time.sleep(self._seconds)
        return batch

    def sample(self, batch: Batch, logits: Batch, args: None) -> Output:
        tokens = np.array([self._token(req) for req in batch.reqs], dtype=np.int32)
        return Output(tokens, tokens, _Now())

    def _token(self, req: Any) -> int:
        num_prompt = req.max_device_len - req.output_len
        if req.device_len <= num_prompt:  # a new request, or a chunk of one
            prompt = req.input_ids[:num_prompt]
            self._sums[req.uid] = int(prompt.sum()) + num_prompt
            if self._is_bad(prompt):
                return -1
        return int(LETTERS[(self._sums[req.uid] + req.device_len - num_prompt) % len(LETTERS)])

    def _is_bad(self, ids: torch.Tensor) -> bool:
        prompt = bytes((ids.numpy() + FIRST_BYTE).astype(np.uint8))
        if b"#raise%d" % self._rank in prompt:
            raise RuntimeError("told to fail")
        if b"#exit" in prompt:
            os._exit(9)
        return b"#nan" in prompt

    def shutdown(self) -> None:
        """Nothing to let go of, which can take its time."""
        if os.environ.get("SIM_FAULT") == "end slowly":
            print("told to end slowly", file=sys.stderr, flush=True)
            time.sleep(600)


def make_engine(
    config: SchedulerConfig, progress: Callable[[int, int], None] | None
) -> SimulatedEngine:
    """What the scheduler process calls."""
    fault = os.environ.get("SIM_FAULT", "")
    if fault == "load error":
        raise ModelLoadError("the weights are made of cheese")
    if fault == "load crash":
        os._exit(7)
    if fault == "load bug":
        raise ZeroDivisionError("a bug while loading")
    if fault == "load forever":
        time.sleep(600)
    if progress is not None:
        progress(1, 2)
    return SimulatedEngine(config)
