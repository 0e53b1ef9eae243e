"""Stop strings in a stream of text. May import `utils.text`.

Invariant: what comes out never contains a stop string or what began it, and does not depend on how
the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.utils.text import possible_start


class StopStringFilter:
    """Passes text on up to the first stop string, holding back what may yet become one.

    The stop string that is complete first wins; of those complete at one character, the longest.
    `matched` is the stop string that was met, None before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = [stop for stop in dict.fromkeys(stops) if stop]
        self.matched: str | None = None
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; nothing comes out after it."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is now certain to precede any stop string."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = min(possible_start(text, stop) for stop in self.stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back; to be called when no more text comes."""
        held, self._held = self._held, ""
        return held
