"""Logits processors: what changes a request's logits before a token is chosen.

The state of a request is created when it is first sampled, lives as long as the request, and takes
in each token right after it was chosen, on the device, so that it is current under overlap too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from minisgl.core import Req
from minisgl.params import Constraint


class MatcherProtocol(Protocol):
    """Where an answer stands in its grammar; `error` if it cannot go on."""

    error: str | None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        ...

    def is_complete_after(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` of the answer were all there can be."""
        ...

    def mask(self) -> Any:
        """Which ids may come next, bool `(vocab,)`, an array on the host."""
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens of the answer."""
        ...


class GrammarsProtocol(Protocol):
    """The compiled constraints of a model; `InvalidRequestError` for one that cannot be used."""

    def check(self, constraint: Constraint) -> None:
        """Wait until it is compiled."""
        ...

    def start(self, constraint: Constraint, tokens: Sequence[int]) -> MatcherProtocol:
        """A matcher for an answer that has these tokens already."""
        ...


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


class MaskState:
    """The grammar of one request.

    The mask depends on the token before, which the host must know. On a GPU it is on its way while
    the next forward is computed, and waited for when that has been launched.
    """

    def __init__(self, matcher: MatcherProtocol) -> None:
        self.matcher = matcher
        self._on_its_way: tuple[torch.Tensor, Any] | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Take every token out of one row `(vocab,)` that may not come, in place."""
        self.settle()
        if not self.matcher.is_complete:  # else the row is in flight for nobody
            refused = ~self.matcher.mask()
            if logits.is_cpu:  # torch's threads would spin beside those of the next forward
                np.putmask(logits.numpy(), refused, -np.inf)
            else:
                logits.masked_fill_(torch.from_numpy(refused).to(logits.device), float("-inf"))

    def update(self, token: torch.Tensor) -> None:
        """Take in the token that was chosen, int `(1,)` on the device."""
        if token.is_cpu:
            self.matcher.take(token.tolist())
            return
        on_host, event = token.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record(torch.cuda.current_stream(token.device))
        self._on_its_way = on_host, event

    def settle(self) -> None:
        """Wait for the token that is on its way."""
        if self._on_its_way is not None:
            on_host, event = self._on_its_way
            self._on_its_way = None
            event.synchronize()
            self.matcher.take(on_host.tolist())


class LogitsProcessors:
    """The states of all requests that need one.

    grammars: makes the matchers of constraints; None: no request has one.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.grammars: GrammarsProtocol | None = None
        self._states: WeakKeyDictionary[Req, RowState] = WeakKeyDictionary()
        self._masks: WeakKeyDictionary[Req, MaskState] = WeakKeyDictionary()

    def rows_of(self, reqs: list[Req]) -> list[tuple[int, RowState | MaskState]]:
        """(row in the batch, state) of each request whose logits change, a mask last."""
        rows: list[tuple[int, RowState | MaskState]] = []
        for i, req in enumerate(reqs):
            params = req.sampling_params
            if req.is_sampled and params.changes_logits:
                if req not in self._states:
                    self._states[req] = RowState(req, self.vocab_size, self.device)
                rows.append((i, self._states[req]))
            if req.is_sampled and params.constraint is not None:
                rows.append((i, self._mask_of(req, params.constraint)))
        return rows

    def _mask_of(self, req: Req, constraint: Constraint) -> MaskState:
        """Made anew from its tokens for a request that was interrupted."""
        if req not in self._masks:
            assert self.grammars is not None, "a constraint that nobody checked"
            tokens = req.input_ids[req.num_prompt :].tolist()
            self._masks[req] = MaskState(self.grammars.start(constraint, tokens))
        return self._masks[req]

    def matcher_of(self, req: Req) -> MatcherProtocol | None:
        """The matcher of a request that was sampled, None if it has no constraint.

        It has taken in all tokens that the host knows of, and perhaps one more.
        """
        state = self._masks.get(req)
        return None if state is None else state.matcher
