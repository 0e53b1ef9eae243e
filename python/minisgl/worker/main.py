"""The life of a scheduler process: load, say so, serve, and end as the parent or a failure wants.

The task that the parent writes: `config` (fields of `SchedulerConfig`), `rank`, `folder` (of the
sockets), `num_tokenizers`, `engine` ("module:name" of what is called with the config and a progress
callback). Exit codes: 0 told to end, 1 cannot start, 3 a step failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from minisgl.config import DistributedInfo, SchedulerConfig
from minisgl.constraint import Grammars
from minisgl.message import (
    BaseBackendMsg,
    BaseFrontendMsg,
    EngineReady,
    ExitMsg,
    LoadProgress,
    StartFailed,
    VocabularyMsg,
    to_wire,
)
from minisgl.params import MinisglError
from minisgl.scheduler.gate import ConstraintGate
from minisgl.tokenizer import TokenBytes, load_tokenizer
from minisgl.utils import ZmqPushQueue, init_logger
from minisgl.utils.mp import deliver_and_close
from minisgl.utils.process import END_SECONDS, SAVE_SECONDS, Addresses, end_with_parent, read_task

from .io import FollowerIO, PrimaryIO
from .scheduler import ServedScheduler

logger = init_logger(__name__)

CANNOT_START, STEP_FAILED = 1, 3
PROGRESS_SECONDS = 0.2

ToFrontend = ZmqPushQueue[BaseFrontendMsg]


def main() -> int:
    """Run one rank until its parent is gone, it is told to exit, or a step fails."""
    task = read_task()
    addresses, rank = Addresses(task["folder"]), int(task["rank"])
    is_serving: list[bool] = []
    own_inbox: ZmqPushQueue[BaseBackendMsg] = ZmqPushQueue(  # connected while the socket is there
        addresses.scheduler, False, to_wire
    )

    def exit_in_order() -> None:
        """Rank 0 tells itself, and so the others, to exit; nothing to finish while loading."""
        if not is_serving:
            os._exit(0)
        if rank == 0:
            own_inbox.put(ExitMsg())

    saves = task["config"].get("kv_prefix_file") is not None
    end_with_parent(addresses.folder, exit_in_order, SAVE_SECONDS if saves else END_SECONDS)
    to_frontend: ToFrontend = ZmqPushQueue(addresses.frontend, False, to_wire)
    try:
        serve = _start(task, addresses, to_frontend)
    except MinisglError as error:
        to_frontend.put(StartFailed(_name(rank), str(error)))
        to_frontend.stop()
        return CANNOT_START
    is_serving.append(True)
    code = serve()
    own_inbox.stop()
    if code == STEP_FAILED:  # at once, for all streams wait: torch takes its time to end in order
        deliver_and_close()
        os._exit(code)
    return code


def _name(rank: int) -> str:
    return "scheduler" if rank == 0 else f"scheduler {rank}"


def _start(
    task: dict[str, Any], addresses: Addresses, to_frontend: ToFrontend
) -> Callable[[], int]:
    """Load everything; what to call then."""
    rank, size = int(task["rank"]), int(task["config"]["tp_info"]["size"])
    fields = {**task["config"], "tp_info": DistributedInfo(rank, size)}
    config = SchedulerConfig(**fields)
    module, _, name = task["engine"].partition(":")
    make_engine = getattr(import_module(module), name)
    engine = make_engine(config, _progress(to_frontend) if rank == 0 else None)
    io: PrimaryIO | FollowerIO
    if rank == 0:
        io = PrimaryIO(addresses, int(task["num_tokenizers"]), size)
    else:
        io = FollowerIO(addresses)
    eos_token_ids = _wait_for_vocabulary(io)
    grammars = Grammars(lambda: _vocabulary(config.model_path, eos_token_ids), engine.vocab_size)
    engine.set_grammars(grammars)
    scheduler = ServedScheduler(config, engine, io, eos_token_ids=eos_token_ids)

    def tell_stats(is_idle: bool) -> None:
        stats = scheduler.due_stats(is_idle)
        if stats is not None:
            to_frontend.try_put(stats)

    def serve() -> int:
        scheduler.run_forever()
        io.stop()
        to_frontend.stop()
        if scheduler.failure is not None:
            logger.error("%s ends: a step failed: %s", _name(rank), scheduler.failure)
            return STEP_FAILED
        if config.kv_prefix_file is not None:
            logger.info("saving the cached prefixes to %s", config.kv_prefix_file)
            scheduler.shutdown()
        engine.shutdown()
        return 0

    if isinstance(io, PrimaryIO):
        io.before_receive = tell_stats
        io.gate = ConstraintGate(grammars.compile, lambda reply: io.send([reply]))
        to_frontend.put(
            EngineReady(engine.max_seq_len, engine.vocab_size, engine.num_pages, config.page_size)
        )
    return serve


def _vocabulary(model_path: str, eos_token_ids: list[int]) -> tuple[Any, Any, Any]:
    """What grammars are compiled against, loaded when the first one comes."""
    tokenizer = load_tokenizer(model_path)
    return tokenizer, TokenBytes(tokenizer), eos_token_ids


def _wait_for_vocabulary(io: Any) -> list[int]:
    """The EOS ids, which the first tokenizer process knows."""
    while True:
        for msg in io.receive(True):
            for item in getattr(msg, "data", [msg]):
                if isinstance(item, VocabularyMsg):
                    return item.eos_token_ids


def _progress(to_frontend: ToFrontend) -> Callable[[int, int], None]:
    """A callback that tells the frontend how far loading is, a few times a second."""
    told_at = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= PROGRESS_SECONDS:
            told_at = now
            to_frontend.try_put(LoadProgress(done, total))

    return tell
