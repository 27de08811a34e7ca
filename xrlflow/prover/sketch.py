"""Sketches: small graphs on which a rule is tried.

A `Sketch` is a graph without inferred types; `build` infers them, which may fail. Many sketches are drawn for a rule.
Those that can be built and that the rule admits become its cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.ir import (
    ABSENT,
    FLOATS,
    Attr,
    Attrs,
    Body,
    Const,
    DType,
    Graph,
    Leaves,
    Node,
    TensorType,
    Value,
    mix,
    node_key,
    output_key,
)
from xrlflow.ops.infer import UNKNOWN, InferenceError, infer
from xrlflow.ops.schema import admitted, canonical_attrs, schema
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.equivalence_classes import Kind
from xrlflow.rewrite import evaluate_small

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Where a value of a sketch comes from: an input, a constant, or an output of a node, by index."""

    kind: str  # "input", "const", "node"
    index: int
    output: int = 0


@dataclass(frozen=True, slots=True)
class SketchConst:
    """A constant of a sketch. If it is `opaque`, it is not among the small constants, whose numbers all rules read. The
    proof draws its numbers, unless a rule reads them from the file.
    """

    array: Array
    dtype: DType
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class SketchNode:
    op: str
    inputs: tuple[ValueRef | None, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)
    outputs: int = 1


def _admits(declared: TensorType, full: TensorType) -> bool:
    """Whether every tensor of the type `full` has the type `declared`, too."""
    if declared.dtype != full.dtype or declared.shape is None or full.shape is None:
        return declared.dtype == full.dtype
    return len(declared.shape) == len(full.shape) and all(
        t == f or t is None or isinstance(t, str) for t, f in zip(declared.shape, full.shape)
    )


