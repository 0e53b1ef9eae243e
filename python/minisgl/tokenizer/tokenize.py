"""Requests as text or messages to token ids. May import `params`, `message` and `utils`.

Invariant: each message gets its own answer, ids or a typed error; one never spoils another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minisgl.message import TokenizeMsg, token_array
from minisgl.params import InvalidRequestError, MessageError
from minisgl.utils import init_logger

logger = init_logger(__name__)

IdsOrError = np.ndarray | InvalidRequestError  # by position, one per message


class TokenizeManager:
    """The tokenizer's side of new requests.

    tokenizer: ours, or one of transformers'.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def tokenize(self, msgs: Sequence[TokenizeMsg]) -> list[IdsOrError]:
        """For each message, in order, its ids (int32, for `UserMsg`) or what is wrong with it."""
        return [self._one(msg) for msg in msgs]

    def _one(self, msg: TokenizeMsg) -> IdsOrError:
        try:
            if isinstance(msg.text, list) and msg.text and type(msg.text[0]) is int:
                return token_array(msg.text)
            ids = self.encode(msg.text, msg.tools, msg.template_args)
        except MessageError as error:
            return InvalidRequestError(str(error), "prompt")
        except InvalidRequestError as error:
            return error
        except Exception:  # a foreign tokenizer, or a bug of ours: it must not end the others
            logger.exception("request %d cannot be tokenized", msg.uid)
            return InvalidRequestError("the prompt cannot be tokenized", "prompt")
        return np.array(ids, dtype=np.int32)

    def encode(
        self,
        text: str | list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a prompt or of a conversation; `InvalidRequestError` if there are none.

        tools and template_args are for the conversation's template.
        """
        if isinstance(text, str):
            ids = self.tokenizer.encode(text)
        elif isinstance(text, list):
            args = {"add_generation_prompt": True, **(template_args or {}), "tokenize": False}
            rendered = self.tokenizer.apply_chat_template(text, **{**args, "tools": tools})
            ids = self._encode_rendered(rendered)
        else:
            raise InvalidRequestError("the prompt must be a text or a list of messages", "prompt")
        if not ids:
            raise InvalidRequestError("the prompt is empty: it has no tokens", "prompt")
        return list(ids)

    def _encode_rendered(self, text: str) -> list[int]:
        bos = getattr(self.tokenizer, "bos_token", None)
        written = isinstance(bos, str) and bos != "" and text.startswith(bos)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not written)
        return ids
