"""Draws larger graphs: a graph that is already there, with operators added behind an output or before an input.

Whether rules about data movement (chains of Reshape, Transpose, Slice, Split, Concat and so on) apply depends on many
numbers at once, which the examples alone do not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from xrlflow.ir import FLOATS, Attr, DType, TensorType
from xrlflow.prover.draw import Draw
from xrlflow.prover.sketch import Problem, Sketch, SketchConst, SketchNode, Unbuildable, ValueRef, build

_MOST_ELEMENTS = 4096
_UNARY = ("Relu", "Neg", "Tanh", "Identity", "Exp", "Softmax")


@dataclass(slots=True)
class _Growing:
    """A sketch to which nodes are being added."""

    inputs: list[TensorType]
    consts: list[SketchConst]
    nodes: list[SketchNode]

    def const(self, numbers: Any, dtype: DType = DType.INT64) -> ValueRef:
        array = np.asarray(numbers, np.int64 if dtype == DType.INT64 else np.float32)
        self.consts.append(SketchConst(array, dtype))
        return ValueRef("const", len(self.consts) - 1)

    def node(self, op: str, *inputs: ValueRef | None, outputs: int = 1, **attrs: Attr) -> ValueRef:
        self.nodes.append(SketchNode(op, inputs, attrs, outputs))
        return ValueRef("node", len(self.nodes) - 1)


Shape = tuple[int, ...]
# A function that adds an operator which reads a value of a given shape.
Step = Callable[[_Growing, ValueRef, Shape, Draw], ValueRef]


def grown(problems: Sequence[Problem], draw: Draw) -> Iterator[Problem]:
    """Graphs made from one of `problems` by adding one to three operators, practically without end."""
    misses = 0
    while problems and misses < 1000:
        problem = draw.choice(problems)
        try:
            for _ in range(draw.choice([1, 1, 2, 3])):
                sketch = _before(problem, draw) if draw.chance(0.3) else _behind(problem, draw)
                problem = build(sketch)
        except (Unbuildable, IndexError, ValueError):  # the drawn operator cannot read this shape
            misses += 1
            continue
        yield problem


def _behind(problem: Problem, draw: Draw) -> Sketch:
    sketch = problem.sketch
    at = draw.integer(0, len(sketch.outputs) - 1)
    type = problem.graph.type(problem.graph.outputs[at])
    growing = _Growing(list(sketch.inputs), list(sketch.consts), list(sketch.nodes))
    last = draw.choice(_STEPS)(growing, sketch.outputs[at], _sizes(type), draw)
    outputs = list(sketch.outputs)
    if draw.chance(0.8):
        outputs[at] = last
    else:
        outputs.append(last)
    return replace(
        sketch,
        inputs=tuple(growing.inputs),
        consts=tuple(growing.consts),
        nodes=tuple(growing.nodes),
        outputs=tuple(outputs),
        shown_kinds=frozenset(),
        dims={},
    )


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of a sketch that a new operator is to compute. `sizes`: its shape; `axis`: the operator's axis."""

    growing: _Growing
    ref: ValueRef
    dtype: DType
    sizes: Shape
    axis: int

    @property
    def size(self) -> int:
        """The input's size along the axis."""
        return self.sizes[self.axis]

    def becomes(self, *dims: int) -> None:
        """Give the input another shape, from which the new operator computes the old one."""
        self.growing.inputs[self.ref.index] = TensorType(self.dtype, dims)

    def with_axis(self, *size: int) -> Shape:
        """The shape with another size along the axis, or without the axis."""
        return (*self.sizes[: self.axis], *size, *self.sizes[self.axis + 1 :])

    def node(self, op: str, *numbers: Sequence[int], outputs: int = 1, **attrs: Attr) -> ValueRef:
        """Add an operator that reads the input and constant numbers. Returns its first output."""
        consts = [self.growing.const(n) for n in numbers]
        return self.growing.node(op, self.ref, *consts, outputs=outputs, **attrs)


# A function that adds an operator behind a changed input. The operator's output has the input's old shape.
Maker = Callable[[_Input, Draw], ValueRef]


def _by_transpose(x: _Input, draw: Draw) -> ValueRef:
    perm = draw.permutation(len(x.sizes))
    x.becomes(*(x.sizes[perm.index(i)] for i in range(len(x.sizes))))
    return x.node("Transpose", perm=perm)


