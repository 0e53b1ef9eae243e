"""Chat templates: a model's Jinja text, applied to messages.

Templates come from model files only, and are still not trusted: see `sandbox`. Braces of the
template language in messages are data and appear literally. May import `params`. Invariant:
whatever a template or its messages can cause is a `ChatTemplateError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta

from minisgl.params import ChatTemplateError

from .sandbox import (
    MAX_TEXT_CHARS,
    BoundedEnvironment,
    Budget,
    BudgetError,
    RefusedError,
    budget,
    within_time,
)

MAX_SOURCE_CHARS = 1 << 20

_ENVIRONMENT = BoundedEnvironment()


class ChatTemplate:
    """One compiled template. special_tokens: variables such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(f"the chat template has over {MAX_SOURCE_CHARS} characters")
        self.special_tokens = dict(special_tokens or {})
        try:
            self._tree = within_time(lambda: _ENVIRONMENT.parse(source))
            self._template = within_time(lambda: _ENVIRONMENT.from_string(self._tree))
        except (
            TemplateError,
            SyntaxError,
            RecursionError,
            MemoryError,
            ValueError,
            BudgetError,
        ) as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

    @property
    def variables(self) -> set[str]:
        """Names that the template reads and does not define itself."""
        return meta.find_undeclared_variables(self._tree) - _ENVIRONMENT.globals.keys()

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt for `messages`; `ChatTemplateError` naming the cause if there can be none."""
        if not messages:
            raise ChatTemplateError("messages must not be empty", "messages")
        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        values["messages"] = [_plain_message(message, i) for i, message in enumerate(messages)]
        token = budget.set(Budget())
        try:
            return within_time(lambda: self._collect(values))
        except RefusedError as error:
            raise ChatTemplateError(f"the chat template refuses: {error}", "messages") from error
        except Exception as error:  # a template can raise anything at all
            raise ChatTemplateError(f"the chat template fails: {error}", "messages") from error
        finally:
            budget.reset(token)

    def _collect(self, values: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(values):
            size += len(part)
            if size > MAX_TEXT_CHARS:
                raise BudgetError(f"its output passes {MAX_TEXT_CHARS} characters")
            parts.append(part)
        return "".join(parts)


def _plain_message(message: Any, index: int) -> dict[str, Any]:
    """A copy with text content: parts are joined by newlines, null is empty."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{where} must be an object with a role", where)
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "\n".join(_text_of_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ChatTemplateError(f"{where}.content must be a text or a list of parts", where)
    return {**message, "content": content}


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ChatTemplateError(f"{where}.content has a part that is not text", where)
