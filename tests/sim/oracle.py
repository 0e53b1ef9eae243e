"""What a request must generate: each next token is a hash of all tokens before it.

The hash is a sum of `(token + 1) * weight(position)` modulo 2^64, mixed, so that an engine can
compute it from tokens in any chunks; one wrong token anywhere changes all later ones. It says what
the request alone with the naive cache would generate; a test runs it so and compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_LEN = 4096
_WEIGHTS = np.random.default_rng(20240229).integers(1, 2**63, MAX_LEN, dtype=np.uint64) | np.uint64(
    1
)
_WEIGHT_LIST = [int(weight) for weight in _WEIGHTS]
_MASK = 2**64 - 1


def mix(total: int, vocab_size: int) -> int:
    """The token that follows a sequence whose weighted sum is `total`."""
    total = ((total ^ (total >> 31)) * 0x9E3779B97F4A7C15) & _MASK
    return (total >> 33) % vocab_size


def weighted(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The terms of the sum, uint64 modulo 2^64."""
    return (tokens + 1).astype(np.uint64) * _WEIGHTS[positions]


def spell_out(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> np.ndarray:
    """The prompt and the `num_tokens` tokens that follow it, int64, whatever ends it early."""
    tokens = list(prompt)
    total = sum((token + 1) * _WEIGHT_LIST[i] for i, token in enumerate(tokens)) & _MASK
    for _ in range(num_tokens):
        token = mix(total, vocab_size)
        total = (total + (token + 1) * _WEIGHT_LIST[len(tokens)]) & _MASK
        tokens.append(token)
    return np.array(tokens, dtype=np.int64)
