"""What GET /metrics tells Prometheus: counts and times seen here, and the state of the engine.

May import `message`. Invariant: labels come from small fixed sets, never from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.message import EngineStats

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_COUNTERS = {  # field of EngineStats: metric, what it counts
    "num_requests": ("minisgl_requests", "requests that reached the scheduler"),
    "num_steps": ("minisgl_steps", "forward passes"),
    "num_prompt_tokens": ("minisgl_prompt_tokens", "tokens in prompts"),
    "num_cached_tokens": ("minisgl_cached_tokens", "prompt tokens found in the prefix cache"),
    "num_generated_tokens": ("minisgl_generated_tokens", "tokens generated"),
    "num_aborts": ("minisgl_aborts", "requests given up by their clients"),
    "num_errors": ("minisgl_errors", "requests that ended in an error"),
    "num_preemptions": ("minisgl_preemptions", "requests that lost their memory for a while"),
}


class Metrics:
    """All metrics of one server.

    stats: gives the latest state of the engine; held: by process, the requests it has state of.
    """

    def __init__(self, stats: Callable[[], EngineStats], held: Callable[[], dict[str, int]]):
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(stats, held))
        self.http_requests = Counter(
            "minisgl_http_requests",
            "HTTP requests by status",
            ["status"],
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "minisgl_time_to_first_token_seconds", "from the request to its first token", _FIRST
        )
        self.between_tokens = self._histogram(
            "minisgl_inter_token_latency_seconds", "between two tokens of an answer", _BETWEEN
        )
        self.whole = self._histogram(
            "minisgl_request_seconds", "from the request to the end of its answer", _WHOLE
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], held: Callable[[], dict[str, int]]):
        self._stats = stats
        self._held = held

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("minisgl_running_requests", "requests that run", stats.running)
        yield GaugeMetricFamily("minisgl_waiting_requests", "requests in the queue", stats.waiting)
        pages = GaugeMetricFamily("minisgl_kv_pages", "KV pages by state", labels=["state"])
        pages.add_metric(["free"], stats.free_pages)
        pages.add_metric(["cached"], stats.cached_pages)
        pages.add_metric(["owned"], stats.owned_pages)
        yield pages
        held = GaugeMetricFamily(
            "minisgl_held_requests", "requests that a process has state of", labels=["process"]
        )
        for process, num in self._held().items():
            held.add_metric([process], num)
        yield held
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(stats, field))
