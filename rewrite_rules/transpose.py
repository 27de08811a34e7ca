"""Rules for transposes: they cancel them, merge them, or move them to where they cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewrite_rules.access import AccessMap
from rewrite_rules.axes import (
    compose,
    data_inputs,
    ints_input,
    inverse,
    is_identity,
    keeps_axes,
    own_axes,
    perm_of,
    permutation,
    rank_of,
    reshape_numbers,
)
from rewrite_rules.elementwise import made_by, read_once
from rewrite_rules.examples import graphs
from rewrite_rules.slices import readers_of_parts
from xrlflow.ir import Attrs, Node, Value
from xrlflow.ops.axes import AXES, BROADCAST, REDUCTIONS, UNARY
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require


def _transpose(op: Op, x: Val, perm: Sequence[int]) -> Any:
    return x if is_identity(perm) else op.Transpose(x, perm=tuple(perm))


class _TwoTransposes(Rule, family="transpose"):
    allow_multi_use = True

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(op.Transpose(x, perm="p"), perm="q")

    def both(self, m: Captures, x: Val) -> tuple[int, ...]:
        """The composition of the two permutations."""
        return compose(permutation(m.p, x.rank), permutation(m.q, x.rank))


class CancelTransposes(_TwoTransposes):
    """transpose_q(transpose_p(x)) -> x  when p after q is the identity."""

    def where(self, m: Captures, x: Val) -> None:
        require(is_identity(self.both(m, x)), "the permutations do not cancel")

    def target(self, op: Op, x: Val) -> Any:
        return x


class MergeTransposes(_TwoTransposes):
    """transpose_q(transpose_p(x)) -> transpose_pq(x)."""

    def where(self, m: Captures, x: Val) -> None:
        profitable(not is_identity(self.both(m, x)), "the permutations cancel")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Transpose(x, perm=self.both(m, x))


class RemoveNoopTranspose(Rule, family="transpose"):
    """transpose(x) -> x  when it leaves every dimension in its place."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(x, perm="p")

    def where(self, m: Captures, x: Val) -> None:
        require(is_identity(permutation(m.p, x.rank)), "it moves a dimension")

    def target(self, op: Op, x: Val) -> Any:
        return x


