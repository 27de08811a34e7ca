"""The report of an optimisation: what was changed and how much faster the result is, for people and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xrlflow.backends.results import Latency, SpeedUp
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice
from xrlflow.ir import Body, Graph
from xrlflow.search import Ratio, Trial


@dataclass(frozen=True, slots=True)
class Precision:
    """What changing a model's precision did. Errors are None if no model was converted.

    Errors are those of the worst output on the worst set of inputs. `error`: the root mean square of the differences
    from the original, over that of the original's elements. `largest_error`: the largest difference over the largest
    magnitude. `bound`: the greatest `error` that was allowed.
    """

    asked: str
    converted: tuple[str, ...]
    """The names of the layers (int8) or weights (float16, float32) that were converted."""
    candidates: int
    """How many could have been converted."""
    bound: float
    error: float | None = None
    largest_error: float | None = None
    calibrating: int = 0  # sets of inputs from which ranges were taken
    checking: int = 0  # sets on which the errors were measured
    held_out: bool = False  # whether these had no part in calibrating
    random: bool = False  # whether they were drawn at random

    def __str__(self) -> str:
        what = "layers" if self.asked == "int8" else "weights"
        text = f"precision {self.asked}: {len(self.converted)} of {self.candidates} {what} converted"
        if self.error is None or self.largest_error is None:
            return f"{text}, the bound of the error is {self.bound:g}"
        kind = "held-out " if self.held_out else "random " if self.random else ""
        sets = f"{self.checking} {kind}set{'s' * (self.checking != 1)}"
        return (
            f"{text}; error of the worst output {self.error:.2g} (RMS, relative; bound {self.bound:g}), at most "
            f"{self.largest_error:.2g} of its largest number, on {sets} of inputs"
        )

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return {
            "asked": self.asked,
            "converted": list(self.converted),
            "candidates": self.candidates,
            "bound": self.bound,
            "error": None if self.error is None else finite(self.error),
            "largest_error": None if self.largest_error is None else finite(self.largest_error),
            "calibrating": self.calibrating,
            "checking": self.checking,
            "held_out": self.held_out,
            "random": self.random,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """One optimisation. Costs are modelled seconds, latencies are measured seconds; None: not measured or not
    verified."""

    model: str
    search: str
    cost_model: str
    backend: str
    threads: int
    nodes_before: int
    nodes_after: int
    operators_before: Mapping[str, int]
    operators_after: Mapping[str, int]
    substitutions: Mapping[str, int]
    cost_before: float
    cost_after: float
    expanded: int
    latency_before: Latency | None
    latency_after: Latency | None
    speedup: SpeedUp | None  # measured after the decision, in other processes
    control: SpeedUp | None  # the original against itself
    verified: bool | None
    max_error: float | None
    seconds: float
    phases: Mapping[str, float]  # seconds of each phase
    returned_original: bool
    reason: str
    notes: tuple[str, ...] = field(default=())
    decided: SpeedUp | None = None  # the measurement that decided whether the result is accepted
    processes: int = 0  # number of processes that measured `speedup`
    trials: tuple[Trial, ...] = field(default=())
    at_sizes: Mapping[str, SpeedUp] = field(
        default_factory=dict
    )  # the speed-up with other sizes, in one process
    kernel_nodes: int = 0  # number of nodes that run in generated kernels
    algorithms: tuple[AlgorithmChoice, ...] = field(default=())
    exactness: str = ""  # of a quantised model: exact, as the runtime, or within a number of steps
    precision: Precision | None = None  # None: the precision was kept, as it is unless another is asked for

    def to_json(self) -> dict[str, Any]:
        """The report as plain data. Times are in milliseconds if the key says so, else in seconds."""
        return {
            "model": self.model,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "substitutions": dict(self.substitutions),
            "search": self.search,
            "cost_model": self.cost_model,
            "cost_before": self.cost_before,
            "cost_after": self.cost_after,
            "latency_before_ms": self.latency_before.median_ms if self.latency_before else None,
            "latency_after_ms": self.latency_after.median_ms if self.latency_after else None,
            "speedup": self.speedup.median if self.speedup else None,
            **bounds("speedup", self.speedup),
            **bounds("control", self.control),
            "decided": self.decided.median if self.decided else None,
            **bounds("decided", self.decided),
            "processes": self.processes,
            "at_sizes": [
                {"sizes": text, "speedup": at.median, **bounds("speedup", at)}
                for text, at in self.at_sizes.items()
            ],
            "verified": self.verified,
            "max_error": self.max_error,
            "exactness": self.exactness or None,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "returned_original": self.returned_original,
            "reason": self.reason,
            "backend": self.backend,
            "threads": self.threads,
            "kernel_nodes": self.kernel_nodes,
            "algorithms": [algorithm.stored() for algorithm in self.algorithms],
            "precision": self.precision.to_json() if self.precision is not None else None,
            "expanded": self.expanded,
            "operators_before": dict(self.operators_before),
            "operators_after": dict(self.operators_after),
            "notes": list(self.notes),
            "trials": [
                {
                    "proposal": t.proposal,
                    "against": t.against,
                    "speedup": t.ratio.median,
                    **bounds("speedup", t.ratio),
                    "kept": t.accepted,
                }
                for t in self.trials
            ],
        }


def bounds(name: str, measured: SpeedUp | Ratio | None) -> dict[str, float | None]:
    """The ends of an interval as NAME_low and NAME_high; None if there is no interval or too few measurements."""
    bounded = measured is not None and measured.low > 0.0 and math.isfinite(measured.high)
    return {
        f"{name}_low": measured.low if measured is not None and bounded else None,
        f"{name}_high": measured.high if measured is not None and bounded else None,
    }


def finite(x: float) -> float | None:
    """A number that JSON can hold: None instead of an infinite one."""
    return x if math.isfinite(x) else None


def operators(graph: Graph) -> Counter[str]:
    """How often each operator runs in a graph and its bodies. Constant nodes do not run."""
    count: Counter[str] = Counter()
    for node in graph.nodes():
        if node.const:
            continue
        count[node.op] += 1
        for value in node.attrs.values():
            if isinstance(value, Body):
                count.update(operators(value.graph))
    return count
