"""Tensor parallelism: who this process is among the ranks, and what the ranks exchange.

A size of 1 starts no process group and makes every exchange a no-op. May import `kernel`, `config`,
`utils` and `env`.
"""

from __future__ import annotations

from .comm import DistributedCommunicator, destroy_distributed, init_distributed
from .info import (
    DistributedInfo,
    current_tp_info,
    get_tp_info,
    reset_tp_info,
    set_tp_info,
    try_get_tp_info,
)

__all__ = [
    "DistributedCommunicator",
    "DistributedInfo",
    "current_tp_info",
    "destroy_distributed",
    "get_tp_info",
    "init_distributed",
    "reset_tp_info",
    "set_tp_info",
    "try_get_tp_info",
]