class ReplaceTransposeByReshape(Rule, family="transpose"):
    """transpose(x) -> reshape(x)  when only dimensions of 1 change places with others."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(x, perm="p")

    def where(self, m: Captures, x: Val) -> None:
        perm = permutation(m.p, x.rank)
        profitable(not is_identity(perm), "it moves nothing")
        order = [p for p in perm if x.shape[p] != 1]
        require(order == sorted(order), "it moves data")
        reshape_numbers(x.shape, [x.shape[p] for p in perm])

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        perm = permutation(m.p, x.rank)
        return op.Reshape(x, reshape_numbers(x.shape, [x.shape[p] for p in perm]))


# Through operators whose result has the axes of their inputs


@dataclass(frozen=True, slots=True)
class _TransposedOperator:
    """An operator on the other side of a Transpose. There its own axes (along which it combines positions, see `Axes`)
    are `own`.

    `before`: the permutation of each data input (None: not transposed); `after`: the permutation of the results.
    """

    op: str
    attrs: Attrs
    outputs: int
    before: tuple[tuple[int, ...] | None, ...]
    own: tuple[int, ...]
    after: tuple[int, ...]

    def build(self, op: Op, inputs: Sequence[Val]) -> list[Any]:
        own = AXES[self.op].own
        data = [v if p is None else _aligned(op, v, p) for v, p in zip(inputs, self.before)]
        more = [list(self.own)] if own == "axes" else inputs[len(data) :]
        named = {"axis": self.own[0]} if own == "axis" else {}
        results = op[self.op](*data, *more, attrs=self.attrs, outputs=self.outputs, **named)
        return [_transpose(op, y, self.after) for y in (results if self.outputs > 1 else [results])]


def _aligned(op: Op, v: Val, perm: Sequence[int]) -> Any:
    """An operand that broadcasts, transposed. It first gets the dimensions of 1 that broadcasting would add in
    front.
    """
    rank = v.type.rank
    if rank == 0:
        return v
    if rank is not None and rank < len(perm):
        profitable(v.const, "an operand has fewer dimensions")
        v = op.Unsqueeze(v, list(range(len(perm) - rank)))
    return _transpose(op, v, perm)


def _own(reader: Reader, node: Node, perm: Sequence[int]) -> tuple[int, ...]:
    """The axes along which a node combines positions, on the other side of a Transpose: perm[a] for each axis a,
    sorted.
    """
    if AXES[node.op].own == "axes":
        profitable(ints_input(reader, node, 1), "it reduces everything, or nothing")
    return tuple(sorted(perm[a] for a in own_axes(reader, node)))


def _perm(reader: Reader, node: Node) -> tuple[int, ...]:
    """The permutation of a Transpose."""
    perm = node.attrs.get("perm")
    return perm_of(node, len(perm) if isinstance(perm, tuple) else rank_of(reader, node.outputs[0]))


def _transposed(reader: Reader, value: Value) -> bool:
    node = reader.producer(value)
    return node is not None and node.op == "Transpose"


class _PushTranspose(RegionRule, family="transpose"):
    """A rule that moves a Transpose from one side of an operator to the other."""

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        transposed: _TransposedOperator = region.data
        return transposed.build(op, inputs)


class _PushDown(_PushTranspose):
    """f(transpose(x), ...) -> transpose(f(x, ...)): each operand is transposed in the same way, or is constant, or is a
    scalar.
    """

    reads_from = ("Transpose",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        data, more = data_inputs(node)
        transposes = [made_by(reader, v, "Transpose") for v in data]
        present = [n for n in transposes if n is not None]
        if not present:
            return None
        for v, inner in zip(data, transposes):
            if inner is not None:
                profitable(read_once(reader, v), "a transpose is read elsewhere")
            else:
                profitable(reader.is_const(v) or reader.type(v).rank == 0, "an operand is not transposed")
        perm = _perm(reader, present[0])
        require(all(_perm(reader, n) == perm for n in present), "operands are transposed in different ways")
        if AXES[node.op].of == "broadcast":
            require(rank_of(reader, *node.outputs) == len(perm), "a transposed operand has fewer dimensions")
        own, after = _own(reader, node, perm), perm
        if not keeps_axes(node):
            remaining = [p for p in perm if p not in own]
            after = tuple(sorted(remaining).index(p) for p in remaining)
        before = tuple(inverse(perm) if n is None else None for n in transposes)
        inputs = tuple(v if n is None else n.inputs[0] for v, n in zip(data, transposes))
        transposed = _TransposedOperator(node.op, node.attrs, len(node.outputs), before, own, after)
        nodes = tuple({n.id: n for n in (node, *present)}.values())
        return Region(node.outputs, (*inputs, *more), nodes, transposed)


class _PushUp(_PushTranspose):
    """transpose(f(x, ...)) -> f(transpose(x), ...), if it `gains`."""

    anchors = ("Transpose",)

    def gains(self, reader: Reader, data: Sequence[Value]) -> bool:
        """Whether transposing the operator's inputs instead of its result may gain."""
        return True

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = made_by(reader, node.inputs[0], *(self.reads_from or ()))
        if inner is None or not keeps_axes(inner):
            return None
        data, more = data_inputs(inner)
        profitable(self.gains(reader, data), "no operand is transposed")
        profitable(read_once(reader, node.inputs[0]), "the function is read elsewhere")
        perm = _perm(reader, node)
        own = _own(reader, inner, inverse(perm))
        transposed = _TransposedOperator(
            inner.op, inner.attrs, 1, (perm,) * len(data), own, tuple(range(len(perm)))
        )
        return Region(node.outputs, (*data, *more), (node, inner), transposed)


