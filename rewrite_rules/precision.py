"""Operators of float16 computed in float32, for processors without arithmetic of float16.

There ONNX Runtime has hardly any kernel for float16. It puts Casts around each operator, which keep it from fusing the
operator with others, and it computes Softmax and Gelu by their definitions. The Casts of these rules are at the border
of a region alone. Constants stay float16 in the file, and the runtime casts them once, when it loads the model.

A value keeps its rounding to float16, for all who read it, unless all of them are in the region and change little where
it changes little (`ops.continuity`). Where the value stays in the region, two Casts round it: ONNX Runtime leaves out a
pair of Casts only where it has put in one of them itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, FLOATS, Attrs, DType, Node, TensorType, Value
from xrlflow.ops.continuity import CONTINUOUS, JUMPING, MOVING, keeps_rounding
from xrlflow.ops.schema import canonical_attrs
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val

_OPERATORS = tuple(sorted(CONTINUOUS | JUMPING))
_WIDENED = CONTINUOUS | JUMPING
_SINGLE = int(DType.FLOAT)
# Operators that read no number.
_BLIND = frozenset({"Shape", "Size"})


@dataclass(frozen=True, slots=True)
class _Step:
    """A node to compute in float32. `operands`: places in the list of all values, inputs first; None: absent."""

    op: str
    attrs: Attrs
    operands: tuple[int | None, ...]
    types: tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The nodes to compute, producers first, and the places of the outputs."""

    steps: tuple[_Step, ...]
    results: tuple[int, ...]


def _is_half(type: TensorType) -> bool:
    return type.dtype == DType.FLOAT16


def _widened(reader: Reader, node: Node) -> bool:
    """Whether a node computes float16 (not from constants alone), and is one of these operators."""
    if node.op not in _WIDENED:
        return False
    halves = [v for v in node.inputs if v != ABSENT and _is_half(reader.type(v))]
    if all(reader.is_const(v) for v in halves):  # a table of which rows are taken would take twice the memory
        return False
    return all(_is_half(t) for t in node.types if t.dtype in FLOATS) and all(
        user.op == "Cast" or user.op in _WIDENED or user.op in _BLIND
        for v in node.outputs
        for user in reader.users(v)
    )


def _misleads(reader: Reader, node: Node, ids: set[Value]) -> bool:
    """Whether a reader outside of these nodes would see numbers of a node that were not rounded. In front of an
    operator of float16 that it computes in float32, ONNX Runtime leaves out a Cast to float16; and in front of a body
    of control flow a Cast and its inverse.
    """
    return any(
        v == value and keeps_rounding(reader, user, i)
        for value in node.outputs
        for user in reader.users(value)
        if user.id not in ids and user.op != "Cast" and user.op not in _BLIND and user.op not in MOVING
        for i, v in enumerate(user.inputs)
    )


@dataclass(slots=True)
class _Builder:
    """The region of some nodes, as it is put together. `places`: of each value that is read in float32."""

    reader: Reader
    members: dict[Value, Node]
    nodes: list[Node]
    sources: dict[Value, int]
    places: dict[Value, int]
    steps: list[_Step]
    count: int = 0

    def keeps(self, value: Value) -> bool:
        """Whether a value must be rounded to float16: someone outside reads it, or an operator that jumps does."""
        return self.is_read_outside(value) or any(
            v == value and keeps_rounding(self.reader, user, i)
            for user in self.reader.users(value)
            if user.id in self.members
            for i, v in enumerate(user.inputs)
        )

    def is_read_outside(self, value: Value) -> bool:
        return self.reader.is_output(value) or any(
            user.id not in self.members and not self.is_last(user) for user in self.reader.users(value)
        )

    def is_last(self, user: Node) -> bool:
        """Whether a node is a Cast to float32, of which nothing is computed."""
        return (
            user.op == "Cast"
            and user.types[0].dtype == DType.FLOAT
            and not self.reader.count_users(user.outputs[0])
        )

    def read(self, value: Value) -> None:
        """Make a value from outside an input: what was rounded to it, if nobody needs the rounding."""
        cast = self.reader.producer(value)
        source = value
        if (
            cast is not None
            and cast.op == "Cast"
            and not cast.const
            and _is_half(cast.types[0])
            and self.reader.type(cast.inputs[0]).dtype == DType.FLOAT
            and not self.keeps(value)
            and not any(map(self.is_last, self.reader.users(value)))
        ):
            source = cast.inputs[0]
            self.nodes.append(cast)
        self.places[value] = self.sources.setdefault(source, len(self.sources))

    def step(self, op: str, attrs: Attrs, operands: Iterable[int | None], types: Iterable[TensorType]) -> int:
        """Add a node; return the place of its first result."""
        made = _Step(op, attrs, tuple(operands), tuple(types))
        self.steps.append(made)
        place, self.count = self.count, self.count + len(made.types)
        return place

    def cast(self, place: int, type: TensorType, to: DType) -> int:
        attrs = canonical_attrs("Cast", {"to": int(to)}, [type])
        return self.step("Cast", attrs, [place], [TensorType(to, type.shape, type.const)])


