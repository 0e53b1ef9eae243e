"""Admission: may one more request start, given what is promised to those that hold a row?

A policy is a pure function. It sees page counts only, so that its safety can be checked without an
engine. The theorem it must keep: if it says yes, no later allocation of any admitted request fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minisgl.utils import div_ceil


@dataclass(frozen=True, slots=True)
class PageDemand:
    """What one request holds and may come to need.

    held: pages that are its own or locked for it. worst: pages it holds at its longest. It advances
    by `min_advance` to `max_advance` tokens in each decode step.
    """

    held: int
    worst: int
    min_advance: int = 1
    max_advance: int = 1

    @property
    def growth(self) -> int:
        """Pages it may still take, in the worst case."""
        return max(self.worst - self.held, 0)

    @classmethod
    def of_candidate(
        cls, input_len: int, output_len: int, cached_len: int, page_size: int
    ) -> PageDemand:
        """The demand of a request that would start with `cached_len` tokens from the cache."""
        return cls(cached_len // page_size, div_ceil(input_len + output_len, page_size))

    @classmethod
    def of_running(cls, cached_len: int, max_device_len: int, page_size: int) -> PageDemand:
        """The demand of a request with a row; its very last token is never stored."""
        return cls(div_ceil(cached_len, page_size), div_ceil(max_device_len - 1, page_size))


class AdmissionPolicy(Protocol):
    """Says whether `candidate` may start; `available_pages` are those free or evictable now."""

    def __call__(
        self, candidate: PageDemand, promised: Sequence[PageDemand], available_pages: int
    ) -> bool:
        """Whether the candidate fits beside everything that is promised."""
        ...


def conservative(
    candidate: PageDemand, promised: Sequence[PageDemand], available_pages: int
) -> bool:
    """Admit only if everybody's worst case fits at the same time."""
    return candidate.growth + sum(demand.growth for demand in promised) <= available_pages
