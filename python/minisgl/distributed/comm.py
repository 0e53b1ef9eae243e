"""Exchange between ranks over torch.distributed: gloo on a CPU, NCCL on CUDA."""

from __future__ import annotations

from datetime import timedelta

import torch

from minisgl.utils.errors import ConfigError

from .info import DistributedInfo, current_tp_info


def init_distributed(
    tp_info: DistributedInfo,
    device: torch.device | str,
    port: int,
    timeout: float = 60.0,
    host: str = "127.0.0.1",
) -> None:
    """Join the process group of all ranks within `timeout` seconds; nothing for a size of 1."""
    if tp_info.size == 1:
        return
    if not 1 <= port <= 65535:
        raise ConfigError(f"distributed_port must be 1 to 65535 with several ranks, got {port}")
    import torch.distributed as dist

    if dist.is_initialized():
        return
    dist.init_process_group(
        backend="nccl" if torch.device(device).type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=tp_info.rank,
        world_size=tp_info.size,
        timeout=timedelta(seconds=timeout),
    )


def destroy_distributed() -> None:
    """Leave the process group, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class DistributedCommunicator:
    """The two collective operations of tensor parallelism. Every rank sees the same result."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, written into `x` and returned."""
        if current_tp_info().size == 1:
            return x
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` along the first dimension: (size * n, ...)."""
        size = current_tp_info().size
        if size == 1:
            return x
        x = x.contiguous()
        gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, x)
        return gathered
