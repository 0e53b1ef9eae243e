"""`LLM`: a scheduler whose messages come from `generate` and whose replies go back to it.

One generator, `stream`, feeds the streamed and the unstreamed answer. A call ends when the
scheduler is idle and nothing is pending. Whatever happens inside a call, the object stays usable
after it.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import torch

from minisgl.config import DistributedInfo, SchedulerConfig
from minisgl.constraint import Grammars
from minisgl.engine import Engine
from minisgl.message import AbortBackendMsg, BaseBackendMsg, DetokenizeMsg, UserMsg
from minisgl.models import load_model_config
from minisgl.params import (
    ConfigError,
    InvalidRequestError,
    MessageError,
    SamplingParams,
)
from minisgl.scheduler import Scheduler
from minisgl.tokenizer import TokenBytes, load_tokenizer, sampling_defaults
from minisgl.utils.model_files import resolve_model

from .answer import Answer, StreamEvent

Prompts = Sequence[str] | Sequence[Sequence[int]]


class LLM(Scheduler):
    """A model that answers in this process.

    model_path: a Hugging Face folder, a GGUF file, a hub id, or "default". Further keyword
    arguments are the fields of `SchedulerConfig`. dtype: how float weights, K and V are stored;
    "auto" suits the device, float32 is exact. progress: called with (bytes done, bytes in all)
    while weights load. Raises `ConfigError` or `ModelLoadError`.
    """

    def __init__(
        self,
        model_path: str,
        dtype: Any = torch.bfloat16,
        *,
        progress: Callable[[int, int], None] | None = None,
        **config_fields: Any,
    ) -> None:
        config = _make_config(model_path, dtype, config_fields)
        model = resolve_model(config.model_path, config.revision)
        config = dataclasses.replace(config, model_path=str(model.path), revision=None)
        load_model_config(model.path)  # opens the model's file, once for the next two
        self.tokenizer = load_tokenizer(model.path)
        self._token_bytes = TokenBytes(self.tokenizer)
        self.default_sampling_params = SamplingParams()
        if config.sampling_defaults == "model":
            self.default_sampling_params = SamplingParams(**sampling_defaults(model.path))
        engine = Engine(config, progress)
        self.grammars = Grammars(self._vocabulary, engine.vocab_size)
        engine.set_grammars(self.grammars)
        self._inbox: list[BaseBackendMsg] = []
        self._answers: dict[int, Answer] = {}
        self._events: deque[StreamEvent] = deque()
        self._is_streaming = False
        self._num_calls = 0
        self._call_lock = Lock()
        super().__init__(
            config, engine, _OfflineIO(self), eos_token_ids=self.tokenizer.eos_token_ids
        )

    def _vocabulary(self) -> tuple[Any, Any, Any]:
        return self.tokenizer, self._token_bytes, self._eos_token_ids

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[dict[str, Any]]:
        """Answer every prompt, in order: `{"text", "token_ids", "finish_reason"}`, without EOS.

        With "logprobs" and "prompt_logprobs" if asked for: a `PositionLogprobs` for each token.

        prompts: texts, or lists of token ids. sampling_params: one for all, or one for each, or
        None for `default_sampling_params` (what the model's authors advise, else greedy). Raises
        `InvalidRequestError` (a `ValueError`) before any work if one of them cannot run. An answer
        that failed on the way has "finish_reason" "error" and the reason under "error".
        """
        answers, events = self._begin(prompts, sampling_params, is_streamed=False)
        for _ in events:
            pass
        return [answer.result() for answer in answers]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Like `generate`, piece by piece, as soon as a token makes whole characters.

        The requests are checked at once; closing the iterator early ends what is left of them. One
        stream runs at a time, and a later call takes the place of a stream that has not begun.
        """
        return self._begin(prompts, sampling_params, is_streamed=True)[1]

    def _begin(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        is_streamed: bool,
    ) -> tuple[list[Answer], Iterator[StreamEvent]]:
        """Check the requests of one call and put them in the inbox."""
        self._check_alive()
        msgs = self._make_requests(prompts, sampling_params)
        with self._call_lock:
            self._check_free()
            self.reset()
            answers = [
                Answer(
                    msg.uid,
                    self.tokenizer,
                    msg.sampling_params,
                    self._token_bytes,
                    is_streamed=is_streamed,
                )
                for msg in msgs
            ]
            self._answers = {answer.index: answer for answer in answers}
            self._inbox = list(msgs)
            self._events.clear()
            self._num_calls += 1
            return answers, self._run(self._num_calls)

    def _check_alive(self) -> None:
        if not hasattr(self, "engine"):
            raise InvalidRequestError("this LLM was shut down: make a new one")

    def _check_free(self) -> None:
        if self._is_streaming:
            raise InvalidRequestError("this LLM is busy: finish or close the stream that it runs")

    def chat_prompt(self, messages: list[dict[str, Any]], /, **template_args: Any) -> list[int]:
        """Token ids of a conversation in the model's own format, ready for its next answer.

        template_args: variables of the model's template, such as `tools`, `enable_thinking`, or
        `add_generation_prompt`.
        """
        return self.tokenizer.apply_chat_template(messages, **{**template_args, "tokenize": True})

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses, spilled ones too; the pages freed."""
        self._check_alive()
        return super().flush_cache()

    def save_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Write all cached prefixes with their KV to a file; returns how many tokens they have.

        `ConfigError` if the file cannot be written; an older one then stays as it was.
        """
        self._check_alive()
        return super().save_prefixes(path)

    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Cache what `save_prefixes` wrote; returns how many tokens were taken.

        A file that is missing, damaged, or of another model or other settings gives none, and a
        line in the log.
        """
        self._check_alive()
        return super().load_prefixes(path)

    def _run(self, call: int) -> Iterator[StreamEvent]:
        with self._call_lock:
            self._check_alive()
            self._check_free()
            if call != self._num_calls:
                raise InvalidRequestError("a later call has taken the place of this stream")
            self._is_streaming = True
        try:
            for _ in self._turns():
                while self._events:
                    yield self._events.popleft()
                    self._check_alive()
            self.run_when_idle()
        finally:
            self._is_streaming = False
            self._inbox.clear()
            if hasattr(self, "engine") and not self.is_idle:
                self.reset()

    def _turns(self) -> Iterator[None]:
        """Turn the loop until nothing is pending, running or in flight."""
        use_overlap, data = self.uses_overlap, None
        while self._inbox or not self.is_idle:
            if use_overlap:
                data = self.overlap_loop(data)
            else:
                self.normal_loop()
            yield

    def _make_requests(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[UserMsg]:
        """One checked message per prompt; uids count from 0."""
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise InvalidRequestError(
                f"prompts must be a list of texts or token id lists, not {type(prompts).__name__}",
                "prompts",
            )
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.default_sampling_params] * len(prompts)
        elif isinstance(sampling_params, (list, tuple)):
            params = list(sampling_params)
        else:
            raise InvalidRequestError(
                "sampling_params must be SamplingParams or a list of them, "
                f"got {type(sampling_params).__name__}",
                "sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts, {len(params)} sampling_params: give one, or one for each",
                "sampling_params",
            )
        msgs = []
        for uid, (prompt, param) in enumerate(zip(prompts, params)):
            try:
                msg = self._make_request(uid, prompt, param)
                self.check_request(msg)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {uid}: {error}", error.param) from error
            msgs.append(msg)
        return msgs

    def _make_request(self, uid: int, prompt: Any, params: Any) -> UserMsg:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}",
                "sampling_params",
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        try:
            return UserMsg(uid, ids, params)
        except (MessageError, ValueError, TypeError, RuntimeError) as error:
            raise InvalidRequestError(
                f"a prompt is a text or a list of token ids: {error}", "prompt"
            ) from error

    def offline_receive_msg(self, blocking: bool = False) -> list[BaseBackendMsg]:
        """What `generate` has for the scheduler: all prompts at once, later the aborts."""
        msgs, self._inbox = self._inbox, []
        return msgs

    def offline_send_result(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Take in the replies of one step; an answer that met a stop string is called off."""
        for reply in replies:
            answer = self._answers.get(reply.uid)
            if answer is None or answer.finish_reason is not None:
                continue
            event = answer.take(reply)
            if event is not None:
                self._events.append(event)
            if answer.finish_reason is not None and not reply.finished:
                self._inbox.append(AbortBackendMsg(reply.uid))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free everything; the object cannot be used afterwards. `with LLM(...)` does it too."""
        if not hasattr(self, "engine"):
            return
        super().shutdown()
        self.grammars.shutdown()
        self.engine.shutdown()
        owned = ("engine", "cache_manager", "table_manager", "token_pool", "prefill_manager")
        for name in (*owned, "preemptor"):
            self.__dict__.pop(name, None)


class _OfflineIO:
    """Connects the scheduler to its own `LLM`; looks the methods up at each call."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def receive(self, blocking: bool) -> list[BaseBackendMsg]:
        """Messages from the `LLM`."""
        return self._llm.offline_receive_msg(blocking=blocking)

    def send(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Replies to the `LLM`."""
        self._llm.offline_send_result(replies)


def _make_config(model_path: str, dtype: Any, fields: dict[str, Any]) -> SchedulerConfig:
    known = {field.name for field in dataclasses.fields(SchedulerConfig)}
    if unknown := sorted(set(fields) - known):
        raise ConfigError(f"LLM has no option {', '.join(unknown)}; there are {sorted(known)}")
    fields = {"tp_info": DistributedInfo(0, 1), "offline_mode": True, **fields}
    return SchedulerConfig(model_path=str(model_path), dtype=dtype, **fields)