@dataclass(frozen=True, slots=True)
class Sketch:
    """A graph without inferred types. `nodes` are in topological order.

    `hidden`: the full types of inputs whose declared types are less precise, by index. `shown_kinds`: kinds that the
    sketch is known to show. `dims`: the sizes of the dimensions that a rule's declaration names. Raises ValueError if a
    hidden type contradicts the declared one.
    """

    inputs: tuple[TensorType, ...]
    consts: tuple[SketchConst, ...]
    nodes: tuple[SketchNode, ...]
    outputs: tuple[ValueRef, ...]
    hidden: Mapping[int, TensorType] = field(default_factory=dict)
    shown_kinds: frozenset[Kind] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at, full in self.hidden.items():
            if not _admits(self.inputs[at], full):
                raise ValueError(f"input {at} is {self.inputs[at]} for the graph, but {full}")

    def with_inputs(self, inputs: Iterable[TensorType]) -> Sketch:
        """The sketch with other types of inputs. The full types of those that change are dropped."""
        new = tuple(inputs)
        hidden = {at: full for at, full in self.hidden.items() if new[at] == self.inputs[at]}
        return replace(self, inputs=new, hidden=hidden)

    @property
    def varied(self) -> bool:
        """Whether the sketch can be varied. Sketches with control-flow bodies cannot."""
        return not any(isinstance(v, Body) for n in self.nodes for v in n.attrs.values())


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A built sketch: a graph with types.

    `opaque`: the constants whose numbers the proof draws, with their types. `actual`: the full types of inputs whose
    declared types are less precise. `arguments`: for each node of the sketch, the types of its inputs.
    """

    graph: Graph
    opaque: dict[Value, TensorType]
    sketch: Sketch
    actual: dict[Value, TensorType] = field(default_factory=dict)
    arguments: tuple[tuple[TensorType | None, ...], ...] = ()

    def type(self, value: Value) -> TensorType:
        """The full type of an input."""
        return self.actual.get(value) or self.graph.type(value)


@dataclass(frozen=True, slots=True)
class _DrawnHandle:
    """The data of an opaque constant. If a rule reads it after all, what it does may depend on these numbers: then the
    proof computes with them, and draws no others.
    """

    value: Value
    array: Array
    opaque: dict[Value, TensorType]

    def numpy(self) -> Array:
        self.opaque.pop(self.value, None)
        return self.array


class Unbuildable(Exception):
    """The sketch is not a valid graph: an operator does not take its inputs."""


def build(sketch: Sketch) -> Problem:
    """Infer all types of a sketch and make the graph. Raises Unbuildable."""
    leaves = Leaves()
    inputs = []
    for i, type in enumerate(sketch.inputs):
        value = mix(0x696E707574, i)
        leaves.types[value] = type
        leaves.names[value] = f"i{i}"
        inputs.append(value)
    opaque: dict[Value, TensorType] = {}
    consts = []
    for i, const in enumerate(sketch.consts):
        if const.opaque and const.dtype in FLOATS:
            type = TensorType(const.dtype, tuple(const.array.shape), True)
            value = mix(0x6F7061717565, i)
            leaves.add_const(value, Const(type, _DrawnHandle(value, const.array, opaque)))
            opaque[value] = type
        else:
            value = leaves.intern(const.array.astype(numpy_dtype(const.dtype)), const.dtype)
        consts.append(value)
    results: list[tuple[Value, ...]] = []
    types: dict[Value, TensorType] = {}
    nodes: list[Node] = []
    used: set[Value] = set()

    def find(ref: ValueRef | None) -> Value:
        if ref is None:
            return ABSENT
        if ref.kind == "input":
            return inputs[ref.index]
        return consts[ref.index] if ref.kind == "const" else results[ref.index][ref.output]

    arguments: list[tuple[TensorType | None, ...]] = []
    for sketched in sketch.nodes:
        values = tuple(map(find, sketched.inputs))
        arguments.append(tuple(None if v == ABSENT else types.get(v) or leaves.types[v] for v in values))
        outs, node = _node(sketched, values, leaves, types, used)
        if node is not None:
            nodes.append(node)
            types.update(zip(node.outputs, node.types))
            used.update(node.outputs)
        results.append(outs)
    outputs = tuple(map(find, sketch.outputs))
    graph = Graph.make(_needed(nodes, outputs), tuple(inputs), outputs, leaves)
    actual = {inputs[i]: type for i, type in sketch.hidden.items()}
    return Problem(graph, opaque, sketch, actual, tuple(arguments))


def _node(
    sketched: SketchNode,
    values: tuple[Value, ...],
    leaves: Leaves,
    types_of: dict[Value, TensorType],
    used: set[Value],
) -> tuple[tuple[Value, ...], Node | None]:
    """The outputs of a node of a sketch, and the graph's node. The node is None if it was folded to constants, as the
    importer would do.
    """
    while values and values[-1] == ABSENT:
        values = values[:-1]
    types = [None if v == ABSENT else types_of.get(v) or leaves.types[v] for v in values]
    try:
        attrs = canonical_attrs(sketched.op, sketched.attrs, types)
        _check_ranks(sketched.op, attrs, types)
        check_types(sketched.op, types)
        data = [leaves.consts.get(v) for v in values]
        out_types = infer(sketched.op, attrs, types, data, sketched.outputs)
    except (InferenceError, IndexError, ValueError, ArithmeticError) as error:  # a size may be too large
        raise Unbuildable(str(error)) from error
    if any(t is UNKNOWN for t in out_types):
        raise Unbuildable(f"{sketched.op} is not known")
    if out_types[0].const and all(v == ABSENT or v in leaves.consts for v in values):
        try:
            arrays = evaluate_small(sketched.op, attrs, data, out_types)
        except (ArithmeticError, IndexError, ValueError) as error:  # a size may be too large
            raise Unbuildable(str(error)) from error
        if arrays is not None:
            return tuple(leaves.intern(a, t.dtype) for a, t in zip(arrays, out_types)), None
    key, salt = node_key(sketched.op, attrs, values), 0
    while (outs := tuple(output_key(key, k, salt) for k in range(sketched.outputs)))[0] in used:
        salt += 1
    return outs, Node(sketched.op, values, outs, out_types, attrs)


def check_types(op: str, types: Sequence[TensorType | None]) -> None:
    """Raises Unbuildable for element types that the operator's schema does not admit. ONNX's inference does not check
    them all.
    """
    if schema(op) is None:
        return
    inputs = admitted(op)
    bound: dict[str, DType] = {}
    for i, type in enumerate(types):
        if type is None:
            continue
        takes = inputs[min(i, len(inputs) - 1)]
        if f"tensor({_onnx_name(type.dtype)})" not in takes.types:
            raise Unbuildable(f"{op} does not take {type.dtype.name}")
        if takes.alike and bound.setdefault(takes.name, type.dtype) != type.dtype:
            raise Unbuildable(f"{op}: the element types differ")


# Two sets of attributes: with one number for each dimension of the first input, and for each of its spatial dimensions.
_PER_DIMENSION = ("perm",)
_PER_SPATIAL = ("strides", "dilations", "kernel_shape", "output_padding")


def _check_ranks(op: str, attrs: Attrs, types: Sequence[TensorType | None]) -> None:
    """Raises Unbuildable for attributes of a wrong length or too much padding. ONNX's inference does not check them."""
    rank = types[0].rank if types and types[0] is not None else None
    if rank is None:
        return
    if not attrs:
        return
    expected = {**dict.fromkeys(_PER_DIMENSION, rank), **dict.fromkeys(_PER_SPATIAL, rank - 2)}
    if op in ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"):
        expected["pads"] = 2 * (rank - 2)
    for name, count in expected.items():
        value = attrs.get(name)
        if isinstance(value, tuple) and len(value) != count:
            raise Unbuildable(f"{op}: {name} has {len(value)} numbers")
    pads, kernel = attrs.get("pads"), attrs.get("kernel_shape")
    pools = op.endswith("Pool") and isinstance(pads, tuple) and isinstance(kernel, tuple)
    if pools and any(p >= k for p, k in zip(pads, kernel * 2)):  # type: ignore
        raise Unbuildable(f"{op}: a window may lie in the padding")  # runtimes refuse such windows


