"""The engine: batch in, tokens out.

May import `models` and below; knows nothing of queues or requests' lives.
"""

from minisgl.config import EngineConfig

from .device import count_threads, resolve_device
from .engine import Engine, ForwardOutput
from .graph import GraphCaptureBuffer, GraphRunner, determine_cuda_graph_bs
from .logits import LogitsProcessors
from .memory import MemoryReport, human
from .sample import BatchSamplingArgs, Sampler

__all__ = [
    "BatchSamplingArgs",
    "Engine",
    "EngineConfig",
    "ForwardOutput",
    "GraphCaptureBuffer",
    "GraphRunner",
    "LogitsProcessors",
    "MemoryReport",
    "Sampler",
    "count_threads",
    "determine_cuda_graph_bs",
    "human",
    "resolve_device",
]
