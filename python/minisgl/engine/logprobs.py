"""Log-probabilities of the model, before any logits processor: of answers and of prompts.

`plan` says which rows of logits a batch needs, `measure` reads them. Each row is measured alone, in
one order, so the numbers do not depend on the batch, the chunks or the threads. Memory: a batch
holds logits of the positions it was planned for, and the scheduler bounds those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minisgl.core import Req
from minisgl.params import Logprob, PositionLogprobs


@dataclass
class PromptRows:
    """What one request of a batch is told of its prompt.

    targets: the prompt tokens from position `start` on; the logits of each are a row of the batch's
    logits, from `first_row` on.
    """

    start: int
    first_row: int
    targets: list[int]
    num_top: int


@dataclass
class LogprobPlan:
    """Which logits a batch is measured on.

    answers: (request of the batch, number of likely tokens to tell). prompts: by request of the
    batch. wanted: token rows whose logits are computed, last: the row of those logits that
    belongs to each request's last position; None: there are no others.
    """

    answers: list[tuple[int, int]] = field(default_factory=list)
    prompts: dict[int, PromptRows] = field(default_factory=dict)
    wanted: torch.Tensor | None = None
    last: torch.Tensor | None = None


def plan(reqs: Sequence[Req], device: torch.device) -> LogprobPlan | None:
    """What the requests of a batch ask for; None if that is nothing."""
    if all(r.sampling_params.logprobs is r.sampling_params.prompt_logprobs is None for r in reqs):
        return None
    found = LogprobPlan()
    wanted: list[int] = []
    last: list[int] = []
    end = 0
    for i, req in enumerate(reqs):
        start, end = end, end + req.extend_len
        params = req.sampling_params
        if params.logprobs is not None and req.is_sampled:
            found.answers.append((i, params.logprobs))
        rows = range(end - 1, end)
        # A prompt that is computed again for an answer that was interrupted has been told already.
        if params.prompt_logprobs is not None and req.device_len == req.num_prompt:
            rows = range(start, end)
            targets = req.input_ids[req.cached_len + 1 :].tolist()
            if req.next_id is not None:
                targets.append(req.next_id)
            found.prompts[i] = PromptRows(
                req.cached_len + 1, len(wanted), targets, params.prompt_logprobs
            )
        wanted += rows
        last.append(len(wanted) - 1)
    if found.prompts:
        found.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)
        found.last = torch.tensor(last, dtype=torch.int64, device=device)
    return found


class StepLogprobs:
    """The log-probabilities of one step; to be read when the step's event is ready.

    measured: (log-probability, likely ids, theirs), first of `plan.answers`, then of each prompt.
    """

    def __init__(self, plan: LogprobPlan, measured: list[tuple[Any, Any, Any]]) -> None:
        self._plan = plan
        self._measured = measured
        self._answers = {req: i for i, (req, _) in enumerate(plan.answers)}
        ends = np.cumsum([len(plan.answers), *(len(p.targets) for p in plan.prompts.values())])
        self._prompts = dict(zip(plan.prompts, ends.tolist()))

    def answer(self, req: int, token: int) -> PositionLogprobs | None:
        """Of `token`, chosen for the batch's `req`th request; None if it did not ask."""
        i = self._answers.get(req)
        return None if i is None else self._position(i, token)

    def prompt(self, req: int) -> tuple[int, list[PositionLogprobs]] | None:
        """(first position, an entry per token) of a request's prompt, as far as this step went."""
        start, rows = self._prompts.get(req), self._plan.prompts.get(req)
        if start is None or rows is None:
            return None
        return rows.start, [self._position(start + i, t) for i, t in enumerate(rows.targets)]

    def _position(self, i: int, token: int) -> PositionLogprobs:
        chosen, ids, values = (part.tolist() for part in self._measured[i])
        return PositionLogprobs(
            Logprob(token, chosen), [Logprob(likely, value) for likely, value in zip(ids, values)]
        )


def measure(
    plan: LogprobPlan, logits: torch.Tensor, last: torch.Tensor, tokens: Any
) -> StepLogprobs:
    """Read what is planned from float32 logits `(wanted, vocab)`.

    last: those of each request's last position; tokens: what was chosen there.
    """
    read = _read_on_host if logits.is_cpu else _read_on_device
    measured = [read(last[req], tokens[req], num_top) for req, num_top in plan.answers]
    for prompt in plan.prompts.values():
        for row, target in enumerate(prompt.targets, prompt.first_row):
            measured.append(read(logits[row], target, prompt.num_top))
    return StepLogprobs(plan, measured)


def _read_on_host(row: torch.Tensor, token: Any, num_top: int) -> tuple[Any, Any, Any]:
    """(log-probability of `token`, the most likely ids, theirs) of one row, by numpy."""
    logits = row.numpy()
    best = logits.max()
    total = float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
    ids = np.empty(0, dtype=np.int64)
    if num_top:
        num_top = min(num_top, len(logits))
        ids = np.argpartition(logits, len(logits) - num_top)[len(logits) - num_top :]
        ids = ids[np.lexsort((ids, -logits[ids]))]
    values = logits[ids].astype(np.float64) - total
    return np.float64(logits[int(token)]) - total, ids, values


def _read_on_device(row: torch.Tensor, token: Any, num_top: int) -> tuple[Any, Any, Any]:
    """The same by torch, on its way to the host."""
    logprobs = row.double().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, len(row)))
    chosen = logprobs.index_select(0, torch.as_tensor(token, device=row.device).view(1).long())[0]
    chosen, ids, values = (one.to("cpu", non_blocking=True) for one in (chosen, ids, values))
    return chosen, ids, values
