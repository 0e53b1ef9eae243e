"""Reasoning in tags (`<think>...</think>`), told apart from the answer while it streams.

May import `utils.text`. Invariant: the joined pieces do not depend on how the text was cut;
together they are the text without the tags and the white space beside them.
"""

from __future__ import annotations

from typing import NamedTuple

from minisgl.utils.text import possible_start

OPENING, CLOSING = "<think>", "</think>"


class ReasoningPiece(NamedTuple):
    """What one piece of text adds to either side."""

    reasoning: str
    content: str


class ReasoningParser:
    """Splits one answer.

    starts_inside: the prompt has opened the tag (`prompt_opens_reasoning`). Else the answer is
    reasoning only if it begins with the tag; a tag further on is text.
    """

    def __init__(self, *, starts_inside: bool = False) -> None:
        self._state = "opening" if not starts_inside else "reasoning"
        self._is_fresh = starts_inside  # no reasoning has come yet
        self._held = ""

    def push(self, text: str) -> ReasoningPiece:
        """What is certain after the next piece of the answer."""
        if self._state == "content":
            return ReasoningPiece("", text)
        self._held += text
        if self._state == "opening" and not self._open():
            return ReasoningPiece("", self._release())
        if self._state == "reasoning":
            return self._reason()
        return ReasoningPiece("", self._after())

    def _open(self) -> bool:
        """Whether the tag was met; the state tells whether it still may be."""
        start = self._held.lstrip()
        if start.startswith(OPENING):
            self._held = start[len(OPENING) :]
            self._state, self._is_fresh = "reasoning", True
            return True
        if not OPENING.startswith(start):
            self._state = "content"
        return False

    def _release(self) -> str:
        """Everything held, once it is known to be content."""
        if self._state != "content":
            return ""
        held, self._held = self._held, ""
        return held

    def _reason(self) -> ReasoningPiece:
        if self._is_fresh:  # models repeat the tag that the prompt has opened
            self._held = self._held.lstrip()
            while self._held.startswith(OPENING):
                self._held = self._held[len(OPENING) :].lstrip()
            if OPENING.startswith(self._held):
                return ReasoningPiece("", "")
            self._is_fresh = False
        at = self._held.find(CLOSING)
        if at >= 0:
            reasoning = self._held[:at].rstrip()
            self._held, self._state = self._held[at + len(CLOSING) :], "after"
            return ReasoningPiece(reasoning, self._after())
        keep = len(self._held[: possible_start(self._held, CLOSING)].rstrip())
        reasoning, self._held = self._held[:keep], self._held[keep:]
        return ReasoningPiece(reasoning, "")

    def _after(self) -> str:
        """Content begins at the first character that is not white space."""
        content, self._held = self._held.lstrip(), ""
        if content:
            self._state = "content"
        return content

    def flush(self) -> ReasoningPiece:
        """What was held back; to be called when no more text comes."""
        held, self._held = self._held, ""
        is_reasoning = self._state == "reasoning"
        return ReasoningPiece(held, "") if is_reasoning else ReasoningPiece("", held)


def prompt_opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside the tag, so that the answer begins with reasoning."""
    return prompt.rstrip().endswith(OPENING)


def template_reasons(template: str | None) -> bool:
    """Whether a model with this chat template answers with reasoning in the tag."""
    return template is not None and CLOSING in template
