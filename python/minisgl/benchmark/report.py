"""A run for a human: a bar while it goes on, then a sentence or two and a table.

Invariant: every number of the table is in the summary that it is made from.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .load import Load

ROWS = (
    ("first token", "time_to_first_token_s"),
    ("between pieces", "inter_token_s"),
    ("per output token", "time_per_output_token_s"),
    ("whole answer", "end_to_end_s"),
)
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def progress_bar(load: Load, is_wanted: bool) -> AbstractContextManager[object]:
    """A line on standard error about a run, on a terminal only, gone when its block ends."""
    console = Console(stderr=True)
    total = load.plan.num_requests

    def line() -> Columns:
        goal = "" if total is None else f" of {total:,}"
        failed = f", {load.num_failed:,} failed" if load.num_failed else ""
        seconds = time.perf_counter() - load.start
        told = (
            f"{load.num_done:,}{goal} done, {load.num_running:,} under way{failed}, {seconds:.0f} s"
        )
        bar = ProgressBar(total, load.num_done, width=30, pulse=total is None)
        return Columns([bar, Text(told)])

    if not (is_wanted and console.is_terminal):
        return nullcontext()
    return Live(console=console, get_renderable=line, transient=True, refresh_per_second=4)


def print_report(summary: dict[str, Any]) -> None:
    """Print counts, rates and latencies of a summary as `measure.summarise` makes it."""
    console = Console(soft_wrap=True)
    console.print(counts_line(summary), highlight=False)
    console.print(rates_line(summary), highlight=False)
    for line in remarks(summary):
        console.print(line, highlight=False)
    table = Table(title="milliseconds", title_justify="left", title_style="dim")
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for title, key in ROWS:
        values = summary[key]
        if values is not None:
            table.add_row(title, *(f"{1000 * values[name]:,.1f}" for name in COLUMNS))
    if table.row_count:
        console.print(table)


def counts_line(summary: dict[str, Any]) -> str:
    """How many requests there were, and how they ended."""
    parts = [f"{summary['num_complete']:,} complete"]
    if summary["num_cut"]:
        parts.append(f"{summary['num_cut']:,} cut by the end of the run")
    errors = summary["errors"]
    if errors:
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in errors.items())
        parts.append(f"{sum(errors.values()):,} failed ({kinds})")
    return f"{summary['num_requests']:,} requests in {summary['seconds']:.2f} s: {', '.join(parts)}"


def rates_line(summary: dict[str, Any]) -> str:
    """Requests and tokens, and how many there were a second."""
    written, read, cached = (summary[f"{name}_tokens"] for name in ("output", "prompt", "cached"))
    hits = "" if cached is None else f", {cached:,} of them cached"
    return (
        f"{summary['requests_per_second']:,.2f} requests/s, "
        f"{summary['output_tokens_per_second']:,.1f} tokens/s written ({written:,}), "
        f"{summary['prompt_tokens_per_second']:,.1f} tokens/s read ({read:,}{hits})"
    )


def remarks(summary: dict[str, Any]) -> list[str]:
    """What makes the numbers less than they seem."""
    found = []
    if not summary["is_counted_by_server"]:
        found.append("note: the server counts no tokens; each piece of text is taken for one")
    share = summary.get("client_cpu_seconds", 0.0) / max(summary["seconds"], 1e-9)
    if share > 0.8:
        found.append(f"note: this client kept a processor busy ({share:.0%}): it may be the limit")
    return found
