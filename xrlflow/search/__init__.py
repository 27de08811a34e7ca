"""Search strategies over rewrite states and cost models: greedy, TASO's, with lookahead, random. Bodies of control flow
are searched before the graph around them (`bodies`), and measurements choose among the results (`select`)."""

from xrlflow.search.bodies import simplify, with_bodies
from xrlflow.search.budget import Budget
from xrlflow.search.greedy import greedy
from xrlflow.search.lookahead import lookahead
from xrlflow.search.random import random_walk
from xrlflow.search.result import (
    Limits,
    Path,
    SearchNode,
    SearchResult,
    Shortlist,
    TraceError,
    TraceStep,
    append,
    extend,
    joined,
    leave_out,
    replay,
    retrace,
    retraced,
    steps_of,
)
from xrlflow.search.select import Ratio, Selection, Survey, Trial, select
from xrlflow.search.sweep import sweep
from xrlflow.search.taso import taso

__all__ = [
    "Budget",
    "Limits",
    "Path",
    "Ratio",
    "SearchNode",
    "SearchResult",
    "Selection",
    "Shortlist",
    "Survey",
    "TraceError",
    "TraceStep",
    "Trial",
    "append",
    "extend",
    "greedy",
    "joined",
    "leave_out",
    "lookahead",
    "random_walk",
    "replay",
    "retrace",
    "retraced",
    "select",
    "simplify",
    "steps_of",
    "sweep",
    "taso",
    "with_bodies",
]
