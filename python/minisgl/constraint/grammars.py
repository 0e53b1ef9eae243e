"""Constraints of requests, compiled off the caller's thread and remembered, both within bounds.

Invariant: the same constraint is good or bad on every rank and at every time; what is forgotten is
compiled again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

from minisgl.params import Constraint, InvalidRequestError

from .matcher import Matcher

MAX_COMPILERS = 2
MAX_REMEMBERED = 64
# llguidance recurses as deep as rules and references refer to each other; memory is taken as used.
STACK_BYTES = 256 << 20


class Grammars:
    """The compiled constraints of one model.

    make_tokenizer: gives (tokenizer, the bytes of each id, EOS ids) when the first constraint
    comes. vocab_size: of the model.
    """

    def __init__(self, make_tokenizer: Callable[[], tuple[Any, Any, Any]], vocab_size: int) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, Future[Any]] = OrderedDict()

    def compile(self, constraint: Constraint) -> Future[Any]:
        """Begin to compile; the future gives the first state, or why it cannot be used."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is None:
                found = self._compiled[constraint] = self._submit(constraint)
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return found

    def check(self, constraint: Constraint) -> None:
        """Wait until it is compiled; `InvalidRequestError` if it cannot be used."""
        self._first_state(constraint)

    def _first_state(self, constraint: Constraint) -> Any:
        state = self.compile(constraint).result()
        if isinstance(state, InvalidRequestError):
            raise InvalidRequestError(str(state), state.param)  # one that is remembered is shared
        return state

    def start(self, constraint: Constraint, tokens: Sequence[int] = ()) -> Matcher:
        """A matcher for an answer that has these tokens already."""
        matcher = Matcher(self._first_state(constraint).deep_copy(), self._vocab_size)
        matcher.take(tokens)
        return matcher

    def _submit(self, constraint: Constraint) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_COMPILERS, "minisgl-grammar")
        usual = threading.stack_size(STACK_BYTES)  # of the threads that submitting may start
        try:
            return self._pool.submit(self._work, constraint)
        finally:
            threading.stack_size(usual)

    def _work(self, constraint: Constraint) -> Any:
        with self._compiler_lock:
            if self._compiler is None:
                compiler = import_module(".compiler", __package__)  # llguidance comes with it
                self._compiler = compiler.Compiler(*self._make_tokenizer())
        try:
            return self._compiler.compile(constraint)
        except InvalidRequestError as error:
            return error

    def shutdown(self) -> None:
        """End the threads; what is compiled stays usable."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
