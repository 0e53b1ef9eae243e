"""What several layers ask of a text. Standard library only."""

from __future__ import annotations


def possible_start(text: str, tag: str) -> int:
    """Where the longest ending of `text` that may become `tag` starts; its length if none may."""
    at = max(0, len(text) - len(tag) + 1)
    while (at := text.find(tag[0], at)) >= 0:
        if tag.startswith(text[at:]):
            return at
        at += 1
    return len(text)
