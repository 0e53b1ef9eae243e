"""How far each engine's answers are from those of the same file in float32.

The reference is minisgl with dtype="float32" and the weights dequantised, whose logits equal those
of transformers. Every position of windows of ordinary English and code (quality_text.txt) counts:
the mean Kullback-Leibler divergence of the next-token distributions from the reference's, how often
the most likely token is the same, and the perplexity of the text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .table import OURS
from .table import render as render_table
from .workers import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from .run import Run, Variant

TEXT = Path(__file__).with_name("quality_text.txt")
REFERENCE = "minisgl float32 (reference)"
WINDOW = 512
SECONDS = 300.0
ROWS_AT_ONCE = 64


class Score:
    """Sums over positions for one engine."""

    def __init__(self) -> None:
        self.divergence = self.surprise = 0.0
        self.num_same = self.num_positions = self.num_predicted = 0

    def add(self, reference: np.ndarray, logits: np.ndarray, ids: list[int]) -> None:
        """Take in one window: logits (tokens, vocab) of both, and the tokens."""
        following = np.array(ids[1:])
        for begin in range(0, len(ids), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            expected, found = log_softmax(reference[rows]), log_softmax(logits[rows])
            self.divergence += float((np.exp(expected) * (expected - found)).sum())
            self.num_same += int((expected.argmax(1) == found.argmax(1)).sum())
            self.num_positions += len(found)
            wanted = following[rows]
            self.surprise -= float(found[np.arange(len(wanted)), wanted].sum())
            self.num_predicted += len(wanted)

    def row(self, name: str) -> dict[str, Any]:
        """The engine's line as data."""
        return {
            "name": name,
            "kl": self.divergence / self.num_positions,
            "same_top": self.num_same / self.num_positions,
            "perplexity": math.exp(self.surprise / self.num_predicted),
            "positions": self.num_positions,
        }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def measure(run: Run, variants: list[Variant]) -> list[dict[str, Any]]:
    """One line per engine that gives logits; empty if the reference fails."""
    ours = next(v for v in variants if v.name == OURS)
    reference = replace(ours, name=REFERENCE, options={**ours.options, "dtype": "float32"})
    takes_part = [v for v in variants if v.engine in (OURS, "lc", "ik", "ik-wheel")]
    with run.processes([reference, *takes_part]) as processes:
        if REFERENCE not in processes:
            return []
        try:
            job = {"work": "encode", "text": TEXT.read_text(encoding="utf-8")}
            ids = processes[REFERENCE].ask(job, SECONDS)["ids"][: run.args.quality_tokens]
            return _score(run, processes, ids)
        except WorkerError as error:
            run.fail(f"quality: {error}")
            return []


def _score(run: Run, processes: dict[str, WorkerProcess], ids: list[int]) -> list[dict[str, Any]]:
    scores = {name: Score() for name in processes}
    for begin in range(0, len(ids) - 1, WINDOW):
        window = ids[begin : begin + WINDOW]
        expected = _logits(processes[REFERENCE], window, run.log_dir / "reference.npy")
        for name in list(scores):
            try:
                found = expected
                if name != REFERENCE:
                    found = _logits(processes[name], window, run.log_dir / "logits.npy")
                scores[name].add(expected, found, window)
            except WorkerError as error:
                run.fail(f"quality of {name}: {error}")
                del scores[name]
        run.say(f"quality  {begin + len(window)} of {len(ids)} tokens")
    return [score.row(name) for name, score in scores.items()]


def _logits(process: WorkerProcess, ids: list[int], path: Path) -> np.ndarray:
    """Logits (tokens, vocab); the file is gone afterwards."""
    process.ask({"work": "logits", "ids": ids, "path": str(path)}, SECONDS)
    logits = np.load(path, allow_pickle=False)
    path.unlink()
    return logits


def render(rows: list[dict[str, Any]]) -> str:
    """The quality table."""
    reference = rows[0]["perplexity"]
    lines = [
        [row["name"], f"{row['kl']:.6f}", f"{row['same_top']:.2%}", f"{row['perplexity']:.3f}",
         f"{row['perplexity'] / reference - 1:+.2%}"]
        for row in rows
    ]  # fmt: skip
    header = [f"quality, {rows[0]['positions']} positions", "mean KL", "same top token",
              "perplexity", "beside float32"]  # fmt: skip
    return render_table(header, lines)