class PushTransposeDown(_PushDown):
    """f(transpose(x)) -> transpose(f(x))  for f element by element, of one input."""

    anchors = UNARY
    examples = graphs(
        "(float[N,3,2] x) => (float[N,2,3] y) { a = Transpose<perm=[0,2,1]>(x) y = Relu(a) }",
        "(float[N,3] x) => (double[3,N] y) { a = Transpose(x) y = Cast<to=11>(a) }",
    )


class PushTransposeUp(_PushUp):
    """transpose(f(x)) -> f(transpose(x))  for f element by element, of one input."""

    reads_from = UNARY
    examples = graphs(
        "(float[N,3,2] x) => (float[N,2,3] y) { a = Relu(x) y = Transpose<perm=[0,2,1]>(a) }",
    )


class PushTransposesDown(_PushDown):
    """f(transpose(x), transpose(y)) -> transpose(f(x, y))  for f element by element, with broadcasting.

    Each operand is transposed in the same way, or is constant, or is a scalar; at least one is transposed.
    """

    anchors = BROADCAST
    examples = graphs(
        "(float[N,3,2] x, float[N,3,2] z) => (float[N,2,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(z) y = Add(a, b) }",
        "(float[N,3,2] x) => (float[N,2,3] y) { a = Transpose<perm=[0,2,1]>(x) y = Mul(a, [1.0, 2.0, 3.0]) }",
        "(float[2,3] x, float s) => (float[3,2] y) { a = Transpose(x) y = Mul(a, s) }",
    )
    near_misses = graphs(
        "(float[3,2] x) => (float[2,2,3] y) <float[2,1,3] c = {1, 2, 3, 4, 5, 6}> { a = Transpose(x) y = Mul(a, c) }",
        "(float s) => (float[3,2] y) <float[2,3] w = {1,2,3,4,5,6}> { a = Transpose(w) y = Mul(a, s) }",
    )


class PushTransposesUp(_PushUp):
    """transpose(f(x, y)) -> f(transpose(x), transpose(y))  for f element by element, with broadcasting.

    The rule applies if an operand is a transpose itself, or if all operands but one are constant. Otherwise it would
    only add work.
    """

    reads_from = BROADCAST
    examples = graphs(
        "(float[N,3,2] x, float[N,2,3] z) => (float[N,2,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(z) b = Add(x, a) y = Transpose<perm=[0,2,1]>(b) }",
        "(float[N,3,2] x) => (float[N,2,3] y) { a = Mul(x, [1.0, 2.0]) y = Transpose<perm=[0,2,1]>(a) }",
        "(float[2,3] x, float s) => (float[3,2] y) { a = Mul(x, s) y = Transpose(a) }",
    )

    def gains(self, reader: Reader, data: Sequence[Value]) -> bool:
        rank = max(reader.val(v).rank for v in data)
        running = [v for v in data if not reader.is_const(v) and reader.type(v).rank != 0]
        profitable({reader.type(v).rank for v in running} <= {rank}, "an operand has fewer dimensions")
        return len(running) == 1 or any(_transposed(reader, v) for v in running)


# Through matrix products


def _swaps_last(perm: Sequence[int]) -> bool:
    n = len(perm)
    return n >= 2 and tuple(perm) == (*range(n - 2), n - 1, n - 2)


def _swapped(op: Op, x: Val) -> Any:
    n = x.rank
    return op.Transpose(x, perm=(*range(n - 2), n - 1, n - 2))


class PushTransposesThroughMatMul(Rule, family="transpose"):
    """transpose(x) @ transpose(y) -> transpose(y @ x)  when both exchange the last two dimensions."""

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.MatMul(op.Transpose(x, perm="p"), op.Transpose(y, perm="q"))

    def where(self, m: Captures, x: Val, y: Val) -> None:
        for perm in (permutation(m.p, x.rank), permutation(m.q, y.rank)):
            require(_swaps_last(perm), "not the last two dimensions are exchanged")

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return _swapped(op, op.MatMul(y, x))


