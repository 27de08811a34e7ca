"""Operators of float16 computed in float32, for processors without arithmetic of float16.

There ONNX Runtime has hardly any kernel for float16. It puts Casts around each operator, which keep it from fusing the
operator with others, and it computes Softmax and Gelu by their definitions. The Casts of these rules are at the border
of a region alone. Constants stay float16 in the file, and the runtime casts them once, when it loads the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, Attrs, DType, Node, TensorType, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val

# Operators whose float results have the type of their float operands. None of them jumps: where an operand is off by a
# rounding, so is the result. (Floor, ArgMax, TopK or Equal would see whether an operand was rounded to float16.)
_SMOOTH = """
Abs Acos Acosh Add Asin Asinh Atan Atanh AveragePool BatchNormalization Celu Clip Conv ConvTranspose Cos Cosh CumSum Div
Einsum Elu Erf Exp Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish
InstanceNormalization LRN LayerNormalization LeakyRelu Log LogSoftmax LpNormalization MatMul Max MaxPool Mean Min Mish
Mul Neg PRelu Pow RMSNormalization Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Resize Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Sub Sum
Tan Tanh
"""
# Operators that move elements. ONNX Runtime moves them in float16.
_MOVING = """
Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape ReverseSequence Slice
SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Where
"""
_MOVES = frozenset(_MOVING.split())
_OPERATORS = (*_SMOOTH.split(), *_MOVING.split())
_WIDENED = frozenset(_OPERATORS)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node to compute in float32. `operands`: places in the list of all values, inputs first; None: absent."""

    op: str
    attrs: Attrs
    operands: tuple[int | None, ...]
    types: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The nodes to compute, producers first, and for each output its place and whether it is float16."""

    steps: tuple[_Step, ...]
    results: tuple[tuple[int, bool], ...]


def _widened(reader: Reader, node: Node) -> bool:
    """Whether a node computes float16 from float16 (not from constants alone) as one of these operators."""
    if node.op not in _WIDENED or any(t.dtype != DType.FLOAT16 for t in node.types):
        return False
    if any(_in_body(reader, v) for v in node.outputs):
        return False
    halves = [v for v in node.inputs if v != ABSENT and reader.type(v).dtype == DType.FLOAT16]
    # A table of which rows are taken would take twice the memory.
    return any(not reader.is_const(v) for v in (halves[:1] if node.op in _MOVES else halves))


def _in_body(reader: Reader, value: Value) -> bool:
    """Whether a body of control flow reads the value. If later rules leave only the two Casts in front of a body, ONNX
    Runtime drops them, and the body reads nothing.
    """
    return any(n.captured and value in n.inputs[len(n.explicit_inputs) :] for n in reader.users(value))


def _before_rounding(reader: Reader, value: Value) -> tuple[Value, Node | None]:
    """The float32 value that was rounded to this float16 value, and its Cast; or the value itself."""
    cast = reader.producer(value)
    if cast is None or cast.op != "Cast" or cast.const or reader.type(value).dtype != DType.FLOAT16:
        return value, None
    return (cast.inputs[0], cast) if reader.type(cast.inputs[0]).dtype == DType.FLOAT else (value, None)


def _region(reader: Reader, members: Sequence[Node]) -> Region:
    """These nodes, producers first, with the Casts of what they read from float32 and of what is read in float32."""
    made = {v for n in members for v in n.outputs}
    nodes, places = list(members), dict[Value, int]()
    sources = dict[Value, int]()
    for value in dict.fromkeys(v for n in members for v in n.inputs if v != ABSENT and v not in made):
        source, cast = _before_rounding(reader, value)
        places[value] = sources.setdefault(source, len(sources))
        if cast is not None and cast not in nodes:
            nodes.append(cast)
    ids = {n.id for n in members}
    steps, results, outputs = list[_Step](), list[tuple[int, bool]](), list[Value]()
    count = len(sources)
    for node in members:
        operands = tuple(None if v == ABSENT else places[v] for v in node.inputs)
        types = tuple(TensorType(DType.FLOAT, t.shape, t.const) for t in node.types)
        steps.append(_Step(node.op, node.attrs, operands, types))
        for value in node.outputs:
            places[value] = count
            readers = [n for n in reader.users(value) if n.id not in ids]
            casts = [n for n in readers if n.op == "Cast" and n.types[0].dtype == DType.FLOAT]
            if len(casts) < len(readers) or reader.is_output(value):
                outputs.append(value)
                results.append((count, True))
            outputs += [n.outputs[0] for n in casts]
            results += [(count, False)] * len(casts)
            nodes += casts
            count += 1
    return Region(tuple(outputs), tuple(sources), tuple(nodes), _Plan(tuple(steps), tuple(results)))


class _InFloat32(RegionRule, family="precision"):
    """A rule that computes nodes of float16 in float32."""

    backend = "onnxruntime"
    # The proof does not see whether a later node jumps where its operand loses a rounding, or leaves its domain there
    # (docs/decisions/proving/float16.md).
    assumes = "approximate"
    rounds_once = True
    may_remove_nonfinite = True  # a number beyond 65,504 in between stays one
    anchors = _OPERATORS

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        values = [op.Cast(v, to=int(DType.FLOAT)) if v.dtype == DType.FLOAT16 else v for v in inputs]
        for step in region.data.steps:
            operands = [None if i is None else values[i] for i in step.operands]
            made = op[step.op](*operands, attrs=step.attrs, declared=step.types)
            values += [made] if len(step.types) == 1 else made
        return [
            op.Cast(values[i], to=int(DType.FLOAT16)) if half else values[i]
            for i, half in region.data.results
        ]


class ComputeInFloat32(_InFloat32):
    """f(x) -> cast16(f(cast32(x)))  of float16, without the Casts that a float32 neighbour makes superfluous.

    Where x is cast16(a), the right side reads a; where cast32(f(x)) is read, it is f itself. So a border moves over an
    operator, and two regions meet.
    """

    examples = graphs(
        "(float16[N,3] x) => (float16[N,3] y) { y = Relu(x) }",
        "(float[N,3] a, float16[3] b) => (float16[N,3] y) { x = Cast<to=10>(a) y = Add(x, b) }",
        "(float16[N,3] x) => (float[N,3] z) { y = Sigmoid(x) z = Cast<to=1>(y) }",
        "(float[N,3] a) => (float[N,3] z, float16[N,3] y) { x = Cast<to=10>(a) y = Mul(x, x) z = Cast<to=1>(y) }",
        "(float16[N,3] x, float16[3,2] w) => (float16[N,2] y) { y = MatMul(x, w) }",
        "(float16[1,2,5,5] x, float16[3,2,3,3] w, float16[3] b) => (float16[1,3,3,3] y) { y = Conv(x, w, b) }",
        "(float16[N,4] x) => (float16[N,4] y) { y = Softmax<axis=1>(x) }",
        "(float16[N,4] x, float16[4] s) => (float16[N,4] y) { y = LayerNormalization<axis=1>(x, s) }",
        "(float[N,3] a, float16[N,2] b) => (float16[N,5] y) { x = Cast<to=10>(a) y = Concat<axis=1>(x, b) }",
        "(float16[N,4] x) => (float[N,2] z, float16[N,2] b) { a, b = Split<axis=1>(x, [2, 2]) z = Cast<to=1>(a) }",
        "(float[N,3] a, bool[N,3] c, float16[3] b) => (y) { x = Cast<to=10>(a) y = Where(c, x, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        return _region(reader, [node]) if _widened(reader, node) else None


class ComputeRegionInFloat32(_InFloat32):
    """g(f(x), ...) -> cast16(g(f(cast32(x)), ...))  for all neighbouring operators of float16.

    The single steps lead through graphs that are no faster: ONNX Runtime casts there, too.
    """

    composite_of = ("ComputeInFloat32",)
    unpriced = True
    examples = graphs(
        "(float16[N,3] x) => (float16[N,3] z) { y = Relu(x) z = Neg(y) }",
        "(float[N,3] a, float16[3] b) => (float[N,3] z, float16[N,3] w) { x = Cast<to=10>(a) y = Add(x, b) "
        "w = Exp(x) v = Mul(y, w) z = Cast<to=1>(v) }",
        "(float16[1,2,5,5] x, float16[3,2,3,3] w) => (z) { y = Conv(x, w) z = Relu(y) }",
        "(float16[N,4] x) => (z) { y = Softmax<axis=1>(x) z = Transpose<perm=[1,0]>(y) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not _widened(reader, node) or not _begins(reader, node):
            return None
        members = _neighbours(reader, node)
        firsts = [n for n in members if _begins(reader, n)]
        if len(members) == 1 or min(n.id for n in firsts) != node.id:
            return None
        return _region(reader, members)


def _begins(reader: Reader, node: Node) -> bool:
    """Whether no operand of a node is computed by a node that could be computed in float32 as well."""
    return not any(_widened(reader, n) for v in node.inputs if v != ABSENT and (n := reader.producer(v)))


def _neighbours(reader: Reader, first: Node) -> list[Node]:
    """All nodes that a chain of float16 connects with the first one, producers first."""
    found: dict[Value, Node] = {first.id: first}
    pending = [first]
    while pending:
        node = pending.pop()
        around = [n for v in node.inputs if v != ABSENT and (n := reader.producer(v))]
        around += [n for v in node.outputs for n in reader.users(v)]
        for other in around:
            if other.id not in found and _widened(reader, other):
                found[other.id] = other
                pending.append(other)
    sources = {
        n.id: [p.id for v in n.inputs if v != ABSENT and (p := reader.producer(v)) and p.id in found]
        for n in found.values()
    }
    return [found[value] for value in TopologicalSorter(sources).static_order()]