def _region(reader: Reader, members: list[Node]) -> Region:
    """These nodes, producers first, with the Casts that round what they read, where that is left out."""
    made = {v for n in members for v in n.outputs}
    plan = _Builder(reader, {n.id: n for n in members}, list(members), {}, {}, [])
    for value in dict.fromkeys(v for n in members for v in n.inputs if v != ABSENT and v not in made):
        plan.read(value)
    plan.count = len(plan.sources)
    outputs = dict[Value, int]()
    for node in members:
        operands = [None if v == ABSENT else plan.places[v] for v in node.inputs]
        wide = [TensorType(DType.FLOAT, t.shape, t.const) if _is_half(t) else t for t in node.types]
        first = plan.step(node.op, node.attrs, operands, wide)
        for place, (value, half, type) in enumerate(zip(node.outputs, node.types, wide), first):
            result = place
            if _is_half(half) and plan.keeps(value):
                result = plan.cast(place, type, DType.FLOAT16)
                place = plan.cast(result, half, DType.FLOAT)
            plan.places[value] = place
            if plan.is_read_outside(value):
                outputs[value] = result
            for cast in filter(plan.is_last, reader.users(value)):
                outputs[cast.outputs[0]] = place
                plan.nodes.append(cast)
    return Region(
        tuple(outputs),
        tuple(plan.sources),
        tuple(plan.nodes),
        _Plan(tuple(plan.steps), tuple(outputs.values())),
    )


class _InFloat32(RegionRule, family="precision"):
    """A rule that computes nodes of float16 in float32."""

    backend = "onnxruntime"
    rounds_once = True
    may_remove_nonfinite = True  # a number beyond 65,504 in between stays one
    anchors = _OPERATORS

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        values = [op.Cast(v, to=_SINGLE) if v.dtype == DType.FLOAT16 else v for v in inputs]
        for step in region.data.steps:
            operands = [None if i is None else values[i] for i in step.operands]
            made = op[step.op](*operands, attrs=step.attrs, declared=step.types)
            values += [made] if len(step.types) == 1 else made
        return [values[i] for i in region.data.results]


class ComputeInFloat32(_InFloat32):
    """f(x) -> cast16(f(cast32(x)))  of float16.

    Where x is cast16(a) of float32, and f alone reads x, the right side reads a: a border moves over an operator, and
    two regions meet.
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
        "(float[N,3] a) => (float16[N,3] y) { x = Cast<to=10>(a) y = Floor(x) }",
        "(float[N,3] a) => (float[N,3] z, float16[N,3] y) { x = Cast<to=10>(a) z = Cast<to=1>(x) y = Neg(x) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not _widened(reader, node) or _misleads(reader, node, {node.id}):
            return None
        return _region(reader, [node])


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
        "(float16[N,4] x) => (z) { y = Softmax<axis=1>(x) w = Transpose<perm=[1,0]>(y) z = Exp(w) }",
        "(float16[N,4] x) => (z) { y = Mul(x, x) r = Sqrt(y) z = Neg(r) }",
        "(float16[N,4] x) => (z, b) { y = Exp(x) f = Floor(y) z = Sub(y, f) c = Sigmoid(y) b = Less(c, y) }",
        "(float[N,4] a) => (z) { x = Cast<to=10>(a) y = Exp(x) w = Neg(x) v = Add(y, w) z = Cast<to=1>(v) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not _widened(reader, node) or not _begins(reader, node):
            return None
        members = _neighbours(reader, node)
        firsts = [n.id for n in members if _begins(reader, n)]
        return _region(reader, members) if len(members) > 1 and node.id == min(firsts, default=None) else None


def _producers(reader: Reader, node: Node, ids: set[Value]) -> list[Value]:
    """Which of these nodes compute what a node reads."""
    producers = (reader.producer(v) for v in node.inputs if v != ABSENT)
    return [p.id for p in producers if p is not None and p.id in ids]


def _begins(reader: Reader, node: Node) -> bool:
    """Whether a region begins with a node: it computes something, and of what it reads nothing is computed by a node
    that could be computed in float32 as well (but for some that move elements).
    """
    if node.op in MOVING:
        return False
    pending = list(node.inputs)
    while pending:
        value = pending.pop()
        producer = reader.producer(value) if value != ABSENT else None
        if producer is not None and _widened(reader, producer):
            if producer.op not in MOVING:
                return False
            pending += producer.inputs
    return True


def _neighbours(reader: Reader, first: Node) -> list[Node]:
    """All nodes that a chain of float16 connects with the first one, producers first. Empty if the region begins with
    another node, too, which has a smaller number: it is found from there.
    """
    found: dict[Value, Node] = {first.id: first}
    pending = [first]
    while pending:
        for other in _around(reader, pending.pop()):
            if other.id not in found and _widened(reader, other):
                if other.id < first.id and _begins(reader, other):
                    return []
                found[other.id] = other
                pending.append(other)
    ids = set(found)
    sources = {n.id: _producers(reader, n, ids) for n in found.values()}
    order = [found[value] for value in TopologicalSorter(sources).static_order()]
    while dropped := {n.id for n in order if n.id in ids and _stays(reader, n, ids)}:
        ids -= dropped
    return [n for n in order if n.id in ids]


def _stays(reader: Reader, node: Node, ids: set[Value]) -> bool:
    """Whether one of these nodes should stay one of float16: it moves elements for others alone, and float16 takes half
    of the time, or somebody else would see what was not rounded.
    """
    moves = node.op in MOVING and not any(u.id in ids for v in node.outputs for u in reader.users(v))
    return moves or _misleads(reader, node, ids)


def _around(reader: Reader, node: Node) -> list[Node]:
    """The producers and readers of a node's values, and what else reads the same Casts."""
    around = list[Node]()
    for value in node.inputs:
        if value != ABSENT and (producer := reader.producer(value)):
            around += reader.users(value) if producer.op == "Cast" and not producer.const else [producer]
    return around + [n for v in node.outputs for n in reader.users(v)]
