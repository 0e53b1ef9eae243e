"""Logits processors: what changes a request's logits before a token is chosen.

The state of a request is created when it is first sampled, lives as long as the request, and takes
in each token right after it was chosen, on the device, so that it is current under overlap too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from minisgl.core import Req


class RowState:
    """Penalties and bias of one request.

    counts: int32 `(vocab,)`, how often each token was generated. seen: bool `(vocab,)`, whether it
    is in the prompt or was generated. Formulas: the OpenAI API reference for frequency and presence
    penalty; CTRL (arXiv:1909.05858) for the repetition penalty.
    """

    def __init__(self, req: Req, vocab_size: int, device: torch.device) -> None:
        params = req.sampling_params
        self._params = params
        ids = req.input_ids.long().to(device)
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.counts.index_add_(
            0, ids[req.num_prompt :], torch.ones_like(ids[req.num_prompt :], dtype=torch.int32)
        )
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.seen[ids] = True
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self.bias = torch.tensor(
            list(params.logit_bias.values()), dtype=torch.float32, device=device
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Change one row `(vocab,)` of float32 logits in place."""
        params = self._params
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self.seen, repeated, logits))
        if params.frequency_penalty:
            logits.sub_(params.frequency_penalty * self.counts)
        if params.presence_penalty:
            logits.sub_(params.presence_penalty * (self.counts > 0))
        if len(self.bias_ids):
            logits.index_add_(0, self.bias_ids, self.bias)

    def update(self, token: torch.Tensor) -> None:
        """Take in the token that was chosen, int `(1,)` on the device; -1 counts for nothing."""
        is_token = token >= 0
        index = token.clamp(min=0).long()
        self.counts.index_add_(0, index, is_token.to(torch.int32))
        self.seen[index] |= is_token


class LogitsProcessors:
    """The states of all requests that need one."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._states: WeakKeyDictionary[Req, RowState] = WeakKeyDictionary()

    def rows_of(self, reqs: list[Req]) -> list[tuple[int, RowState]]:
        """(row in the batch, state) of each request whose logits change."""
        rows = []
        for i, req in enumerate(reqs):
            if req.is_sampled and req.sampling_params.changes_logits:
                if req not in self._states:
                    self._states[req] = RowState(req, self.vocab_size, self.device)
                rows.append((i, self._states[req]))
        return rows
