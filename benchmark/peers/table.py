"""Medians, ratios and the tables that show them. Pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .works import Work

OURS = "minisgl"
HOPELESS = 0.6

# variant name -> row name -> one value per round, None where it failed or was left out
Samples = dict[str, dict[str, list[float | None]]]


@dataclass(frozen=True)
class Comparison:
    """One row: our median, the best peer's, and how many times better we are.

    ratios: of the single rounds in which both were measured; ratio: of the medians.
    """

    ours: float | None
    peer: str | None
    theirs: float | None
    ratio: float | None
    ratios: tuple[float, ...] = ()


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are there."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def is_better(work: Work, one: float, other: float) -> bool:
    """Whether `one` is strictly better than `other` in this row."""
    return one < other if work.is_lower_better else one > other


def ratio_of(work: Work, ours: float, theirs: float) -> float:
    """How many times better ours is; for memory, how many times what they take (less is better)."""
    return ours / theirs


def best_peer(work: Work, samples: Samples) -> tuple[str, float] | None:
    """The peer with the best median, and that median. For memory only llama.cpp counts."""
    best: tuple[str, float] | None = None
    for name, rows in samples.items():
        if name.startswith(OURS) or (work.is_lower_better and not _is_memory_peer(name)):
            continue
        value = median_of(rows.get(work.name, []))
        if value is not None and (best is None or is_better(work, value, best[1])):
            best = name, value
    return best


def _is_memory_peer(name: str) -> bool:
    """Same file, same context: llama.cpp with the file as shipped."""
    return name.startswith("llama.cpp") and name.endswith("shipped")


def hopeless(work: Work, samples: Samples) -> list[str]:
    """Peers so far below the best one of the row that they need no further round."""
    best = best_peer(work, samples)
    if best is None or work.is_lower_better:
        return []
    medians = {name: median_of(rows.get(work.name, [])) for name, rows in samples.items()}
    return [
        name
        for name, value in medians.items()
        if not name.startswith(OURS) and value is not None and value < HOPELESS * best[1]
    ]


def compare(work: Work, samples: Samples) -> Comparison:
    """Our median against the best peer's in one row."""
    mine = samples.get(OURS, {}).get(work.name, [])
    ours, best = median_of(mine), best_peer(work, samples)
    if best is None:
        return Comparison(ours, None, None, None)
    peer, theirs = best
    if ours is None:
        return Comparison(None, peer, theirs, None)
    pairs = zip(mine, samples[peer][work.name])
    ratios = tuple(ratio_of(work, a, b) for a, b in pairs if a is not None and b is not None)
    return Comparison(ours, peer, theirs, ratio_of(work, ours, theirs), ratios)


def verdict(work: Work, ratio: float | None, share: float | None) -> str:
    """What ratio and share of the ceiling reach together: "aim", "must" or "below"."""
    if ratio is None:
        return "-"

    def reaches(wanted: float, wanted_share: float) -> bool:
        enough = ratio <= wanted if work.is_lower_better else ratio >= wanted
        return enough and (not wanted_share or (share is not None and share >= wanted_share))

    if reaches(work.aim, work.share_aim):
        return "aim"
    return "must" if reaches(work.must, work.share_must) else "below"


def number(value: float | None) -> str:
    """Three digits or so, "-" for nothing."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def render(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An aligned table: the first column to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        return "  ".join([line[0].ljust(widths[0]), *cells]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([aligned(lines[0]), rule, *map(aligned, lines[1:])])


def engines_table(works: Sequence[Work], samples: Samples) -> str:
    """Every engine and format: medians of every row."""
    header = ["median", *(f"{work.name} {work.unit}" for work in works)]
    rows = [
        [name, *(number(median_of(values.get(work.name, []))) for work in works)]
        for name, values in samples.items()
    ]
    return render(header, rows)


def goals_table(
    works: Sequence[Work], samples: Samples, shares: dict[str, list[float]]
) -> tuple[str, list[dict[str, Any]]]:
    """The rows against the best peer and the ceilings, as text and as data.

    shares: of the ceiling, reached in each round.
    """
    lines, data = [], []
    for work in works:
        found, share = compare(work, samples), median_of(shares.get(work.name, []))
        low_high = "-"
        if found.ratios:
            low_high = f"{min(found.ratios):.2f}-{max(found.ratios):.2f}"
        result = verdict(work, found.ratio, share)
        lines.append([
            work.title, number(found.ours), number(found.theirs), found.peer or "-",
            "-" if found.ratio is None else f"{found.ratio:.2f} x", low_high,
            f"{work.must:g} / {work.aim:g} x",
            "-" if share is None else f"{share:.0%}",
            f"{work.share_must:.0%} / {work.share_aim:.0%}" if work.share_must else "-",
            result,
        ])  # fmt: skip
        data.append({
            "work": work.name, "unit": work.unit, "ours": found.ours, "peer": found.peer,
            "theirs": found.theirs, "ratio": found.ratio, "ratios": list(found.ratios),
            "must": work.must, "aim": work.aim, "share": share,
            "verdict": result,
        })  # fmt: skip
    header = ["work", OURS, "best peer", "which", "ratio", "by round", "must / aim",
              "of ceiling", "must / aim", "reached"]  # fmt: skip
    return render(header, lines), data
