"""Costs of single operators in generated kernels. The kernels are compiled together and measured one by one."""

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
"""Measures the generated kernels of operators; None for an operator without one.

The second argument: whether images have channels last."""

_NEVER = Sample(float("inf"), float("inf"), float("inf"), 0)
"""In the database: the operator has no generated kernel."""


@dataclass(frozen=True, slots=True)
class _Request:
    """An operator that has to be measured."""

    key: tuple[object, ...]
    subject: Subject
    operator: Operator


@dataclass(slots=True)
class KernelPrices:
    """Seconds of generated kernels of single operators.

    `learn` measures the operators of a graph. The cost of an operator that was not measured is its time in ONNX
    Runtime, times the median ratio of kernel time to ONNX Runtime's time over operators of its kind.
    """

    runtime: AdditiveCost
    measure: TimeOperators
    threads: int
    code: str  # the version of the code generator, which is part of the database's keys
    database: Database
    seconds_each: float = 0.15  # to compile and measure one operator
    measured: int = 0  # number of operators that this object measured
    remembered: int = 0  # number of operators whose time came from the database
    spent: float = 0.0  # seconds of compiling and measuring
    _prices: dict[tuple[object, ...], float | None] = field(default_factory=dict)
    _ratios: dict[OpKind, list[float]] = field(default_factory=dict)
    _medians: dict[OpKind, float] = field(default_factory=dict)

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float | None:
        """Seconds of one call of a node's generated kernel; None if the node cannot have one."""
        kind = work(node, in_types, self.runtime.bindings).kind
        key = price_key(graph, node, in_types)
        if key in self._prices:
            price = self._prices[key]
            return 0.0 if kind is OpKind.VIEW and price is not None else price
        return self._medians.get(kind, 1.0) * self.runtime.seconds(graph, node, in_types)

    def learn(self, graph: Graph, until: float) -> int:
        """Look up or measure as many operators of a graph as there is time for before `until` (time.monotonic).

        Returns how many operators got a time. Raises BackendError if a compiled kernel does not run.
        """
        channels_last = _has_convolution(graph)
        requests, remembered = self._unknown(graph, "channels last" if channels_last else "")
        room = max(0, int((until - time.monotonic()) / self.seconds_each))
        requests = requests[:room]
        begin = time.perf_counter()
        times = self.measure([request.operator for request in requests], channels_last) if requests else []
        elapsed = time.perf_counter() - begin
        for request, timing in zip(requests, times):
            if timing is None:
                self.database.put(request.subject, _NEVER)
                self._prices[request.key] = None
                continue
            low, median, high = np.percentile(timing.seconds, [10, 50, 90])
            sample = Sample(float(median), float(low), float(high), len(timing.seconds), timing.waiting)
            quiet = timing.waiting <= QUIET
            if quiet:
                self.database.put(request.subject, sample)
            # Under load the fastest runs are closer to the truth.
            self._prices[request.key] = sample.median if quiet else sample.low
        if requests:
            self.seconds_each = elapsed / len(requests)
        self.measured += len(requests)
        self.remembered += remembered
        self.spent += elapsed
        self._compare(graph)
        return len(requests) + remembered

    def __str__(self) -> str:
        none = sum(price is None for price in self._prices.values())
        text = (
            f"{self.measured} operators measured in {self.spent:.1f} s, {self.remembered} from the database"
        )
        return text + (f"; {none} can be no kernel" if none else "")

    def _unknown(self, graph: Graph, layout: str) -> tuple[list[_Request], int]:
        """The operators of a graph that have to be measured, the most frequent first, and how many others the database
        had."""
        count: Counter[tuple[object, ...]] = Counter()
        requests: dict[tuple[object, ...], _Request] = {}
        remembered = 0
        for node, in_types in _operators(graph):
            key = price_key(graph, node, in_types)
            count[key] += 1
            if key in self._prices or key in requests:
                continue
            request = self._request(graph, node, in_types, layout)
            if request is None:
                self._prices[key] = None
                continue
            sample = self.database.get(request.subject)
            if sample is None:
                requests[key] = request
                continue
            remembered += 1
            self._prices[key] = sample.median if sample.count else None
        return sorted(requests.values(), key=lambda each: -count[each.key]), remembered

    def _request(self, graph: Graph, node: Node, in_types: InTypes, layout: str) -> _Request | None:
        bindings = self.runtime.bindings
        if not is_bound((*in_types, *node.types), bindings):
            return None
        constants = small_constants(graph, node)
        try:
            inputs, consts = sample_inputs(node, in_types, constants, bindings)
            dtypes = dict(zip(node.inputs, in_types))
            types = {
                v: TensorType(t.dtype, a.shape) for v, a in inputs.items() if (t := dtypes[v]) is not None
            }
            model = model_of([node], types, consts, node.outputs)
        except NotStandalone:
            return None
        signature = f"{operands(node, in_types, constants, bindings)} {layout}".rstrip()
        subject = Subject(cpu_name(), self.code, self.threads, node.op, repr(node.attrs), signature)
        return _Request(
            price_key(graph, node, in_types), subject, (model, {input_name(v): a for v, a in inputs.items()})
        )

    def _compare(self, graph: Graph) -> None:
        """For each kind of operator, compute the ratio of the kernels' times to those of the runtime."""
        for node, in_types in _operators(graph):
            own = self._prices.get(price_key(graph, node, in_types))
            runtime = self.runtime.seconds(graph, node, in_types)
            if own is not None and runtime > 0:
                kind = work(node, in_types, self.runtime.bindings).kind
                self._ratios.setdefault(kind, []).append(own / runtime)
        self._medians = {kind: float(np.median(ratios)) for kind, ratios in self._ratios.items()}


def _operators(graph: Graph) -> list[tuple[Node, InTypes]]:
    """The nodes of a graph that are not constant, with the types of their inputs."""

    def type_of(value: Value) -> TensorType | None:
        return graph.type(value) if value != ABSENT else None

    return [(node, tuple(map(type_of, node.inputs))) for node in graph.nodes() if not node.const]


def _has_convolution(graph: Graph) -> bool:
    """Whether there is a convolution that sums over channels: then kernels store images with channels last."""
    return any(
        node.op == "Conv" and work(node, in_types, {}).kind in (OpKind.CONV, OpKind.GROUPED_CONV)
        for node, in_types in _operators(graph)
    )
