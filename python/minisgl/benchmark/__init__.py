"""Measuring a server from outside (`minisgl bench serve`) and the engine from within (`offline`).

May import `llm`, `server` and below; only `offline` loads torch. Invariant: the same seed asks for
the same prompts, lengths and moments of arrival, whatever the server does.
"""

from .http_client import HttpClient
from .load import Load, Plan
from .measure import Record, summarise
from .workload import (
    RepeatedRequests,
    Request,
    SyntheticRequests,
    Workload,
    parse_requests,
    poisson_arrivals,
)

__all__ = [
    "HttpClient",
    "Load",
    "Plan",
    "Record",
    "RepeatedRequests",
    "Request",
    "SyntheticRequests",
    "Workload",
    "parse_requests",
    "poisson_arrivals",
    "summarise",
]
