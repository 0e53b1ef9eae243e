"""The scheduler's loop: receive, schedule, launch, process.

One turn of either loop reads top to bottom. A request lives in exactly one place: the queue
(`prefill_manager`), the running set (`decode_manager`), or `finished_reqs`, where those that ended
wait until the last batch that holds them has drained. All ways out lead to `_end_req`, and only
`_release` gives a row and its pages back; the one way back into the queue is `Preemptor.preempt`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from minisgl.config import SchedulerConfig
from minisgl.core import (
    Batch,
    ConfigError,
    ErrorKind,
    FinishReason,
    InvalidRequestError,
    Logprob,
    PositionLogprobs,
    Req,
    Spans,
)
from minisgl.env import ENV
from minisgl.kvcache import SpillTier
from minisgl.message import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    DetokenizeMsg,
    ExitMsg,
    ExpireBackendMsg,
    FlushMsg,
    UserMsg,
)
from minisgl.utils import OrderedSet, init_logger

from .admission import POLICIES
from .cache import CacheManager
from .decode import DecodeManager
from .forecast import Forecast
from .intake import DEADLINE_PASSED, check_request, clamp_max_tokens
from .preempt import Preemptor
from .prefill import WAITS_FOR_DECODE, PrefillManager
from .prefixes import load_prefixes, save_prefixes
from .protocols import EngineProtocol, ForwardOutputProtocol, IOProtocol
from .queue import ORDERS
from .record import StepRecord
from .table import TableManager
from .utils import (
    ForwardData,
    ForwardInput,
    cells,
    clamped,
    count_tokens,
    make_positions,
    make_write_tuple,
)

logger = init_logger(__name__)

MAX_EARLY_ABORTS = 4096
NO_TOKEN = -1


class Scheduler:
    """Turns requests into batches, and tokens into replies.

    engine, io: see `protocols`. ticks: numbers the turns of the loop; every rank counts alike.
    eos_token_ids: the tokens that end a request that does not ignore them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        engine: EngineProtocol,
        io: IOProtocol,
        *,
        eos_token_ids: Iterable[int] = (),
        ticks: Iterator[int] | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.io = io
        self.device = engine.device
        self.table_manager = TableManager(config.max_running_req, engine.page_table)
        self.token_pool = self.table_manager.token_pool
        self._tokens = cells(self.token_pool)
        self._locations = cells(engine.page_table)
        spill = None
        if config.kv_spill_bytes:
            spill = SpillTier(config.kv_spill_bytes, engine, config.page_size, config.kv_spill_dir)
        self.cache_manager = CacheManager(
            engine.num_pages, config.page_size, engine.page_table, config.cache_type, spill
        )
        self.decode_manager = DecodeManager(config.page_size)
        self.prefill_budget = config.max_extend_tokens
        self.mixed_budget = min(config.mixed_chunk, config.max_extend_tokens)
        is_optimistic = config.admission == "optimistic"
        self.forecast = Forecast(config.admission_share) if is_optimistic else None
        self.prefill_manager = PrefillManager(
            self.cache_manager,
            self.table_manager,
            self.decode_manager,
            POLICIES[config.admission],
            min_shared=config.share_prefixes if config.cache_type != "naive" else 0,
            forecast=self.forecast,
            pace=self.mixed_budget or config.max_prefill_streak * config.max_extend_tokens,
            order=ORDERS[config.queue_order],
            max_overtaken=config.max_overtaken,
        )
        managers = self.table_manager, self.prefill_manager, self.decode_manager
        self.preemptor = Preemptor(self.cache_manager, *managers) if is_optimistic else None
        self.finished_reqs: OrderedSet[Req] = OrderedSet()
        self.step_listeners: list[Callable[[StepRecord], None]] = []
        self.is_exiting = False
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ticks = itertools.count() if ticks is None else ticks
        self._num_in_flight: dict[Req, int] = {}
        self._early_aborts: OrderedDict[int, None] = OrderedDict()
        self._outbox: list[DetokenizeMsg] = []
        self._tick = 0
        self._prefill_streak = 0
        self._schedule_seconds = 0.0
        if config.kv_prefix_file and os.path.exists(config.kv_prefix_file):
            self.load_prefixes(config.kv_prefix_file)

    # The loop

    def run_forever(self) -> None:
        """Turn the loop until an `ExitMsg` has come and nothing is in flight."""
        use_overlap = self.uses_overlap
        data: ForwardData | None = None
        while not self.is_exiting:
            if use_overlap:
                data = self.overlap_loop(data)
            else:
                self.normal_loop()
        self._process_last_data(data)
        self._flush_replies()

    @property
    def uses_overlap(self) -> bool:
        """Whether a step is launched before the one before it is processed."""
        disabled = ENV.DISABLE_OVERLAP_SCHEDULING.value
        return self.device.type == "cuda" if disabled is None else not disabled

    def normal_loop(self) -> None:
        """One turn without overlap: the step is processed before the next is scheduled."""
        self._receive(may_block=True)
        forward_input = self._schedule_next_batch()
        self._process_last_data(self._launch(forward_input))
        self._flush_replies()

    def overlap_loop(self, last_data: ForwardData | None) -> ForwardData | None:
        """One turn with overlap: launch this step, then process the one before it."""
        self._receive(may_block=last_data is None)
        if self.preemptor and self.preemptor.is_short():
            self._process_last_data(last_data)
            last_data = None
        forward_input = self._schedule_next_batch()
        ongoing_data = self._launch(forward_input)
        self._process_last_data(last_data)
        self._flush_replies()
        return ongoing_data

    def run_when_idle(self) -> None:
        """Called whenever nothing is left to do, before waiting for a message."""
        self.cache_manager.check_integrity(full=False)

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running or draining."""
        return not (
            self.prefill_manager.runnable or self.decode_manager.runnable or self._num_in_flight
        )

    def shutdown(self) -> None:
        """End every request, drain what is in flight and check that all pages are back."""
        self.reset()
        if self.config.kv_prefix_file:
            try:
                self.save_prefixes(self.config.kv_prefix_file)
            except ConfigError as error:
                logger.warning("%s", error)

    # The cache

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses, spilled ones too; the pages freed."""
        return self.cache_manager.flush()

    def save_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Write all cached prefixes with their KV to a file; returns how many tokens they have.

        `ConfigError` if the file cannot be written; an older one then stays as it was.
        """
        fingerprint = self.engine.fingerprint()
        return save_prefixes(path, fingerprint, self.cache_manager, self.engine)

    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Cache what `save_prefixes` wrote; returns how many tokens were taken.

        A file that is missing, damaged, or of another model or other settings gives none, and a
        line in the log.
        """
        fingerprint = self.engine.fingerprint()
        return load_prefixes(path, fingerprint, self.cache_manager, self.engine)

    # Messages

    def receive_msg(self, blocking: bool = False) -> Sequence[BaseBackendMsg]:
        """All messages that have arrived, in the order that every rank acts on."""
        return self.io.receive(blocking)

    def send_result(self, replies: Sequence[DetokenizeMsg]) -> None:
        """Hand over the replies of a step."""
        self.io.send(replies)

    def _receive(self, may_block: bool) -> None:
        self._tick = next(self._ticks)
        is_idle = may_block and self.is_idle
        if is_idle:
            self.run_when_idle()
        for msg in self.receive_msg(blocking=is_idle):
            self._process_one_msg(msg)

    def _process_one_msg(self, msg: BaseBackendMsg) -> None:
        if isinstance(msg, BatchBackendMsg):
            for item in msg.data:
                self._process_one_msg(item)
        elif isinstance(msg, UserMsg):
            self._submit(msg)
        elif isinstance(msg, AbortBackendMsg):
            self._abort(msg.uid)
        elif isinstance(msg, ExpireBackendMsg):
            self._expire(msg.uid)
        elif isinstance(msg, FlushMsg):
            self.flush_cache()
        elif isinstance(msg, ExitMsg):
            self.is_exiting = True
        else:
            logger.warning("dropped a message of unknown type %s", type(msg).__name__)

    def _submit(self, msg: UserMsg) -> None:
        if msg.uid in self._early_aborts:
            del self._early_aborts[msg.uid]
            return
        try:
            self.check_request(msg)
        except InvalidRequestError as error:
            self._refuse(msg.uid, str(error), ErrorKind.INVALID, error.param)
            return
        limit = self.config.max_queued
        if limit and len(self.prefill_manager.pending_list) >= limit:
            text = f"{limit} requests wait already, the most that may: try again later"
            self._refuse(msg.uid, text, ErrorKind.OVERLOADED)
            return
        self.prefill_manager.add_one_req(clamp_max_tokens(msg, self.engine.max_seq_len))

    def check_request(self, msg: UserMsg) -> None:
        """`InvalidRequestError` for a request that cannot run on this engine, ever."""
        check_request(msg, self.engine.max_seq_len, self.engine.vocab_size)
        if msg.sampling_params.constraint is not None:
            self.engine.check_constraint(msg.sampling_params.constraint)

    # Schedule and launch

    def _next_batch(self) -> Batch | None:
        """Prompts before answers; where answers are to be protected, both, or in turns."""
        prompts, answers = self.prefill_manager, self.decode_manager
        if not answers.runnable:
            self._prefill_streak = 0
            return prompts.schedule_next_batch(self.prefill_budget)
        if self.mixed_budget:
            chunk = prompts.schedule_next_batch(self.mixed_budget)
            decode = answers.schedule_next_batch()
            return Batch(decode.reqs + chunk.reqs, "mixed") if decode and chunk else decode
        limit = self.config.max_prefill_streak
        if not limit or self._prefill_streak < limit:
            self._prefill_streak += 1
            if batch := prompts.schedule_next_batch(self.prefill_budget):
                return batch
        elif prompts.runnable:
            prompts.head_waits_for = WAITS_FOR_DECODE
        self._prefill_streak = 0
        return answers.schedule_next_batch()

    def _schedule_next_batch(self) -> ForwardInput | None:
        """The next step, ready to launch; None if nothing can run."""
        start = time.perf_counter()
        batch = self._next_batch()
        if batch and self.preemptor:
            self.preemptor.make_room(batch)
        if batch is None or not batch.reqs:
            return None
        try:
            forward_input = self._prepare_batch(batch)
        except BaseException as error:
            self._fail_batch(batch, error)
            return None
        self._schedule_seconds = time.perf_counter() - start
        return forward_input

    def _prepare_batch(self, batch: Batch) -> ForwardInput:
        """Allocate pages and lay out everything that the forward reads."""
        self.engine.pad_batch(batch)
        batch.spans = spans = Spans.of(batch.padded_reqs)
        self.cache_manager.allocate_paged(batch.reqs, spans)
        batch.positions, input_tuple = make_positions(spans, self._tokens)
        batch.out_loc = self._locations[input_tuple]
        return ForwardInput(
            batch=batch,
            sample_args=self.engine.prepare(batch),
            input_tuple=input_tuple,
            write_tuple=make_write_tuple(batch.reqs, spans, self._tokens),
        )

    def _launch(self, forward_input: ForwardInput | None) -> ForwardData | None:
        """Run one step and record it; a step that fails ends its own requests only."""
        if forward_input is None:
            return None
        batch = forward_input.batch
        sizes = count_tokens(batch) if self.step_listeners else (0, 0)
        start = time.perf_counter()
        try:
            with self.engine.launch_order():
                output = self._forward(forward_input)
        except BaseException as error:
            self._fail_batch(batch, error)
            return None
        for req in batch.reqs:
            self._num_in_flight[req] = self._num_in_flight.get(req, 0) + 1
        if self.step_listeners:
            seconds = (self._schedule_seconds, time.perf_counter() - start)
            num_preemptions = self.preemptor.num_preemptions if self.preemptor else 0
            record = StepRecord.take(
                self._tick,
                batch,
                sizes,
                self.prefill_manager,
                self.decode_manager,
                num_preemptions,
                seconds,
            )
            for listener in self.step_listeners:
                listener(record)
        return forward_input, output

    def _forward(self, forward_input: ForwardInput) -> ForwardOutputProtocol:
        """Forward, sample, account: the requests of the batch are one token further."""
        batch, sample_args, input_tuple, write_tuple = forward_input
        batch.input_ids = self._tokens[input_tuple]
        logits = self.engine.forward(batch)
        output = self.engine.sample(batch, logits, sample_args)
        # A row without a token may be computed once more under overlap, so it needs a valid id.
        self._tokens[write_tuple] = clamped(output.next_tokens_gpu)
        for req in batch.reqs:
            req.complete_one()
        self.decode_manager.filter_reqs(batch.reqs)
        return output

    # Results

    def _process_last_data(self, last_data: ForwardData | None) -> None:
        """Append, reply, finish or keep, and hand KV to the prefix cache."""
        if last_data is None:
            return
        batch, output = last_data[0].batch, last_data[1]
        output.copy_done_event.synchronize()
        tokens = output.next_tokens_cpu.tolist()
        with self.cache_manager.lazy_free_region():
            for i, (req, token) in enumerate(zip(batch.reqs, tokens)):
                self._drain(req)
                if token == NO_TOKEN:
                    req.has_bad_kv = True
                if req.finish_reason is not None:
                    self._release_if_drained(req)
                    continue
                params = req.sampling_params
                has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
                if has_logprobs:
                    self._note_prompt_logprobs(req, output, i)
                if req.is_sampled:
                    self._accept_token(req, token)
                    if has_logprobs:
                        self._tell_logprobs(req, output, i)
                    if params.constraint is not None:
                        self._end_if_complete(req)
                elif self.prefill_manager.min_shared and not req.has_bad_kv:
                    self.cache_manager.cache_chunk(req)

    def _accept_token(self, req: Req, token: int) -> None:
        if token == NO_TOKEN:
            self._end_req(req, FinishReason.ERROR)
            self._reply(req.uid, NO_TOKEN, FinishReason.ERROR, self._reason_of_no_token(req))
            return
        is_first = req.num_ids == req.num_input
        req.append_host(token)
        reason = self._reason_to_stop(req, token)
        self._reply(req.uid, token, reason)
        if req.num_ids == req.num_prompt + 1 and req.pending is not None:
            self._outbox[-1].num_prompt_tokens = req.num_prompt
            self._outbox[-1].num_cached_tokens = req.pending.num_cached_tokens or 0
        if reason is not None:
            self._end_req(req, reason)
        elif is_first:  # the KV of tokens that are still in flight is not shared yet
            self.cache_manager.cache_req(req, finished=False, length=req.num_ids - 1)

    def _note_prompt_logprobs(self, req: Req, output: ForwardOutputProtocol, i: int) -> None:
        """Keep what a step found out about a prompt until its first token is told."""
        if req.sampling_params.prompt_logprobs is not None and (part := output.logprobs.prompt(i)):
            start, positions = part
            if start == 1:  # nothing comes before the first token
                req.prompt_logprobs[:] = [PositionLogprobs(Logprob(int(req.input_ids[0]), None))]
            req.prompt_logprobs[start:] = positions

    def _tell_logprobs(self, req: Req, output: ForwardOutputProtocol, i: int) -> None:
        """Add to the reply that was made last, which is the request's, what it asked for."""
        params, reply = req.sampling_params, self._outbox[-1]
        if params.logprobs is not None and reply.error is None:
            reply.logprobs = output.logprobs.answer(i, reply.next_token)
        if params.prompt_logprobs is not None and req.num_ids == req.num_prompt + 1:
            reply.prompt_logprobs = req.prompt_logprobs

    def _reason_of_no_token(self, req: Req) -> str:
        matcher = self.engine.matcher_of(req) if req.sampling_params.constraint else None
        if matcher is not None and matcher.error is not None:
            return f"the constraint cannot be met: {matcher.error}"
        return "the model gave no usable logits (NaN) for this request"

    def _end_if_complete(self, req: Req) -> None:
        """End an answer behind which its grammar allows nothing; its last token belongs to it."""
        if req.finish_reason is None and self._is_complete(req):
            self._end_req(req, FinishReason.STOP)
            self._reply(req.uid, NO_TOKEN, FinishReason.STOP)

    def _is_complete(self, req: Req) -> bool:
        if req.sampling_params.constraint is None:
            return False
        num_generated = req.num_ids - req.num_prompt
        return bool(self.engine.matcher_of(req).is_complete_after(num_generated))

    def _reason_to_stop(self, req: Req, token: int) -> FinishReason | None:
        params = req.sampling_params
        # A grammar that lets an EOS through has accepted, and nothing goes on from there.
        heeds_eos = not params.ignore_eos or params.constraint is not None
        is_eos = heeds_eos and token in self._eos_token_ids
        if is_eos or token in params.stop_token_ids:
            return FinishReason.STOP
        is_full = req.num_ids >= req.max_device_len and not self._is_complete(req)
        return FinishReason.LENGTH if is_full else None

    def _reply(
        self,
        uid: int,
        token: int,
        reason: FinishReason | None,
        error: str | None = None,
        kind: ErrorKind = ErrorKind.FAILED,
        param: str | None = None,
    ) -> None:
        is_last = reason is not None
        self._outbox.append(DetokenizeMsg(uid, token, is_last, reason, error, kind, param))

    def _refuse(self, uid: int, text: str, kind: ErrorKind, param: str | None = None) -> None:
        self._reply(uid, NO_TOKEN, FinishReason.ERROR, text, kind, param)

    def _flush_replies(self) -> None:
        if self._outbox:
            replies, self._outbox = self._outbox, []
            self.send_result(replies)

    # Ends

    def _end_req(self, req: Req, reason: FinishReason) -> None:
        """End a request that holds a row; its row and pages go back when it has drained."""
        assert req.finish_reason is None, f"{req} ends twice"
        req.finish_reason = reason
        if self.forecast and req.is_sampled and reason is not FinishReason.ERROR:
            self.forecast.learn(req.num_ids - req.num_prompt, req.output_len)
        self.decode_manager.remove_req(req)
        self.finished_reqs.add(req)
        self._release_if_drained(req)

    def _release_if_drained(self, req: Req) -> None:
        if req not in self._num_in_flight:
            self._release(req)

    def _release(self, req: Req) -> None:
        """The one place where a request's pages and row go back, exactly once."""
        if req.finish_reason is FinishReason.ERROR or req.has_bad_kv:
            self.cache_manager.drop_req(req)
        else:
            self.cache_manager.cache_req(req, finished=True)
        self.table_manager.free(req.table_idx)
        self.finished_reqs.remove(req)

    def _drain(self, req: Req) -> None:
        self._num_in_flight[req] -= 1
        if not self._num_in_flight[req]:
            del self._num_in_flight[req]

    def _abort(self, uid: int) -> None:
        """End `uid` wherever it is; one that is not known yet will be dropped when it arrives."""
        if not self._call_off(uid) and not any(req.uid == uid for req in self.finished_reqs):
            self._early_aborts[uid] = None
            if len(self._early_aborts) > MAX_EARLY_ABORTS:
                self._early_aborts.popitem(last=False)

    def _expire(self, uid: int) -> None:
        """End `uid` wherever it is, and say why."""
        if self._call_off(uid):
            self._refuse(uid, DEADLINE_PASSED, ErrorKind.TIMEOUT)

    def _call_off(self, uid: int) -> bool:
        """End `uid` if it is queued or runs; its KV is as good as any. Returns whether it was."""
        if pending := self.prefill_manager.abort_req(uid):
            if pending.chunked_req is not None:
                self._end_req(pending.chunked_req, FinishReason.ABORT)
            return True
        if req := self.decode_manager.abort_req(uid) or self._in_flight_req(uid):
            self._end_req(req, FinishReason.ABORT)
            return True
        return False

    def _in_flight_req(self, uid: int) -> Req | None:
        """A request whose last token is being computed: in no set, but not ended."""
        for req in self._num_in_flight:
            if req.uid == uid and req.is_sampled and req.finish_reason is None:
                return req
        return None

    def _fail_batch(self, batch: Batch, error: BaseException) -> None:
        """A step that could not be launched: its requests end with an error, the rest go on.

        What is no failure of the step (Ctrl-C) is raised again when nothing is left half-done.
        """
        if isinstance(error, Exception):
            logger.error("a step of %d requests failed", batch.size, exc_info=error)
        message = f"the forward pass failed: {type(error).__name__}: {error}"
        for req in batch.reqs:
            self.prefill_manager.abort_req(req.uid)
            self._end_req(req, FinishReason.ERROR)
            self._reply(req.uid, NO_TOKEN, FinishReason.ERROR, message)
        if not isinstance(error, Exception):
            raise error

    def reset(self) -> None:
        """End every request without a reply and take everything back, whatever was in flight."""
        in_flight = [req for req in self._num_in_flight if req.is_sampled]
        for req in self._num_in_flight:
            req.has_bad_kv = True  # nobody will see whether its logits were good
        self._num_in_flight.clear()
        self._early_aborts.clear()
        self._outbox.clear()
        for pending in list(self.prefill_manager.pending_list):
            self._abort(pending.uid)
        for req in [*self.decode_manager.running_reqs, *in_flight]:
            if req.finish_reason is None:
                self._end_req(req, FinishReason.ABORT)
        for req in list(self.finished_reqs):
            self._release(req)
        self.cache_manager.check_integrity(full=False)

    @property
    def eos_token_id(self) -> int | None:
        """The smallest EOS id; assigning an id or several replaces the whole set."""
        return min(self._eos_token_ids, default=None)

    @eos_token_id.setter
    def eos_token_id(self, ids: int | Iterable[int] | None) -> None:
        if ids is None:
            self._eos_token_ids = frozenset()
        else:
            self._eos_token_ids = frozenset([ids] if isinstance(ids, int) else ids)
