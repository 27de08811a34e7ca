"""What an optimisation did and what it brought: for people, and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xrlflow.backends.results import Latency, SpeedUp
from xrlflow.ir import Body, Graph
from xrlflow.search import Trial


@dataclass(frozen=True, slots=True)
class Report:
    """One optimisation. Costs are seconds as modelled, latencies are measured; None: not measured, not verified."""

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
    speedup: SpeedUp | None
    control: SpeedUp | None
    verified: bool | None
    max_error: float | None
    seconds: float
    phases: Mapping[str, float]
    returned_original: bool
    reason: str
    notes: tuple[str, ...] = field(default=())
    trials: tuple[Trial, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; times in milliseconds where the name says so, else seconds."""
        speedup, control = self.speedup, self.control
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
            "speedup": speedup.median if speedup else None,
            "speedup_low": speedup.low if speedup else None,
            "speedup_high": finite(speedup.high) if speedup else None,
            "control_low": control.low if control else None,
            "control_high": finite(control.high) if control else None,
            "verified": self.verified,
            "max_error": self.max_error,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "returned_original": self.returned_original,
            "reason": self.reason,
            "backend": self.backend,
            "threads": self.threads,
            "expanded": self.expanded,
            "operators_before": dict(self.operators_before),
            "operators_after": dict(self.operators_after),
            "notes": list(self.notes),
            "trials": [
                {
                    "proposal": t.proposal,
                    "against": t.against,
                    "speedup": t.ratio.median,
                    "speedup_low": t.ratio.low,
                    "speedup_high": finite(t.ratio.high),
                    "kept": t.kept,
                }
                for t in self.trials
            ],
        }


def finite(x: float) -> float | None:
    """A number as JSON can hold it: None for an interval that is open, or an infinite error."""
    return x if math.isfinite(x) else None


def operators(graph: Graph) -> Counter[str]:
    """How often each operator runs in a graph, its bodies included; what is constant does not run."""
    count: Counter[str] = Counter()
    for node in graph.nodes():
        if node.const:
            continue
        count[node.op] += 1
        for value in node.attrs.values():
            if isinstance(value, Body):
                count.update(operators(value.graph))
    return count
