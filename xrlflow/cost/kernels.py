"""Prices of kernels of our own: operators that were compiled and measured one by one, many at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from xrlflow.cost.database import Database, Subject
from xrlflow.cost.machine import cpu_name
from xrlflow.cost.microbench import QUIET, Sample, is_bound, sample_inputs
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.cost.profiled import operands, price_key, small_constants
from xrlflow.ir import ABSENT, Graph, Node, TensorType, Value
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of
from xrlflow.ops.work import OpKind, work

if TYPE_CHECKING:
    from xrlflow.backends.tvm.library.operator_times import Operator, Times

TimeOperators: TypeAlias = "Callable[[Sequence[Operator], bool], Sequence[Times | None]]"
"""Times of kernels of operators; None where there can be no kernel.

The truth value: whether images have channels last."""

_NEVER = Sample(float("inf"), float("inf"), float("inf"), 0)
"""In the database: there can be no kernel."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """An operator whose price is not known yet."""

    key: tuple[object, ...]
    subject: Subject
    operator: Operator


@dataclass(slots=True)
class KernelPrices:
    """Seconds of kernels of single operators.

    `learn` measures the operators of a graph. Until then the price of an operator is that in the runtime, times what
    kernels of operators of its kind cost there in the middle. `code` names the code generator in the database: what it
    makes changes with it.
    """

    runtime: AdditiveCost
    measure: TimeOperators
    threads: int
    code: str
    database: Database
    seconds_each: float = 0.15
    measured: int = 0
    remembered: int = 0
    spent: float = 0.0
    _known: dict[tuple[object, ...], float | None] = field(default_factory=dict)
    _ratios: dict[OpKind, list[float]] = field(default_factory=dict)
    _middle: dict[OpKind, float] = field(default_factory=dict)

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float | None:
        """The price of one call of a node's kernels; None if there can be none."""
        kind = work(node, in_types, self.runtime.bindings).kind
        key = price_key(graph, node, in_types)
        if key in self._known:
            price = self._known[key]
            return 0.0 if kind is OpKind.VIEW and price is not None else price
        return self._middle.get(kind, 1.0) * self.runtime.seconds(graph, node, in_types)

    def learn(self, graph: Graph, until: float) -> int:
        """Look up or measure the operators of a graph, as many as there is time for until then (time.monotonic).

        Returns how many were new. Raises BackendError if a kernel that was compiled does not run.
        """
        channels_last = _has_convolution(graph)
        asked, found = self._unknown(graph, "channels last" if channels_last else "")
        room = max(0, int((until - time.monotonic()) / self.seconds_each))
        asked = asked[:room]
        begin = time.perf_counter()
        times = self.measure([each.operator for each in asked], channels_last) if asked else []
        elapsed = time.perf_counter() - begin
        for each, taken in zip(asked, times):
            if taken is None:
                self.database.put(each.subject, _NEVER)
                self._known[each.key] = None
                continue
            low, median, high = np.percentile(taken.seconds, [10, 50, 90])
            sample = Sample(float(median), float(low), float(high), len(taken.seconds), taken.waiting)
            quiet = taken.waiting <= QUIET
            if quiet:
                self.database.put(each.subject, sample)
            # Under load the fastest runs are closer to the truth.
            self._known[each.key] = sample.median if quiet else sample.low
        if asked:
            self.seconds_each = elapsed / len(asked)
        self.measured += len(asked)
        self.remembered += found
        self.spent += elapsed
        self._compare(graph)
        return len(asked) + found

    def __str__(self) -> str:
        none = sum(price is None for price in self._known.values())
        text = (
            f"{self.measured} operators measured in {self.spent:.1f} s, {self.remembered} from the database"
        )
        return text + (f"; {none} can be no kernel" if none else "")

    def _unknown(self, graph: Graph, layout: str) -> tuple[list[_Asked], int]:
        """The operators of a graph that have to be measured, the frequent first, and the number found on disk."""
        count: Counter[tuple[object, ...]] = Counter()
        asked: dict[tuple[object, ...], _Asked] = {}
        found = 0
        for node, in_types in _operators(graph):
            key = price_key(graph, node, in_types)
            count[key] += 1
            if key in self._known or key in asked:
                continue
            one = self._asked(graph, node, in_types, layout)
            if one is None:
                self._known[key] = None
                continue
            sample = self.database.get(one.subject)
            if sample is None:
                asked[key] = one
                continue
            found += 1
            self._known[key] = sample.median if sample.count else None
        return sorted(asked.values(), key=lambda each: -count[each.key]), found

    def _asked(self, graph: Graph, node: Node, in_types: InTypes, layout: str) -> _Asked | None:
        bindings = self.runtime.bindings
        if not is_bound((*in_types, *node.types), bindings):
            return None
        known = small_constants(graph, node)
        try:
            inputs, consts = sample_inputs(node, in_types, known, bindings)
            dtypes = dict(zip(node.inputs, in_types))
            types = {
                v: TensorType(t.dtype, a.shape) for v, a in inputs.items() if (t := dtypes[v]) is not None
            }
            model = model_of([node], types, consts, node.outputs)
        except NotStandalone:
            return None
        shown = f"{operands(node, in_types, known, bindings)} {layout}".rstrip()
        subject = Subject(cpu_name(), self.code, self.threads, node.op, repr(node.attrs), shown)
        return _Asked(
            price_key(graph, node, in_types), subject, (model, {input_name(v): a for v, a in inputs.items()})
        )

    def _compare(self, graph: Graph) -> None:
        """Learn by kind of operator how kernels compare with the runtime."""
        for node, in_types in _operators(graph):
            own = self._known.get(price_key(graph, node, in_types))
            other = self.runtime.seconds(graph, node, in_types)
            if own is not None and other > 0:
                kind = work(node, in_types, self.runtime.bindings).kind
                self._ratios.setdefault(kind, []).append(own / other)
        self._middle = {kind: float(np.median(ratios)) for kind, ratios in self._ratios.items()}


def _operators(graph: Graph) -> list[tuple[Node, InTypes]]:
    """The nodes that run, with the types of their inputs."""

    def type_of(value: Value) -> TensorType | None:
        return graph.type(value) if value != ABSENT else None

    return [(node, tuple(map(type_of, node.inputs))) for node in graph.nodes() if not node.const]


def _has_convolution(graph: Graph) -> bool:
    """Whether there is a convolution of images that sums over channels: kernels keep images with channels last then."""
    return any(
        node.op == "Conv" and work(node, in_types, {}).kind in (OpKind.CONV, OpKind.GROUPED_CONV)
        for node, in_types in _operators(graph)
    )