def _onnx_name(dtype: DType) -> str:
    return dtype.name.lower() if dtype != DType.BFLOAT16 else "bfloat16"


def _needed(nodes: list[Node], outputs: tuple[Value, ...]) -> list[Node]:
    """The nodes on which the outputs depend."""
    required = set(outputs)
    needed = []
    for node in reversed(nodes):
        if not required.isdisjoint(node.outputs):
            required.update(node.inputs)
            needed.append(node)
    return needed[::-1]


def sketch_of(graph: Graph) -> Sketch:
    """The sketch of a graph."""
    refs: dict[Value, ValueRef] = {v: ValueRef("input", i) for i, v in enumerate(graph.inputs)}
    consts: list[SketchConst] = []
    nodes: list[SketchNode] = []

    def ref_of(value: Value) -> ValueRef | None:
        if value == ABSENT:
            return None
        if value not in refs:
            const = graph.leaves.consts[value]
            refs[value] = ValueRef("const", len(consts))
            consts.append(SketchConst(np.asarray(const.numpy()), const.type.dtype))
        return refs[value]

    for node in graph.topological():
        inputs = tuple(ref_of(v) for v in node.inputs)
        for k, out in enumerate(node.outputs):
            refs[out] = ValueRef("node", len(nodes), k)
        nodes.append(SketchNode(node.op, inputs, dict(node.attrs), len(node.outputs)))
    outputs = tuple(p for v in graph.outputs if (p := ref_of(v)) is not None)
    return Sketch(tuple(graph.type(v) for v in graph.inputs), tuple(consts), tuple(nodes), outputs)


def with_node(sketch: Sketch, index: int, **changes: Any) -> Sketch:
    nodes = list(sketch.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(sketch, nodes=tuple(nodes))


def with_const(sketch: Sketch, index: int, **changes: Any) -> Sketch:
    consts = list(sketch.consts)
    consts[index] = replace(consts[index], **changes)
    return replace(sketch, consts=tuple(consts))