def _by_reshape(x: _Input, draw: Draw) -> ValueRef:
    x.becomes(*_reshaped(x.sizes, draw))
    return x.node("Reshape", x.sizes)


def _by_slice(x: _Input, draw: Draw) -> ValueRef:
    start, more = draw.integer(0, 2), draw.integer(0, 2)
    x.becomes(*x.with_axis(start + x.size + more))
    return x.node("Slice", [start], [start + x.size], [x.axis])


def _by_unsqueeze(x: _Input, draw: Draw) -> ValueRef:
    if x.size != 1:
        return _by_relu(x, draw)
    x.becomes(*x.with_axis())
    return x.node("Unsqueeze", [x.axis])


def _by_concat(x: _Input, draw: Draw) -> ValueRef:
    if x.size <= 1:
        return _by_relu(x, draw)
    part = draw.integer(1, x.size - 1)
    x.becomes(*x.with_axis(part))
    inputs = x.growing.inputs
    inputs.append(TensorType(x.dtype, x.with_axis(x.size - part)))
    return x.growing.node("Concat", x.ref, ValueRef("input", len(inputs) - 1), axis=x.axis)


def _by_split(x: _Input, draw: Draw) -> ValueRef:
    remainder = draw.integer(1, 3)
    x.becomes(*x.with_axis(x.size + remainder))
    return x.node("Split", [x.size, remainder], axis=x.axis, outputs=2)


def _by_relu(x: _Input, draw: Draw) -> ValueRef:
    return x.node("Relu")


_MAKERS: tuple[Maker, ...] = (
    _by_transpose,
    _by_reshape,
    _by_slice,
    _by_unsqueeze,
    _by_concat,
    _by_split,
    _by_relu,
)


def _before(problem: Problem, draw: Draw) -> Sketch:
    """Add an operator before an input. The input gets another shape, from which the operator computes the old shape."""
    sketch = problem.sketch
    at = draw.integer(0, len(sketch.inputs) - 1)
    type = sketch.inputs[at]
    shape = type.shape
    if not shape or at in sketch.hidden or not all(isinstance(d, int) for d in shape):
        raise Unbuildable("the shape is not known")
    sizes = _sizes(type)
    growing = _Growing(list(sketch.inputs), list(sketch.consts), [])
    make = draw.choice(_MAKERS)
    ref = ValueRef("input", at)
    new = make(_Input(growing, ref, type.dtype, sizes, draw.integer(0, len(sizes) - 1)), draw)

    def shifted(old: ValueRef | None) -> ValueRef | None:
        if old == ref:
            return new
        shifts = old is not None and old.kind == "node"
        return replace(old, index=old.index + len(growing.nodes)) if shifts and old is not None else old

    nodes = [*growing.nodes, *(replace(n, inputs=tuple(map(shifted, n.inputs))) for n in sketch.nodes)]
    outputs = tuple(p for o in sketch.outputs if (p := shifted(o)) is not None)
    return replace(
        sketch,
        inputs=tuple(growing.inputs),
        consts=tuple(growing.consts),
        nodes=tuple(nodes),
        outputs=outputs,
        shown_kinds=frozenset(),
        dims={},
    )


def _sizes(type: TensorType) -> Shape:
    """The shape, with 2 for symbols. Raises Unbuildable for an unknown rank, a large tensor, or a type that is no
    float.
    """
    if type.shape is None or type.dtype not in FLOATS:
        raise Unbuildable("nothing is known of it")
    sizes = tuple(d if isinstance(d, int) else 2 for d in type.shape)
    if prod(sizes) > _MOST_ELEMENTS:
        raise Unbuildable("it is large")
    return sizes


