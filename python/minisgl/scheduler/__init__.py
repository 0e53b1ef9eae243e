"""The scheduler: queue, admission, chunked prefill, decode, KV ownership, overlap.

It is built from an engine, an IO object and a tick counter that implement the small protocols in
`protocols`, and imports neither models nor the engine: tests run it with a simulated one. All its
decisions use logical ticks and ordered containers, so that every rank and every replay agrees.
May import `core`, `config`, `message`, `kvcache`, `utils`, `env`.
"""

from minisgl.config import SchedulerConfig

from .admission import AdmissionPolicy, PageDemand, conservative, optimistic, peak
from .cache import CacheManager
from .decode import DecodeManager
from .forecast import Forecast
from .intake import Deadlines
from .preempt import Preemptor
from .prefill import ChunkedReq, PrefillAdder, PrefillManager
from .protocols import EngineProtocol, IOProtocol
from .record import StepRecord
from .scheduler import Scheduler
from .table import TableManager
from .utils import ForwardInput, PendingReq

__all__ = [
    "AdmissionPolicy",
    "CacheManager",
    "ChunkedReq",
    "Deadlines",
    "DecodeManager",
    "EngineProtocol",
    "Forecast",
    "ForwardInput",
    "IOProtocol",
    "PageDemand",
    "PendingReq",
    "Preemptor",
    "PrefillAdder",
    "PrefillManager",
    "Scheduler",
    "SchedulerConfig",
    "StepRecord",
    "TableManager",
    "conservative",
    "optimistic",
    "peak",
]
