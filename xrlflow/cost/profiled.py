"""The profiled cost model: the sum of the times of single operators, as in TASO (section 5)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import fsum
from typing import Any

import numpy.typing as npt

from xrlflow.backends.protocol import BackendError
from xrlflow.cost.calibrate import runtime
from xrlflow.cost.database import Database, Subject
from xrlflow.cost.machine import Machine, cpu_name
from xrlflow.cost.microbench import QUIET, Sample, call_seconds, in_quiet, is_bound, time_node
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.cost.roofline import Roofline
from xrlflow.ir import ABSENT, DType, Graph, Node, TensorType, Value
from xrlflow.ops.subgraph import NotStandalone
from xrlflow.ops.work import OpKind, bodies, dimensions, work

_CONVOLUTIONS = frozenset({OpKind.CONV, OpKind.GROUPED_CONV, OpKind.DEPTHWISE_CONV})
_CALL = "(session call)"
# Operators that take more seconds than this by the roofline are not run.
_LONGEST = 30.0
# Why the cost of an operator was modelled although it could have been measured.
_LATE = "after the time for measuring was over"
# Operators whose time depends on the value of a float constant.
_BY_VALUE = frozenset({"Pow"})


@dataclass(slots=True)
class PriceCounts:
    """How many operators' costs came from which source."""

    measured: int = 0  # measured by this process
    disturbed: int = 0  # how many of `measured` were measured on a busy machine, and not stored
    remembered: int = 0  # read from the database
    seconds: float = 0.0  # spent measuring
    modelled: Counter[str] = field(default_factory=Counter)  # not measured: numbers by reason

    @property
    def complete(self) -> bool:
        """Whether all operators that can be measured were measured."""
        return not self.modelled[_LATE]

    def __str__(self) -> str:
        text = (
            f"{self.measured} operators measured in {self.seconds:.1f} s, {self.remembered} from the database"
        )
        if self.disturbed:
            text += f"; {self.disturbed} measured while others used the processors"
        if self.modelled:
            missed = ", ".join(f"{n} {why}" for why, n in self.modelled.most_common())
            text += f"; {self.modelled.total()} modelled ({missed})"
        return text


class Profiled(AdditiveCost):
    """Measures each operator by itself and stores its seconds in a database. The roofline gives the cost of others.

    Views are not measured: alone they copy, in a network they do not. Control flow costs the sum of its bodies.
    `counts`: how many operators were measured, found in the database, and modelled.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        database: Database | None = None,
        bindings: Mapping[str, int] | None = None,
        time_budget: float | None = None,
        per_operator: float = 0.03,
        tolerance: float = QUIET,
    ) -> None:
        """`machine` gives the number of threads, and the roofline's costs of operators that cannot be measured.

        `time_budget`: seconds for all measurements, after which the roofline models new operators (None: no limit).
        `per_operator`: seconds to time each operator, without creating its session. `tolerance`: the part of these
        seconds for which our threads may wait for a processor; above it the measurement is repeated, up to twice.
        """
        super().__init__(bindings)
        self.machine = machine
        self.lanes = machine.lanes
        self.database = database if database is not None else Database()
        self.time_budget = time_budget
        self.per_operator = per_operator
        self.counts = PriceCounts()
        self._fallback = Roofline(machine, bindings)
        self._device, self._runtime = cpu_name(), runtime()
        self.tolerance = tolerance
        self._call: float | None = None

    @property
    def name(self) -> str:
        return "profiled"

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        """As in `AdditiveCost`, but the values of integer constants (axes, shapes) matter as well."""
        if node.types[0].const:
            return 0.0
        key = price_key(graph, node, in_types)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self.price(graph, node, in_types)
        return price

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        inside = list(bodies(node, in_types, self.bindings, graph.leaves.consts))
        if inside:  # entering a body costs time
            return self.machine.overhead + fsum(t * (self.machine.overhead + self.cost(b)) for b, t in inside)
        kind = work(node, in_types, self.bindings).kind
        if kind is OpKind.VIEW:
            return self.machine.overhead
        sample = self._sample(graph, node, in_types, kind)
        if sample is None:
            return self._fallback.price(graph, node, in_types)
        if kind in _CONVOLUTIONS:
            return sample.median + self.machine.overhead
        return max(0.0, sample.median - self._call_seconds()) + self.machine.overhead

    def _sample(self, graph: Graph, node: Node, in_types: InTypes, kind: OpKind) -> Sample | None:
        """The node's sample, from the database or measured now. None if it cannot be measured; `counts` says why."""
        if not is_bound((*in_types, *node.types), self.bindings):
            self.counts.modelled["with a dimension that has no number"] += 1
            return None
        constants = small_constants(graph, node)
        subject = self._subject(node, in_types, constants)
        stored = self.database.get(subject)
        if stored is not None:
            self.counts.remembered += 1
            return stored
        if self.time_budget is not None and self.counts.seconds >= self.time_budget:
            self.counts.modelled[_LATE] += 1
            return None
        if self._fallback.price(graph, node, in_types) > _LONGEST:  # a run cannot be interrupted
            self.counts.modelled[f"{node.op} that takes long"] += 1
            return None

        def once() -> Sample:
            return time_node(
                node,
                in_types,
                constants,
                threads=self.machine.threads,
                time_limit=self.per_operator,
                bindings=self.bindings,
                kernel_only=kind in _CONVOLUTIONS,
            )

        started = time.perf_counter()
        try:
            sample, quiet = in_quiet(once, self.tolerance)
        except (NotStandalone, BackendError):
            self.counts.modelled[f"{node.op} that does not run alone"] += 1
            return None
        finally:
            self.counts.seconds += time.perf_counter() - started
        self.counts.measured += 1
        if quiet:
            self.database.put(subject, sample)
        else:
            self.counts.disturbed += 1
        return sample

    def _call_seconds(self) -> float:
        if self._call is None:
            subject = Subject(self._device, self._runtime, self.machine.threads, _CALL, "", "")
            sample = self.database.get(subject)
            if sample is None:
                sample, quiet = in_quiet(lambda: call_seconds(self.machine.threads), self.tolerance)
                if quiet:
                    self.database.put(subject, sample)
            self._call = sample.median
        return self._call

    def _subject(self, node: Node, in_types: InTypes, constants: Mapping[Value, npt.NDArray[Any]]) -> Subject:
        signature = operands(node, in_types, constants, self.bindings)
        return Subject(
            self._device, self._runtime, self.machine.threads, node.op, repr(node.attrs), signature
        )


