"""Constants that are evaluated only when needed: which of them the written model needs, their sizes, and their
evaluation.

Floating-point expressions are evaluated in float64 and rounded once, to their type. A Cast inside an expression rounds,
too; integers are exact. `plan` decides from types alone what a model has to store, so that a search knows the size of
the written file without computing its constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.helper
from onnx.reference import ReferenceEvaluator

from xrlflow.ir import ABSENT, SMALL, ArrayHandle, Attrs, Const, DType, Graph, Node, TensorType, Value
from xrlflow.ops.bounds import Effort, effort
from xrlflow.ops.evaluate import MISFIT, SPECS, NotEvaluable, evaluate_node, promote
from xrlflow.ops.field import REALS
from xrlflow.ops.infer import attr_proto
from xrlflow.ops.schema import OPSET, split_op
from xrlflow.ops.tensors import dtype_of, numpy_dtype

__all__ = ["ExportPlan", "NotEvaluable", "evaluate", "materialise", "plan", "stored_bytes"]

Array = npt.NDArray[Any]

# A constant expression stays in the model as nodes if its result has more bytes than this, and also more than GROWTH
# times the bytes of the constants from which it is computed. A runtime then folds the nodes when it loads the model.
# Examples: Expand, ConstantOfShape, the Cast of a compressed table.
BLOAT = 1 << 10
GROWTH = 1.5
# An expression also stays as nodes if its result has more bytes than this, and also more than GROWTH times the bytes
# that then need not be stored. Examples: the transpose of a table that is also used for lookups, a weight that is
# scaled for one of two readers.
SHARED = 1 << 14

# The limits for evaluating all constants of a model: seconds, and bytes at a time, both for a small model; and how much
# more each byte of weights allows. Expressions beyond the limits stay in the model as nodes.
_SECONDS, _SECONDS_PER_BYTE = 2.0, 1 / (20 << 20)
_ROOM, _ROOM_PER_BYTE = float(1 << 29), 8.0

# ONNX Runtime 1.31 fuses a Pad into the Conv that reads it, even if the Pad computes the weights, and then refuses the
# model. So the result of a Pad is always stored.
_NEVER_RUN = frozenset({"Pad"})

# Operators that only move data. They need no float64, and preserve the precision of their input.
_MOVES = frozenset(
    ["Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad"]
    + [
        "Reshape",
        "ReverseSequence",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
# Operators that round by definition. The nodes that read their results get the rounded numbers.
_ROUNDS = frozenset(["Cast", "CastLike"])


# Operators that work row by row (along the first dimension) on operands of the same rank.
_BY_ROW = frozenset(
    ["Abs", "Add", "Cast", "Div", "Erf", "Exp", "Identity", "Log", "Max", "Min", "Mul", "Neg", "Pow"]
    + ["Reciprocal", "Sqrt", "Sub", "Where"]
)
# Constants with more bytes than this are computed in slabs, a few rows at a time, if possible: in float64 they and
# their operands would take twice the memory.
_SLAB = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class ExportPlan:
    """What to write into a file: `nodes` that run, producers first, and the constants that they and the outputs
    read.
    """

    nodes: tuple[Node, ...]
    constants: tuple[Value, ...]


def plan(graph: Graph, unevaluated: AbstractSet[Value] = frozenset()) -> ExportPlan:
    """Which nodes of a graph run in the written model, and which constants it stores. `unevaluated`: ids of nodes that
    are not evaluated.
    """
    producers = graph.producers
    sizes = _Sizes(graph)
    efforts = _Efforts(graph)
    constants: dict[Value, None] = {}
    run: set[Value] = set()
    work = list(reversed(graph.outputs))
    visited: set[Value] = set()
    while work:
        value = work.pop()
        if value in visited or value == ABSENT:
            continue
        visited.add(value)
        node = producers.get(value)
        if node is None:
            if value in graph.leaves.consts and value not in graph.inputs:
                constants[value] = None
        elif (
            node.const
            and node.id not in unevaluated
            and not sizes.bloats(value)
            and efforts.can_be_afforded(value)
        ):
            constants[value] = None
        else:
            run.add(node.id)
            work.extend(reversed(node.inputs))
    return ExportPlan(tuple(n for n in graph.topological() if n.id in run), tuple(constants))


class _Sizes:
    """Compares the bytes of constant expressions in a file with the bytes of the constants from which they are
    computed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # For each large leaf constant, the bytes of all expressions computed from it that nodes read at run time.
        self.shared: dict[Value, int] = {}
        self.stored: set[Value] = set()  # leaf constants that nodes read at run time
        expressions: dict[Value, None] = {}
        for value in (*graph.outputs, *(v for n in graph.nodes() if not n.const for v in n.inputs)):
            node = graph.producers.get(value)
            if node is None:
                self.stored.add(value)
            elif node.const:
                expressions[value] = None
        for value in expressions:
            size = self._bytes(value)
            if size > SHARED:
                for leaf in _cone(graph, value)[1]:
                    self.shared[leaf] = self.shared.get(leaf, 0) + size

    def _bytes(self, value: Value) -> int:
        return self.graph.type(value).nbytes or 0

    def bloats(self, value: Value) -> bool:
        """Whether storing an expression's result takes much more bytes than storing the constants from which it is
        computed.
        """
        size = self.graph.type(value).nbytes
        if size is None:
            return True
        if size <= BLOAT or self.graph.producers[value].op in _NEVER_RUN:
            return False
        leaves = _cone(self.graph, value)[1]
        if size > GROWTH * sum(map(self._bytes, leaves)):
            return True
        if size <= SHARED:
            return False
        freed = sum(
            self._bytes(v) * min(1.0, size / self.shared.get(v, size)) for v in leaves if v not in self.stored
        )
        return size > GROWTH * freed


