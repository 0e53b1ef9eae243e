"""Whole-number arithmetic of pages and shards."""

from __future__ import annotations


def div_ceil(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def div_even(a: int, b: int, *, allow_replicate: bool = False) -> int:
    """`a / b`, which must be whole; with `allow_replicate`, 1 if `b` is a multiple of `a`."""
    if allow_replicate and a < b and b % a == 0:
        return 1
    if a % b:
        raise ValueError(f"{a} cannot be divided evenly by {b}")
    return a // b


def align_down(a: int, b: int) -> int:
    """The largest multiple of `b` that is at most `a`."""
    return a // b * b


def align_ceil(a: int, b: int) -> int:
    """The smallest multiple of `b` that is at least `a`."""
    return div_ceil(a, b) * b
