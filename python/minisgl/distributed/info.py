"""This process's rank, set once per process (again with the same values does nothing)."""

from __future__ import annotations

from minisgl.config import DistributedInfo

_current: list[DistributedInfo] = []


def set_tp_info(rank: int, size: int) -> None:
    """Say who this process is; `RuntimeError` if it has already been told something else."""
    info = DistributedInfo(rank, size)
    if _current and _current[0] != info:
        raise RuntimeError(f"the tensor-parallel rank is already set to {_current[0]}, not {info}")
    _current[:] = [info]


def get_tp_info() -> DistributedInfo:
    """Who this process is; `RuntimeError` if nobody has said so."""
    if not _current:
        raise RuntimeError("the tensor-parallel rank is not set: call set_tp_info first")
    return _current[0]


def try_get_tp_info() -> DistributedInfo | None:
    """Who this process is, or None."""
    return _current[0] if _current else None


def current_tp_info() -> DistributedInfo:
    """Who this process is; alone, if nobody has said so."""
    return _current[0] if _current else DistributedInfo()


def reset_tp_info() -> None:
    """Forget the rank."""
    _current.clear()