class _Efforts:
    """The total effort (time and memory) of evaluating constant expressions, compared with the limits."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # An upper bound: no expression is computed from more than all weights.
        self.weights = sum(const.type.nbytes or 0 for const in graph.leaves.consts.values())
        self.seconds_left = _SECONDS + _SECONDS_PER_BYTE * self.weights
        self.efforts: dict[Value, Effort] = {}

    def can_be_afforded(self, value: Value) -> bool:
        """Whether the limits allow the evaluation of an expression. If so, its time is subtracted from what is left."""
        order, leaves = _cone(self.graph, value)
        seconds = sum(self._effort(node).seconds for node in order)
        if seconds > self.seconds_left:
            return False
        leaf_bytes = sum(self.graph.type(v).nbytes or 0 for v in leaves)
        if self._room(order, value) > _ROOM + _ROOM_PER_BYTE * leaf_bytes:
            return False
        self.seconds_left -= seconds
        return True

    def _room(self, order: Sequence[Node], value: Value) -> float:
        """The most bytes in use at a time, if arrays are freed after their last use."""
        uses: dict[Value, int] = {value: 1}
        for node in order:
            for v in node.inputs:
                uses[v] = uses.get(v, 0) + 1
        in_use: dict[Value, float] = {}
        peak = 0.0
        for node in order:
            peak = max(peak, sum(in_use.values()) + self._effort(node).bytes)
            in_use.update((v, 8.0 * (self.graph.type(v).size or 0)) for v in node.outputs if uses.get(v))
            for v in node.inputs:
                uses[v] -= 1
                if not uses[v]:
                    in_use.pop(v, None)
        return peak

    def _effort(self, node: Node) -> Effort:
        effort_ = self.efforts.get(node.id)
        if effort_ is None:
            effort_ = self.efforts[node.id] = _effort(
                node.op,
                node.attrs,
                [None if v == ABSENT else self.graph.type(v) for v in node.inputs],
                node.types,
            )
        return effort_


def _effort(
    op: str, attrs: Attrs, in_types: Sequence[TensorType | None], types: Sequence[TensorType]
) -> Effort:
    return effort(op, attrs, in_types, types, by_reference=op not in SPECS)


def _cone(graph: Graph, value: Value) -> tuple[list[Node], list[Value]]:
    """The nodes that compute a constant, producers first, and the leaf constants with which they begin."""
    order: list[Node] = []
    leaves: dict[Value, None] = {}
    state: set[Value] = set()
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        at, visited = stack.pop()
        node = graph.producers.get(at)
        if node is None:
            if at != ABSENT:
                leaves[at] = None
        elif visited:
            order.append(node)
        elif node.id not in state:
            state.add(node.id)
            stack.append((at, True))
            stack.extend((v, False) for v in node.inputs)
    return order, list(leaves)


def stored_bytes(graph: Graph, export: ExportPlan) -> int:
    """The bytes of all constants of a plan."""
    return sum(graph.type(v).nbytes or 0 for v in export.constants)


def materialise(graph: Graph) -> tuple[ExportPlan, dict[Value, Const]]:
    """Evaluate the constant expressions that the graph needs, one at a time.

    Returns the plan and the computed constants. (Leaf constants, which nothing computes, are in `graph.leaves`.)
    Expressions that cannot be evaluated are left to the runtime: their nodes are among the nodes of the plan.
    """
    unevaluated: set[Value] = set()
    results: dict[Value, Const] = {}
    while True:
        export = plan(graph, unevaluated)
        computed = {v for v in export.constants if v in graph.producers}
        failed: Node | None = None
        for value in export.constants:
            if value in computed and value not in results:
                try:
                    results.update(_evaluate_value(graph, value, computed))
                except _FailedNode as failure:
                    failed = failure.node
                    break
        if failed is None:
            return export, {v: results[v] for v in export.constants if v in computed}
        # This node, and all nodes that depend on it, run in the model.
        unevaluated.update(_after(graph, failed))


class _FailedNode(Exception):
    def __init__(self, node: Node) -> None:
        super().__init__(node.op)
        self.node = node


def _after(graph: Graph, node: Node) -> Iterator[Value]:
    """The ids of a constant node and of all constant nodes that depend on it."""
    work, visited = [node], {node.id}
    while work:
        at = work.pop()
        yield at.id
        for out in at.outputs:
            for user in graph.users(out):
                if user.const and user.id not in visited:
                    visited.add(user.id)
                    work.append(user)


def _evaluate_value(graph: Graph, value: Value, computed: AbstractSet[Value]) -> dict[Value, Const]:
    if (graph.type(value).nbytes or 0) > _SLAB:
        slabs = _Slabs(graph, value)
        if slabs.possible:
            return {value: _const(slabs.evaluate(), graph.type(value))}
    order, _ = _cone(graph, value)
    uses: dict[Value, int] = {value: 1}
    for node in order:
        for v in node.inputs:
            uses[v] = uses.get(v, 0) + 1
    arrays: dict[Value, Array] = {}
    results: dict[Value, Const] = {}
    for node in order:
        inputs: list[Array | None] = []
        for v in node.inputs:
            if v == ABSENT:
                inputs.append(None)
            elif v in graph.producers:
                inputs.append(arrays[v])
            else:
                inputs.append(graph.leaves.consts[v].numpy())
        try:
            outputs = _evaluate(node.op, node.attrs, inputs, node.types)
        except NotEvaluable as error:
            raise _FailedNode(node) from error
        for v in node.inputs:
            uses[v] -= 1
            if not uses[v]:
                arrays.pop(v, None)
        for v, type, array in zip(node.outputs, node.types, outputs):
            if v in computed:
                results[v] = _const(array, type)
            if uses.get(v):
                arrays[v] = array
    return results


class _Slabs:
    """A large constant that is computed a few rows at a time.

    Operands with the rank and the number of rows of the result are cut into slabs, too. Other operands, and operators
    that do not work row by row, are evaluated as a whole, if they are small.
    """

    def __init__(self, graph: Graph, value: Value) -> None:
        self.graph = graph
        self.value = value
        self.shape = tuple(d for d in graph.type(value).shape or () if isinstance(d, int))
        self.full: dict[Value, Array] = {}
        node = graph.producers[value]
        self.possible = bool(self.shape) and self._by_row(node) and self._fits(node)

    def _by_row(self, node: Node) -> bool:
        if node.op == "Concat":
            return node.attrs.get("axis", 0) not in (0, -len(self.shape))
        if node.op == "MatMul":
            return len(self.shape) == 2 and all(self.graph.type(v).rank == 2 for v in node.inputs)
        return node.op in _BY_ROW

    def _is_cut(self, node: Node, index: int) -> bool:
        """Whether an operand is cut into the same rows as the result."""
        if node.op == "MatMul":
            return index == 0
        shape = self.graph.type(node.inputs[index]).shape
        return shape is not None and len(shape) == len(self.shape) and shape[0] == self.shape[0]

    def _fits(self, node: Node) -> bool:
        for index, v in enumerate(node.inputs):
            if v == ABSENT:
                continue
            maker = self.graph.producers.get(v)
            if self._is_cut(node, index) and (maker is None or (self._by_row(maker) and self._fits(maker))):
                continue
            if maker is not None and (self.graph.type(v).nbytes or _SLAB) >= _SLAB:
                return False
        return True

    def evaluate(self) -> Array:
        dtype = self.graph.type(self.value).dtype
        out = np.empty(self.shape, numpy_dtype(dtype))
        step = max(1, self.shape[0] * _SLAB // max(1, out.nbytes))
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            out[rows] = _rounded(self._rows(self.graph.producers[self.value], rows), dtype)
        return out

    def _rows(self, node: Node, rows: slice) -> Array:
        arguments: list[Array | None] = []
        for index, v in enumerate(node.inputs):
            if v == ABSENT:
                arguments.append(None)
                continue
            cut = self._is_cut(node, index)
            maker = self.graph.producers.get(v)
            if cut and maker is not None and self._by_row(maker) and self._fits(maker):
                arguments.append(self._rows(maker, rows))
            else:
                array = self._full(v)
                arguments.append(array[rows] if cut else array)
        try:
            return _evaluate(node.op, node.attrs, arguments, node.types)[0]
        except NotEvaluable as error:
            raise _FailedNode(node) from error

    def _full(self, value: Value) -> Array:
        if value not in self.graph.producers:
            return self.graph.leaves.consts[value].numpy()
        if value not in self.full:
            self.full[value] = _evaluate_value(self.graph, value, {value})[value].numpy()
        return self.full[value]


def _const(array: Array, type: TensorType) -> Const:
    data = _rounded(array, type.dtype)
    data = np.ascontiguousarray(data).reshape(data.shape).view()
    data.flags.writeable = False
    exact = TensorType(type.dtype, data.shape, True)
    return Const(exact, ArrayHandle(data), data if data.size <= SMALL else None)


def _rounded(array: Array, dtype: DType) -> Array:
    target = numpy_dtype(dtype)
    if array.dtype == target or dtype == DType.STRING:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(target)


def evaluate(
    op: str, attrs: Attrs, inputs: Sequence[Array | None], types: Sequence[TensorType]
) -> tuple[Array, ...]:
    """The outputs of one node, rounded to their types.

    Raises NotEvaluable, also if the evaluation would take too much time or memory.
    """
    in_types = [None if a is None else TensorType(dtype_of(a.dtype), a.shape) for a in inputs]
    work = _effort(op, attrs, in_types, types)
    if work.seconds > _SECONDS or work.bytes > _ROOM:
        raise NotEvaluable(f"{op}: it would take too much")
    outputs = _evaluate(op, attrs, inputs, types)
    return tuple(_rounded(a, t.dtype) for a, t in zip(outputs, types))


def _evaluate(
    op: str, attrs: Attrs, inputs: Sequence[Array | None], types: Sequence[TensorType]
) -> tuple[Array, ...]:
    """The outputs of one node. Floats may be float64; the caller rounds them."""
    exact = op not in _MOVES
    arguments = [promote(REALS, a) if exact and a is not None else a for a in inputs]
    try:
        outputs = evaluate_node(op, attrs, arguments, len(types))[: len(types)]
    except NotEvaluable:
        return _by_reference(op, attrs, inputs, types)
    except MISFIT as error:
        raise NotEvaluable(f"{op}: {error}") from error
    if op in _ROUNDS:
        return tuple(_rounded(a, t.dtype) for a, t in zip(outputs, types))
    return outputs


# By operator, an input that ONNX's reference implementation wrongly ignores.
_IGNORED = {"GRU": 4, "LSTM": 4, "RNN": 4}  # sequence_lens


def _by_reference(
    op: str, attrs: Attrs, inputs: Sequence[Array | None], types: Sequence[TensorType]
) -> tuple[Array, ...]:
    """The outputs of a node, computed by ONNX's reference implementation of its operator."""
    ignored = _IGNORED.get(op)
    if ignored is not None and ignored < len(inputs) and inputs[ignored] is not None:
        raise NotEvaluable(f"{op} with sequence_lens, which ONNX's reference implementation ignores")
    domain, name = split_op(op)
    names = ["" if a is None else f"i{i}" for i, a in enumerate(inputs)]
    outputs = [f"o{i}" for i in range(len(types))]
    node = onnx.helper.make_node(name, names, outputs, domain=domain)
    node.attribute.extend(attr_proto(k, v) for k, v in attrs.items())
    try:
        evaluator = ReferenceEvaluator(node, opsets={"": OPSET, domain: OPSET if not domain else 1})
        with np.errstate(all="ignore"):
            results = evaluator.run(None, {n: a for n, a in zip(names, inputs) if a is not None})
    except Exception as error:  # the reference implementation may raise anything that NumPy raises
        raise NotEvaluable(f"{op}: {error}") from error
    if not all(isinstance(a, np.ndarray | np.generic) for a in results):
        raise NotEvaluable(f"{op} does not give tensors")
    return tuple(np.asarray(a) for a in results)
