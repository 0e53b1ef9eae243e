"""The Jinja environment in which chat templates run: an immutable sandbox with a budget.

Jinja's sandbox keeps a template from reaching Python's insides, but not from running for ever or
from filling the memory. So the syntax tree gets a call of `spend` in every loop turn and macro, `~`
and literals become checked calls, and the operators, methods and filters that can make much of
little are checked before they run and counted after; `within_time` ends what takes long without any
of these. Imports `jinja2` and the standard library
only. Invariant: a render ends within its budget or with `BudgetError`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from jinja2 import nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

T = TypeVar("T")

MAX_TEXT_CHARS = 1 << 22
MAX_ITEMS = 1 << 18
MAX_MADE_CHARS = 1 << 28
MAX_INT_BITS = 256
MAX_WIDTH = 256
MAX_SECONDS = 5.0

_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)|\{[^}]*(?:\d{4,}|\{)")
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "indent", "round", "slice", "tojson", "wordwrap"}
)
_FLAT_FILTERS = frozenset(  # these make no text of their input
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "max", "min"}
    | {"reject", "rejectattr", "reverse", "select", "selectattr", "sum"}
)
_REMOVED_FILTERS = ("pprint", "random", "urlize", "xmlattr")


class RefusedError(Exception):
    """The template's own `raise_exception`: it does not accept these messages."""


class BudgetError(Exception):
    """The template used up its time, or would have made something too large."""


class Budget:
    """What one render may still use."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.chars = MAX_MADE_CHARS

    def spend(self, chars: int = 0) -> None:
        """Account for text that is about to be made; `BudgetError` if that, or the time, is up."""
        if time.monotonic() > self.deadline:
            raise BudgetError(f"it takes more than {MAX_SECONDS} seconds: does it loop?")
        self.chars -= chars
        if chars > MAX_TEXT_CHARS or self.chars < 0:
            raise BudgetError(f"it makes a text of more than {MAX_TEXT_CHARS} characters")


class TimeUp(BaseException):
    """Raised in a thread whose time is up; no `except Exception` on its way stops it."""


def within_time(work: Callable[[], T]) -> T:
    """What `work` returns; a `BudgetError` after `MAX_SECONDS` of whatever it does in Python.

    The budget is asked by loops, macros and calls; a template can do without them, and its compiler
    does. So a second thread watches, and raises `TimeUp` in this one, between two of its steps.
    """
    watch = _Watch()
    try:
        try:
            watch.start()
            return work()
        finally:
            watch.stop()
    except TimeUp:
        while not watch.is_stopped:
            with suppress(TimeUp):
                watch.stop()
        raise BudgetError(f"it takes more than {MAX_SECONDS} seconds: does it loop?") from None


class _Watch(threading.Thread):
    """Raises `TimeUp` in the thread that made it, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_stopped = False
        self._watched = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Wait for the end of the work or of its time."""
        wait = MAX_SECONDS
        while not self._is_over.wait(wait):
            with self._lock:
                if not self._is_over.is_set():
                    self._raise_there(ctypes.py_object(TimeUp))
            wait = 0.2  # again, should something have caught it

    def stop(self) -> None:
        """After this nothing is raised; it may itself be interrupted by `TimeUp`."""
        with self._lock:
            self._is_over.set()
            self._raise_there(None)  # takes back what was not raised yet
            self.is_stopped = True

    def _raise_there(self, error: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._watched, error)


budget: ContextVar[Budget] = ContextVar("budget")


def _spend(chars: int = 0) -> None:
    current = budget.get(None)  # None while a template is compiled: constants are folded then
    if current is not None:
        current.spend(chars)
    elif chars > MAX_TEXT_CHARS:
        raise BudgetError("it holds a constant that is too large")


def _size(value: Any) -> int:
    """About the number of characters of `str(value)`, without making it; `BudgetError` if large.

    Lists that hold one list twice, and so on, are small in memory and without end in print.
    """
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 8 * len(item) + 4
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            total += 2 * len(item) + 4
            stack += item
        elif isinstance(item, Namespace):
            total += 16
            stack.append(item._Namespace__attrs)
        else:
            total += 32
        if total > MAX_TEXT_CHARS:
            raise BudgetError(f"it makes a text of more than {MAX_TEXT_CHARS} characters")
    return total


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise BudgetError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_widths(values: Sequence[Any]) -> None:
    for value in values:
        if (isinstance(value, int) and abs(value) > MAX_WIDTH) or (
            isinstance(value, str) and len(value) > MAX_WIDTH
        ):
            raise BudgetError(f"a width is over {MAX_WIDTH}")


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise BudgetError("a format asks for a width that is too large")


def _count(value: Any) -> Any:
    """Account for a result; lists must be of bounded length, numbers of bounded size."""
    if isinstance(value, (str, bytes)):
        _spend(len(value))
    elif isinstance(value, (list, tuple, Mapping)):
        _check_items(len(value))
        _spend(_size(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise BudgetError("a number is too large")
    return value


def _printable(value: Any) -> Any:
    """What is about to be printed, if it may be."""
    _size(value)
    return value


def raise_exception(message: object) -> NoReturn:
    """How templates say that they do not accept these messages."""
    raise RefusedError(str(message))


def strftime_now(form: str) -> str:
    """The local time in a format."""
    _check_widths([form])
    _check_format(form)
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as templates expect it: neither HTML nor ASCII escapes."""
    _spend(_size(value))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    return _join_texts(str(d), items)