def price_key(graph: Graph, node: Node, in_types: InTypes) -> tuple[object, ...]:
    """A key that nodes of equal cost share: operator, attributes, types, and the constants whose values matter to the
    time."""
    key: tuple[object, ...] = (node.op, node.attrs.digest, in_types, node.types)
    consts = graph.leaves.consts
    for value, type in zip(node.inputs, in_types):
        if type is not None and type.const and value in consts and _by_value(node, type):
            key = (*key, value)  # a value's name stands for its contents
    return key


def operands(
    node: Node,
    in_types: InTypes,
    constants: Mapping[Value, npt.NDArray[Any]],
    bindings: Mapping[str, int],
) -> str:
    """The types of a node's inputs and outputs as text, with digests of the constants whose values matter to the
    time."""

    def describe(value: Value, type: TensorType | None) -> str:
        if type is None or value == ABSENT:
            return "_"
        dims = ",".join(map(str, dimensions(type, bindings)))
        array = constants.get(value) if type.const and _by_value(node, type) else None
        contents = "" if array is None else f"={blake2b(array.tobytes(), digest_size=8).hexdigest()}"
        return f"{type.dtype.name.lower()}[{dims}]{':const' if type.const else ''}{contents}"

    # A value that is read twice is in the cache once.
    positions = {v: i for i, v in reversed(list(enumerate(node.inputs)))}
    ins = ", ".join(
        describe(v, t) if positions[v] == i else f"${positions[v]}"
        for i, (v, t) in enumerate(zip(node.inputs, in_types))
    )
    outs = ", ".join(describe(v, t) for v, t in zip(node.outputs, node.types))
    return f"{ins} -> {outs}"


def _by_value(node: Node, type: TensorType) -> bool:
    """Whether a constant's values matter to the measurement: those of axes and shapes do, those of weights do not."""
    return type.dtype is not DType.FLOAT or node.op in _BY_VALUE


def small_constants(graph: Graph, node: Node) -> dict[Value, npt.NDArray[Any]]:
    """The small constants that the node reads."""
    consts = graph.leaves.consts
    return {v: array for v in node.inputs if v in consts and (array := consts[v].array) is not None}