def _reshaped(sizes: Shape, draw: Draw) -> Shape:
    """Another shape with the same number of elements."""
    kind = draw.integer(0, 3)
    at = draw.integer(0, len(sizes) - 1)
    if kind == 0 and len(sizes) > 1:
        at = draw.integer(0, len(sizes) - 2)
        return (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :])
    if kind == 1:
        factors = [f for f in range(1, sizes[at] + 1) if sizes[at] % f == 0] or [1]
        factor = draw.choice(factors)
        return (*sizes[:at], factor, sizes[at] // factor, *sizes[at + 1 :])
    if kind == 2:
        return tuple(s for s in sizes if s != 1)
    return sizes[::-1] if draw.chance(0.5) else (prod(sizes),)


def _transpose(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("Transpose", x, perm=draw.permutation(len(sizes)))


def _reshape(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    numbers = list(_reshaped(sizes, draw))
    if numbers and draw.chance(0.3):
        numbers[draw.integer(0, len(numbers) - 1)] = -1
    if numbers[:1] == list(sizes[:1]) and draw.chance(0.3):
        numbers[0] = 0
    return g.node("Reshape", x, g.const(numbers))


def _unsqueeze(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("Unsqueeze", x, g.const([draw.integer(-len(sizes) - 1, len(sizes))]))


def _squeeze(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("Squeeze", x, g.const([draw.choice([i for i, s in enumerate(sizes) if s == 1])]))


def _slice(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    axis = draw.integer(0, len(sizes) - 1)
    size, step = sizes[axis], draw.choice([1, 1, 1, 2, 3, -1, -2])
    start, end = draw.integer(-size, size), draw.integer(-size, size + 1)
    if draw.chance(0.2):
        end = 2**63 - 1 if step > 0 else -(2**63) + 1
    return g.node("Slice", x, g.const([start]), g.const([end]), g.const([axis]), g.const([step]))


def _split(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    axis = draw.choice([i for i, s in enumerate(sizes) if s > 1])
    parts = [draw.integer(1, sizes[axis] - 1)]
    parts.append(sizes[axis] - parts[0])
    first = g.node("Split", x, g.const(parts), axis=axis, outputs=2)
    second = replace(first, output=1)
    kind = draw.integer(0, 3)
    if kind == 0:
        return second
    if kind == 1:
        second = g.node("Relu", second)
    a, b = (second, first) if draw.chance(0.4) else (first, second)
    return g.node("Concat", a, b, axis=axis)


def _concat(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    axis = draw.integer(0, len(sizes) - 1)
    partner = x if draw.chance(0.4) else g.node("Neg", x)
    return g.node("Concat", *((x, partner) if draw.chance(0.5) else (partner, x)), axis=axis)


def _expand(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    target = [draw.integer(1, 3) if s == 1 else draw.choice([s, 1]) for s in sizes]
    if draw.chance(0.4):
        target = [draw.integer(1, 2), *target]
    return g.node("Expand", x, g.const(target))


def _tile(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("Tile", x, g.const([draw.choice([1, 1, 2]) for _ in sizes]))


def _pad(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("Pad", x, g.const([draw.choice([0, 0, 1, 2, -1]) for _ in range(2 * len(sizes))]))


def _gather(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    axis = draw.integer(0, len(sizes) - 1)
    size = sizes[axis]
    kind = draw.integer(0, 3)
    indices: Any = [draw.integer(-size, size - 1) for _ in range(draw.integer(1, 3))]
    if kind == 0:
        indices = list(range(size))[draw.integer(0, 1) :]
    elif kind == 1:
        indices = draw.permutation(size)
    elif kind == 2:
        indices = indices[0]
    return g.node("Gather", x, g.const(indices), axis=axis)


def _blocks(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    op = draw.choice(["DepthToSpace", "SpaceToDepth"])
    if op == "SpaceToDepth":
        return g.node(op, x, blocksize=2)
    return g.node(op, x, blocksize=2, mode=draw.choice(["DCR", "CRD"]))


def _unary(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node(draw.choice(_UNARY), x)


def _binary(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    shape = tuple(1 if draw.chance(0.5) else s for s in sizes[draw.integer(0, len(sizes)) :])
    operand = g.const(draw.eighths(shape), DType.FLOAT) if draw.chance(0.8) else x
    pair = (x, operand) if draw.chance(0.6) else (operand, x)
    return g.node(draw.choice(["Add", "Mul", "Sub", "Div"]), *pair)


def _reduce(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    axes = g.const([draw.axis(len(sizes))])
    return g.node(draw.choice(["ReduceSum", "ReduceMean", "ReduceMax"]), x, axes, keepdims=draw.integer(0, 1))


def _product(g: _Growing, x: ValueRef, sizes: Shape, draw: Draw) -> ValueRef:
    return g.node("MatMul", x, g.const(draw.eighths((sizes[-1], draw.integer(1, 3))), DType.FLOAT))


_STEPS: tuple[Step, ...] = (
    *(_transpose, _transpose, _reshape, _reshape, _unsqueeze, _squeeze, _slice, _slice, _split, _concat),
    *(_expand, _tile, _pad, _gather, _blocks, _unary, _binary, _reduce, _product),
)
