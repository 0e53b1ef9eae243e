"""A model that answers at once, from a script: what the tests of the command line talk to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from minisgl.cli import main
from minisgl.llm import StreamEvent
from minisgl.params import (
    ChatTemplateError,
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
)


class ScriptedLLM:
    """Answers each prompt with its own words in capitals, one word per event, last to first.

    Words with a meaning: too-long (refused), refuse (by the template, in a chat), FAIL, INTERRUPT
    (Ctrl-C), SLOW (a moment without any token), CUT (the answer ends here, by its length).
    """

    made: ClassVar[list[ScriptedLLM]] = []
    template_variables: ClassVar[set[str]] = {"messages", "enable_thinking", "tone"}
    default_sampling_params: ClassVar[SamplingParams] = SamplingParams()

    def __init__(self, model: str, **options: Any) -> None:
        if model == "missing":
            raise ModelLoadError("there is no model at 'missing':\n  pass a folder")
        self.model, self.options = model, options
        self.tokenizer = self
        self.calls: list[tuple[list[Any], SamplingParams]] = []
        self.was_shut_down = False
        self.was_closed = False
        self.step_listeners: list[Callable[[Any], None]] = []
        ScriptedLLM.made.append(self)

    def check_chat_template(self) -> None:
        if self.model == "no-template":
            raise ChatTemplateError("this model has no chat template")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_prompt(self, messages: list[dict[str, str]], /, **template_args: Any) -> list[int]:
        if "refuse" in messages[-1]["content"]:
            raise ChatTemplateError("the chat template fails", "messages")
        said = [f"{m['role']}:{m['content']}" for m in messages]
        return self.encode(" ".join([*said, *(f"{k}={v}" for k, v in template_args.items())]))

    def stream(self, prompts: list[list[int]], sampling: SamplingParams) -> Iterator[StreamEvent]:
        texts = [bytes(prompt).decode() for prompt in prompts]
        self.calls.append((texts, sampling))
        if any("too-long" in text for text in texts):
            raise InvalidRequestError("prompt 0: the prompt has too many tokens", "prompt")
        return self._events(texts)

    def _events(self, texts: list[str]) -> Iterator[StreamEvent]:
        try:
            for index, text in reversed(list(enumerate(texts))):
                words = text.upper().split(" ")
                self._step("prefill", len(words))
                for i, word in enumerate(words):
                    if word.startswith("INTERRUPT"):
                        signal.raise_signal(signal.SIGINT)
                    if word == "FAIL":
                        error = "the forward pass failed"
                        yield StreamEvent(index, [], "", FinishReason.ERROR, error)
                        break
                    if word.endswith("SLOW"):
                        time.sleep(0.3)
                    last = FinishReason.STOP if i == len(words) - 1 else None
                    last = FinishReason.LENGTH if word == "CUT" else last
                    self._step("decode", 1)
                    yield StreamEvent(index, [i], word + " " * (last is None), last)
                    if last is not None:
                        break
        finally:
            self.was_closed = True

    def _step(self, phase: str, num_tokens: int) -> None:
        for listener in self.step_listeners:
            num_prompt_tokens = num_tokens if phase == "prefill" else 0
            listener(SimpleNamespace(num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens))

    def shutdown(self) -> None:
        self.was_shut_down = True


def exit_code(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)
