"""`Tokenizer`: what users of Hugging Face tokenizers expect, over the `tokenizers` library.

Free of torch. May import `params` and `utils`. Invariant: what the caller can cause (text that is
no text, ids that are no ids) is a typed error, never an error of the library below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from minisgl.params import ChatTemplateError, InvalidRequestError

if TYPE_CHECKING:
    from .chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens with a role, as text. more_eos: others that end an answer too."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None
    more_eos: tuple[str, ...] = ()


class Encoding(dict[str, Any]):
    """What calling a tokenizer gives: `input_ids` and `attention_mask`, as keys and attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """Text to ids and back, for one model.

    backend: the library's tokenizer. tool_template: instead of `chat_template` if there are tools;
    most models have one for both. more_eos_ids: ids that end an answer besides the tokenizer's
    own (from config.json and generation_config.json).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        name_or_path: str = "",
        chat_template: str | None = None,
        tool_template: str | None = None,
        more_eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.special = special
        self.name_or_path = name_or_path
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.bos_token, self.eos_token = special.bos, special.eos
        self.pad_token, self.unk_token = special.pad, special.unk
        self.bos_token_id = self._id_or_none(special.bos)
        self.eos_token_id = self._id_or_none(special.eos)
        self.pad_token_id = self._id_or_none(special.pad)
        self.unk_token_id = self._id_or_none(special.unk)
        own = [self.eos_token_id, *(self._id_or_none(token) for token in special.more_eos)]
        self.eos_token_ids = frozenset(i for i in (*own, *more_eos_ids) if i is not None)

    def _id_or_none(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included (a model's embedding may have more rows)."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Token text to id, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that `skip_special_tokens` leaves out, ascending."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return sorted(token_id for token_id, token in added.items() if token.special)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """The ids of a text, or a list of them for a list of texts, under `input_ids`."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; `InvalidRequestError` if it is not a text of Unicode characters."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"a text is wanted, got {type(text).__name__}", "prompt")
        try:
            return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # lone surrogates; the library raises plain Exception
            raise InvalidRequestError("the text is not valid Unicode", "prompt") from error

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of some ids (a list, an array, a tensor or one id); unknown ids are nothing."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        try:
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError("token ids must be whole numbers from 0") from error

    def batch_decode(self, rows: Iterable[Any], *, skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each row."""
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The raw spelling of an id, or of each of several; None where there is none."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a raw spelling, or of each of several; None where there is none."""
        if isinstance(tokens, str):
            return self.backend_tokenizer.token_to_id(tokens)
        return [self.backend_tokenizer.token_to_id(token) for token in tokens]

    @property
    def template_variables(self) -> set[str]:
        """Names that the chat templates read; `ChatTemplateError` if there is no template."""
        names = self._compiled_template.variables
        if self.tool_template is not None:
            names |= self._compiled_tool_template.variables
        return names

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        return self._compile(self.chat_template)

    @cached_property
    def _compiled_tool_template(self) -> ChatTemplate:
        return self._compile(self.tool_template)

    def _compile(self, source: str | None) -> ChatTemplate:
        if source is None:
            raise ChatTemplateError(
                f"the model {self.name_or_path} has no chat template: send a plain prompt, or put "
                "a chat_template.jinja beside the model",
                "messages",
            )
        from .chat_template import ChatTemplate  # jinja2 comes when the first template does

        special = self.special
        named = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": special.unk}
        values = {f"{role}_token": token for role, token in named.items() if token is not None}
        return ChatTemplate(source, values)

    def check_chat_template(self) -> None:
        """`ChatTemplateError` if the model has no chat template, or a broken one."""
        _ = self._compiled_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # kwargs come from requests, and may have any name
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The prompt that the model's template makes of a conversation: a text, or ids if asked.

        kwargs are variables of the template. `ChatTemplateError` if there is none or it fails.
        """
        has_own = bool(tools) and self.tool_template is not None
        template = self._compiled_tool_template if has_own else self._compiled_template
        text = template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )
        return self.encode_rendered(text) if tokenize else text

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered template: BOS is added only if the template has not written it."""
        written = self.bos_token is not None and text.startswith(self.bos_token)
        return self.encode(text, add_special_tokens=not written)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, vocab_size={self.vocab_size})"
