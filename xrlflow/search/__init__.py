"""Search strategies over rewrite states and cost models."""

from xrlflow.search.greedy import greedy
from xrlflow.search.random import random_walk
from xrlflow.search.result import (
    Found,
    Limits,
    SearchResult,
    Shortlist,
    Step,
    TraceError,
    extend,
    replay,
    steps_of,
)
from xrlflow.search.sweep import sweep
from xrlflow.search.taso import taso

__all__ = [
    "Found",
    "Limits",
    "SearchResult",
    "Shortlist",
    "Step",
    "TraceError",
    "extend",
    "greedy",
    "random_walk",
    "replay",
    "steps_of",
    "sweep",
    "taso",
]