class PushTransposeIntoMatMul(Rule, family="transpose"):
    """transpose(x @ y) -> transpose(y) @ transpose(x)  when it exchanges the last two dimensions."""

    examples = graphs(
        "(float[2,3,4,5] x, float[5,6] z) => (float[2,3,6,4] y) { a = MatMul(x, z) y = Transpose<perm=[0,1,3,2]>(a) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Transpose(op.MatMul(x, y), perm="p")

    def where(self, m: Captures, x: Val, y: Val) -> None:
        require(x.rank >= 2 and y.rank >= 2, "an operand is a vector")
        require(x.rank == y.rank or 2 in (x.rank, y.rank), "the ranks differ")
        require(
            _swaps_last(permutation(m.p, max(x.rank, y.rank))), "not the last two dimensions are exchanged"
        )

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.MatMul(_swapped(op, y), _swapped(op, x))


class FoldTransposeIntoGemmA(Rule, family="transpose"):
    """gemm(transpose(a), b) -> gemm(a, b) with transA flipped."""

    optional = ("c",)

    def source(self, op: Op, a: Any, b: Any, c: Any) -> Any:
        return op.Gemm(op.Transpose(a), b, c, transA="t", attrs="rest")

    def target(self, op: Op, m: Captures, a: Val, b: Val, c: Val | None) -> Any:
        return op.Gemm(a, b, c, attrs=m.rest, transA=1 - m.t)


class FoldTransposeIntoGemmB(Rule, family="transpose"):
    """gemm(a, transpose(b)) -> gemm(a, b) with transB flipped."""

    optional = ("c",)

    def source(self, op: Op, a: Any, b: Any, c: Any) -> Any:
        return op.Gemm(a, op.Transpose(b), c, transB="t", attrs="rest")

    def target(self, op: Op, m: Captures, a: Val, b: Val, c: Val | None) -> Any:
        return op.Gemm(a, b, c, attrs=m.rest, transB=1 - m.t)


# Through Concat, Split, reductions and Softmax


class PushTransposesThroughConcat(_PushDown):
    """concat(transpose(x), transpose(y)) -> transpose(concat(x, y))  for equal permutations.

    Constant parts get the inverse transpose.
    """

    anchors = ("Concat",)
    examples = graphs(
        "(float[N,3,2] x, float[N,3,4] z) => (float[N,6,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(z) y = Concat<axis=1>(a, b) }",
    )


class PushTransposeIntoConcat(_PushUp):
    """transpose(concat(x, y)) -> concat(transpose(x), transpose(y))  when a part is a transpose or constant."""

    reads_from = ("Concat",)
    examples = graphs(
        "(float[N,2,3] x, float[N,3,4] z) => (float[N,6,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Concat<axis=2>(a, z) y = Transpose<perm=[0,2,1]>(b) }",
    )

    def gains(self, reader: Reader, data: Sequence[Value]) -> bool:
        return any(reader.is_const(v) or _transposed(reader, v) for v in data)


class PushTransposeThroughSplit(_PushDown):
    """split(transpose(x)) -> transpose(split(x)), each part."""

    anchors = ("Split",)
    examples = graphs(
        "(float[N,3,4] x) => (float[N,2,3] y, float[N,2,3] z) "
        "{ a = Transpose<perm=[0,2,1]>(x) y, z = Split<axis=1, num_outputs=2>(a) }",
        "(float[2,3,4] x) => (float[2,4,3] y) { a = Transpose<perm=[0,2,1]>(x) y = Split<axis=1, num_outputs=1>(a) }",
    )


class PushTransposesUpSplit(_PushTranspose):
    """transpose(split(x)), each part -> split(transpose(x))  for equal permutations."""

    anchors = ("Split",)
    examples = graphs(
        "(float[N,4,3] x) => (float[N,3,2] y, float[N,3,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Transpose<perm=[0,2,1]>(a) z = Transpose<perm=[0,2,1]>(b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        outer = readers_of_parts(reader, node)
        if not outer or outer[0].op != "Transpose":
            return None
        perm = _perm(reader, outer[0])
        require(all(_perm(reader, n) == perm for n in outer), "parts are transposed in different ways")
        own = _own(reader, node, inverse(perm))
        transposed = _TransposedOperator(
            node.op, node.attrs, len(outer), (perm,), own, tuple(range(len(perm)))
        )
        return Region(tuple(n.outputs[0] for n in outer), node.inputs, (node, *outer), transposed)


class PushTransposeThroughReduce(_PushDown):
    """reduce(transpose(x), axes) -> transpose(reduce(x, axes'))."""

    anchors = REDUCTIONS
    examples = graphs(
        "(float[N,3,4] x) => (float[N,4] y) { a = Transpose<perm=[0,2,1]>(x) y = ReduceMean<keepdims=0>(a, [2]) }",
        "(float[N,3,4] x) => (float[N,1,3] y) { a = Transpose<perm=[0,2,1]>(x) y = ReduceMax(a, [1]) }",
    )


class PushTransposeIntoReduce(_PushUp):
    """transpose(reduce(x, axes)) -> reduce(transpose(x), axes')  when it keeps dimensions and x is a transpose."""

    reads_from = REDUCTIONS
    examples = graphs(
        "(float[N,3,4] x) => (float[N,3,1] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = ReduceMax(a, [1]) y = Transpose<perm=[0,2,1]>(b) }",
    )
    near_misses = graphs(
        "(float[N,3,4] x) => (float[1,1,1] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = ReduceMax(a) y = Transpose<perm=[0,2,1]>(b) }",
    )

    def gains(self, reader: Reader, data: Sequence[Value]) -> bool:
        return _transposed(reader, data[0])


class PushTransposeThroughSoftmax(_PushDown):
    """softmax(transpose(x), axis) -> transpose(softmax(x, axis'));  LogSoftmax alike."""

    anchors = ("Softmax", "LogSoftmax")
    examples = graphs(
        "(float[N,3,4] x) => (float[N,4,3] y) { a = Transpose<perm=[0,2,1]>(x) y = Softmax<axis=2>(a) }",
    )


class PushTransposeIntoSoftmax(_PushUp):
    """transpose(softmax(x, axis)) -> softmax(transpose(x), axis');  LogSoftmax alike."""

    reads_from = ("Softmax", "LogSoftmax")
    examples = graphs(
        "(float[N,3,4] x) => (float[N,4,3] y) { a = Softmax<axis=1>(x) y = Transpose<perm=[0,2,1]>(a) }",
    )


# Between Reshapes


class ReplaceReshapedTranspose(Rule, family="transpose"):
    """reshape(transpose(reshape(x))) -> transpose(x), or x,  when each dimension moves as a whole."""

    def source(self, op: Op, x: Any, s: Any, t: Any) -> Any:
        return op.Reshape(op.Transpose(op.Reshape(x, s, allowzero="y"), perm="p"), t, allowzero="z")

    shapes = "x s:const t:const"

    def where(self, m: Captures, x: Val, s: Val, t: Val) -> None:
        _whole_moves(x.sizes, s.ints, m.p, t.ints)

    def target(self, op: Op, m: Captures, x: Val, s: Val, t: Val) -> Any:
        return _transpose(op, x, _whole_moves(x.sizes, s.ints, m.p, t.ints))


def _whole_moves(
    before: Sequence[int], middle: Sequence[int], perm: Sequence[int] | None, after: Sequence[int]
) -> tuple[int, ...]:
    """The permutation of x's dimensions that equals a Reshape, a Transpose and a Reshape. Refuses if there is none."""
    source = AccessMap.source(before)
    result = source.reshape(middle).transpose(permutation(perm, len(middle))).reshape(after)
    units = iter([i for i, dim in enumerate(source.dims) if not dim])
    index_of = {dim: i for i, dim in enumerate(source.dims) if dim}
    out = [index_of.get(dim) if dim else next(units, None) for dim in result.dims]
    require(len(out) == len(before) and None not in out, "a dimension is not moved as a whole")
    return tuple(i for i in out if i is not None)