def _join_texts(separator: str, items: Any) -> str:
    items = list(items)
    _check_items(len(items))
    _spend(_size(items) + len(separator) * len(items))
    return separator.join(map(str, items))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    whole, old, new = str(text), str(old), str(new)
    _spend(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


@pass_environment
def _sum(
    environment: Any, iterable: Any, attribute: str | int | None = None, start: Any = 0
) -> Any:
    if not isinstance(start, (int, float)):  # adding lists up one by one is quadratic
        raise BudgetError("the filter sum takes numbers only")
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return sum(iterable, start)


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with its widths checked before and its result counted after."""

    @functools.wraps(function)  # keeps the marks by which the library passes its environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _spend(0 if name in _FLAT_FILTERS else _size(given) + _size(kwargs))
        if name in _WIDTH_FILTERS:
            _check_widths([*given[1:], *kwargs.values()])
        elif name == "format":
            _check_format(str(given[0]))
        return _count(function(*args, **kwargs))

    return checked


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - the library's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to the end tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _AddChecks(NodeTransformer):
    """Puts a call of `spend` into every loop and macro, and checks around `~` and literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_spend(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_spend(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_spend(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _method_call("checked", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _method_call("checked", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _method_call("checked", [node], node.lineno) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _method_call("concatenate", node.nodes, node.lineno)

    def _with_spend(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        call = _method_call("spend", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        result: nodes.Node = node
        return result


def _method_call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the conventions of chat templates; `budget` holds what a render may use."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_printable,
        )
        self.filters |= {"join": _join, "replace": _replace, "sum": _sum, "tojson": to_json}
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        self.filters = {name: _checked_filter(name, f) for name, f in self.filters.items()}
        self.globals.pop("lipsum", None)
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def spend(self) -> None:
        """Called by every loop turn and macro."""
        _spend()

    def checked(self, value: Any) -> Any:
        """A list, tuple or dict as written in the template."""
        return _count(value)

    def concatenate(self, *values: Any) -> str:
        """The operator `~`."""
        return _join_texts("", values)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _AddChecks().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what would grow without bound, then do it."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left))
            _spend(len(left) + _size(right))
        elif operator == "+" and isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
            _spend(len(left) + len(right))
        return _count(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj`, unless the time is up or its result could be large.

        The names are the library's: keyword arguments of templates must not meet ours.
        """
        _spend()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            args = _check_text_method(owner, str(getattr(method, "__name__", "")), args, kwargs)
        return _count(super().call(__context, __obj, *args, **kwargs))


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int) and isinstance(one, (str, bytes)):
            _spend(len(one) * max(other, 0))
        elif isinstance(other, int) and isinstance(one, (list, tuple)):
            _check_items(len(one) * max(other, 0))
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise BudgetError("a number is too large")


def _check_power(left: Any, right: Any) -> None:
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if not numbers or abs(left) > 2**16 or abs(right) > 16:
        raise BudgetError("a power is too large")


def _check_text_method(
    owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Refuse a method of `owner` that would make much of little; the arguments to call it with."""
    if name in _PADDING_METHODS:
        _check_widths([*args[:1], *kwargs.values()])
    elif name in ("format", "format_map"):
        _check_format(str(owner))
        _spend(len(owner) + (_size(args) + _size(kwargs)) * (str(owner).count("{") + 1))
    elif name == "replace" and len(args) >= 2 and all(isinstance(a, type(owner)) for a in args[:2]):
        _spend(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        items = list(args[0])
        _check_items(len(items))
        _spend(_size(items) + len(owner) * len(items))
        return (items, *args[1:])
    elif name in ("translate", "maketrans"):
        raise BudgetError(f"the method {name} is not offered")
    return args
