"""Structured output: what an answer must spell, as masks over the vocabulary.

A constraint is compiled once, by llguidance, on a thread of its own, and remembered; each request
then has a matcher that takes in its tokens and says which may come next. May import `params` and
`utils`; free of torch. llguidance is loaded when the first constraint comes.
"""

from .grammars import Grammars
from .matcher import Matcher

__all__ = ["Grammars", "Matcher"]
