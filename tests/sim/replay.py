"""Histories: what happened to a world, event by event, kept in a file and replayed for ever.

A history does not depend on the generator that first made it. `shrink` drops events as long as
what is left still breaks the same property.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from .engine import Violation
from .world import World, WorldConfig

SEEDS = Path(__file__).parent / "seeds"
History = list[list[Any]]
Prepare = Callable[[World], None]


def play(config: WorldConfig, history: History, *, prepare: Prepare | None = None) -> World:
    """Repeat a history, then drain; what goes wrong is a `Violation` that carries the history."""
    world = World(config)
    if prepare is not None:
        prepare(world)
    try:
        for name, *args in history:
            if name == "submit":
                uid, prompt, max_tokens, options = args
                world.submit(uid, prompt, max_tokens, **options)
            else:
                getattr(world, name)(*args)
        world.drain()
        world.flush()
    except Exception as error:
        raise violation_of(world, error) from error
    return world


def violation_of(world: World, error: Exception, where: str = "") -> Violation:
    """Whatever went wrong in `world`, with all that is needed to see it again."""
    at = f"step {world.num_steps} of {where or 'a history'} in {world.config}"
    violation = Violation(f"{type(error).__name__}: {error}\n  at {at}")
    violation.config, violation.history = world.config, list(world.history)
    return violation


def property_of(violation: Violation) -> str:
    """The broken property, as far as the first words tell."""
    return str(violation)[:30].split(" ")[1]


def shrink(config: WorldConfig, history: History, *, prepare: Prepare | None = None) -> History:
    """A shorter history that breaks the same property; the same one if none is found."""

    def broken(candidate: History) -> str | None:
        try:
            play(config, candidate, prepare=prepare)
        except Violation as violation:
            return property_of(violation)
        return None

    wanted, size = broken(history), max(len(history) // 2, 1)
    assert wanted is not None, "the history holds"
    while True:
        start, length = 0, len(history)
        while start < len(history):
            candidate = history[:start] + history[start + size :]
            if broken(candidate) == wanted:
                history = candidate
            else:
                start += size
        if size == 1 and len(history) == length:
            return history
        size = max(size // 2, 1)


def save(path: Path, config: WorldConfig, history: History) -> None:
    """Write a history, one event per line; equal neighbours become one line with a count."""
    lines = []
    for event, same in groupby(history):
        count = len(list(same))
        lines.append(json.dumps([count, event]))
    head = json.dumps(dataclasses.asdict(config))
    path.write_text(f'{{"config": {head},\n "events": [\n  ' + ",\n  ".join(lines) + "\n ]}\n")


def load(path: Path) -> tuple[WorldConfig, History]:
    """Read what `save` wrote."""
    data = json.loads(path.read_text())
    history = [event for count, event in data["events"] for _ in range(count)]
    return WorldConfig(**data["config"]), history
