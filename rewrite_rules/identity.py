"""Rules that remove operators without effect, and computations that occur twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import same_dims, slice_ends
from rewrite_rules.elementwise import keeps_shape
from rewrite_rules.examples import graphs
from xrlflow.ir import ABSENT, FLOATS, INTEGERS, Dim, DType, Graph, Node, Value
from xrlflow.ir.dims import LARGEST
from xrlflow.ops.schema import COMMUTATIVE
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# The reason why mutants without the conditions on random operators pass.
RANDOM = "no two evaluations of what is random can be compared"


class _Unchanged(Rule, family="identity"):
    """A rule that replaces an operator without effect by its input x."""

    def target(self, op: Op, x: Val) -> Any:
        return x


class RemoveIdentity(_Unchanged):
    """identity(x) -> x."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Identity(x)


class RemoveDropout(_Unchanged):
    """dropout(x) -> x  when it is not in training mode and nobody reads the mask."""

    optional = ("ratio", "training")
    survivors: ClassVar[Mapping[str, str]] = {"drop: it may be in training mode": RANDOM}

    def source(self, op: Op, x: Any, ratio: Any, training: Any) -> Any:
        return op.Dropout(x, ratio, training, attrs="a")

    def where(self, training: Val | None) -> None:
        require(training is None or not training.array.any(), "it may be in training mode")


class RemoveNoopCast(_Unchanged):
    """cast(x) -> x  when x has that element type."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Cast(x, to="to", attrs="a")

    def where(self, m: Captures, x: Val) -> None:
        require(x.dtype == m.to, "it changes the element type")


# By element type, the types that hold every number of it; each type holds at least its own.
_WIDER: dict[DType, frozenset[DType]] = {
    DType.BOOL: INTEGERS | FLOATS,
    DType.UINT8: frozenset(
        {DType.UINT16, DType.UINT32, DType.UINT64, DType.INT16, DType.INT32, DType.INT64}
        | {DType.FLOAT16, DType.FLOAT, DType.DOUBLE, DType.BFLOAT16}
    ),
    DType.INT8: frozenset(
        {DType.INT16, DType.INT32, DType.INT64, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT, DType.DOUBLE}
    ),
    DType.UINT16: frozenset(
        {DType.UINT32, DType.UINT64, DType.INT32, DType.INT64, DType.FLOAT, DType.DOUBLE}
    ),
    DType.INT16: frozenset({DType.INT32, DType.INT64, DType.FLOAT, DType.DOUBLE}),
    DType.UINT32: frozenset({DType.UINT64, DType.INT64, DType.DOUBLE}),
    DType.INT32: frozenset({DType.INT64, DType.DOUBLE}),
    DType.FLOAT16: frozenset({DType.FLOAT, DType.DOUBLE}),
    DType.BFLOAT16: frozenset({DType.FLOAT, DType.DOUBLE}),
    DType.FLOAT: frozenset({DType.DOUBLE}),
}


class MergeCasts(Rule, family="identity"):
    """cast_b(cast_a(x)) -> cast_b(x)  when type a holds every number of x's type.

    Both types must be integer types, or both must be float types. If a float that is cast to an integer overflows, the
    result depends on the runtime's kernel for this pair of types.
    """

    proof = "numeric"
    relies_on = "the first type holds every number of the type before it"
    allow_multi_use = True
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: a number may overflow in another way": "what a kernel makes of a number too large, ONNX leaves open"
    }

    def source(self, op: Op, x: Any) -> Any:
        return op.Cast(op.Cast(x, to="a"), to="b")

    def where(self, m: Captures, x: Val) -> None:
        require(DType(m.a) in _WIDER.get(x.dtype, frozenset()), "the first cast may lose something")
        require(
            x.dtype == m.b
            or (x.dtype == DType.BOOL and m.b in FLOATS | INTEGERS)
            or (x.dtype in FLOATS and m.b in FLOATS)
            or (x.dtype in INTEGERS and m.a in INTEGERS and m.b in INTEGERS),
            "a number may overflow in another way",
        )

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return x if x.dtype == m.b else op.Cast(x, to=m.b)


class _Neutral(_Unchanged):
    """A rule for a constant operand, whose elements all equal one number, that leaves the other operand unchanged."""

    shapes = "x[...] c[...]:const"
    operator, number = "Add", 0.0

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op[self.operator](x, c)

    def where(self, x: Val, c: Val) -> None:
        require(c.uniform == self.number, f"the constant is not {self.number:g} everywhere")
        require(keeps_shape(x.type.shape, c.type.shape), "it may broadcast")


class RemoveZeroAdd(_Neutral):
    """x + 0 -> x.

    Only on the left side, negative zero becomes positive zero. The two zeros compare equal.
    """


class RemoveZeroSub(_Neutral):
    """x - 0 -> x."""

    operator = "Sub"


class RemoveUnitMul(_Neutral):
    """x * 1 -> x."""

    operator, number = "Mul", 1.0


class RemoveUnitDiv(_Neutral):
    """x / 1 -> x."""

    operator, number = "Div", 1.0


class RemoveUnitPow(_Neutral):
    """x ^ 1 -> x.

    Integers are excluded: ONNX Runtime computes their powers as doubles, which round numbers beyond 2^53.
    """

    dtypes = FLOATS
    operator, number = "Pow", 1.0


class RemoveTrueAnd(_Neutral):
    """x and true -> x."""

    operator, number = "And", 1.0


class RemoveFalseOr(_Neutral):
    """x or false -> x."""

    operator, number = "Or", 0.0


class RemoveRepeated(RegionRule, family="identity"):
    """f(f(x)) -> f(x)  for Relu, Abs, Sign and the roundings."""

    proof = "numeric"
    relies_on = "Relu, Abs, Sign and the roundings are idempotent"

    anchors = ("Relu", "Abs", "Sign", "Ceil", "Floor", "Round")
    examples = ("agraph (float[N,3] x) => (float[N,3] y) { a = Floor(x) y = Floor(a) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        if inner is None or inner.op != node.op:
            return None
        return Region(node.outputs, node.inputs, (node, inner))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return x


class CancelInvolution(_Unchanged):
    """f(f(x)) -> x  for Neg, Not and BitwiseNot."""

    allow_multi_use = True
    examples = ("agraph (float[N,3] x) => (float[N,3] y) { a = Neg(x) y = Neg(a) }",)

    def source(self, op: Op, x: Any) -> Any:
        inverse = op.any_of(("Neg", "Not", "BitwiseNot"))
        return inverse(inverse(x))


class RemoveNoopPad(_Unchanged):
    """pad(x, 0) -> x."""

    may_lose_errors = ("sizes",)
    optional = ("value", "axes")
    shapes = "x pads:const"

    def source(self, op: Op, x: Any, pads: Any, value: Any, axes: Any) -> Any:
        return op.Pad(x, pads, value, axes, attrs="a")

    def where(self, pads: Val) -> None:
        require(not any(pads.ints), "it pads")


class RemoveNoopSlice(_Unchanged):
    """slice(x) -> x  when it takes everything."""

    optional = ("axes", "steps")
    shapes = "x starts:const ends:const axes:const steps:const"
    examples = graphs(
        "(float[N,3] x) => (y) { y = Slice(x, [0, 0], [2147483647, 9223372036854775807], [0, 1]) }"
    )
    near_misses = graphs("(float[N,3] x) => (y) { y = Slice(x, [0, 0], [2147483647, 3], [0, 1], [1, 2]) }")

    def source(self, op: Op, x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
        return op.Slice(x, starts, ends, axes, steps)

    def where(self, x: Val, starts: Val, ends: Val, axes: Val | None, steps: Val | None) -> None:
        require(steps is None or all(s == 1 for s in steps.ints), "it has a step")
        sliced = range(len(starts.ints)) if axes is None else axes.ints
        for start, end, axis in zip(starts.ints, ends.ints, sliced):
            size = x.type.shape[axis] if x.type.shape is not None else None
            static = isinstance(size, int)
            require(start == 0 or (isinstance(size, int) and start <= -size), "it leaves out a beginning")
            # A larger end stands for the last element: exporters write "to the end" as 2^31 - 1 or 2^63 - 1.
            require(
                end >= LARGEST or (static and isinstance(size, int) and end >= size), "it leaves out an end"
            )


class RemoveNoopReshape(RegionRule, family="identity"):
    """reshape(x) -> x  when the shape is the same, number for number and symbol for symbol.

    The rule also removes Expand, Tile, Squeeze, Unsqueeze and Flatten.
    """

    may_lose_errors = ("sizes", "indices")
    anchors = ("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Flatten")
    examples = graphs(
        "(float[2,3] x) => (float[2,3] y) { s = Constant<value_ints=[2,3]>() y = Reshape(x, s) }",
        "(float[N,3] x) => (float[N,3] y) { y = Tile(x, [1, 1]) }",
        "(float[N,3] x) => (float[N,3] y) { y = Expand(x, [1]) }",
    )
    near_misses = graphs(
        "(float[2,3] x, int64[1] k) => (y) { s = Concat<axis=0>(k, [3]) y = Reshape(x, s) }",
        "(float[2,0] x, int64[1] k) => (y) { s = Concat<axis=0>(k, [0]) y = Reshape(x, s) }",
        "(float[2,N,3] x, int64[1] k) => (y) { s = Concat<axis=0>(k, [0, 3]) y = Reshape(x, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        before, after = reader.type(node.inputs[0]).shape, node.types[0].shape
        require(same_dims(before, after), "the shape changes, or is not known")
        return Region(node.outputs, (node.inputs[0],), (node,))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return x


class RemoveSingleton(RegionRule, family="identity"):
    """concat(x) -> x;  the same for Sum, Mean, Max and Min of one input, and a Split into one part."""

    may_lose_errors = ("sizes",)
    anchors = ("Concat", "Sum", "Mean", "Max", "Min", "Split")
    examples = ("agraph (float[N,3] x) => (float[N,3] y) { y = Concat<axis=0>(x) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.outputs) != 1 or (node.op != "Split" and len(node.inputs) != 1):
            return None
        return Region(node.outputs, (node.inputs[0],), (node,))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return x


class RemoveEmptyParts(RegionRule, family="identity"):
    """concat(x, e, y) -> concat(x, y)  when e has no elements along the axis."""

    may_lose_errors = ("sizes",)
    anchors = ("Concat",)
    examples = ("agraph (float[N,3] x, float[N,0] e) => (float[N,3] y) { y = Concat<axis=1>(x, e) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        remaining = []
        for value in node.inputs:
            shape = reader.type(value).shape
            axis = node.attrs["axis"]
            assert isinstance(axis, int)
            if shape is None or shape[axis] != 0:
                remaining.append(value)
        if len(remaining) == len(node.inputs) or not remaining:
            return None
        return Region(node.outputs, tuple(remaining), (node,), node.attrs)

    def target(self, op: Op, region: Region, *xs: Val) -> Any:
        return xs[0] if len(xs) == 1 else op.Concat(*xs, attrs=region.data)


# The deterministic operators without bodies. A graph may compute them twice, or from constants only.
_NAMES = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu CenterCropPad Clip Col2Im
Compress Concat ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DFT DeformConv
DepthToSpace DequantizeLinear Det Div DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike
Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax InstanceNormalization
IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool
MatMul MatMulInteger Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min Mish Mod Mul Neg
NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear
RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
RotaryEmbedding Round STFT ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice
Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu Tile TopK
Transpose Trilu Unique Unsqueeze Where Xor
"""

_OPERATORS = tuple(_NAMES.split())


class MergeCommonSubexpressions(RegionRule, family="identity"):
    """f(x), f(x) -> f(x), for any deterministic operator: what is computed twice is computed once.

    Of the two nodes the one with the smaller id stays. To find an equal node, only the readers of one input are
    examined: the input with the fewest readers.
    """

    anchors = _OPERATORS
    examples = (
        "agraph (float[N,3] x, float[N,3] z) => (float[N,3] y) { a = Add(x, z) b = Add(z, x) y = Mul(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        # The Reader records nothing unless there is a match: `partners` says when to call `find` again.
        graph = reader.graph
        rarest = _rarest(graph, node)
        for user in graph.uses[rarest] if rarest else ():
            if user >= node.outputs[0]:
                return None
            candidate = graph.producers[user]
            if _same(candidate, node):
                reader.users(rarest)
                return Region(node.outputs, candidate.outputs, (node, candidate))
        return None

    def partners(self, graph: Graph, node: Node) -> list[Value]:
        rarest = _rarest(graph, node)
        users = graph.uses[rarest] if rarest else ()
        return [user for user in users if user > node.outputs[0] and _same(graph.producers[user], node)]

    def target(self, op: Op, region: Region, *values: Val) -> Any:
        return list(values)


def _rarest(graph: Graph, node: Node) -> Value:
    """The input of a node that the fewest nodes read; ABSENT if an input has no other reader, or if there is no
    input.
    """
    uses = graph.uses
    rarest, fewest = ABSENT, 0
    for value in node.inputs:
        if value == ABSENT:
            continue
        count = len(uses[value])
        if count == 1:
            return ABSENT
        if not fewest or count < fewest:
            rarest, fewest = value, count
    return rarest


def _same(a: Node, b: Node) -> bool:
    """Whether two nodes compute the same. The order of commutative operands does not matter."""
    if a.op != b.op or a.attrs.digest != b.attrs.digest or len(a.outputs) != len(b.outputs):
        return False
    return a.inputs == b.inputs or (a.op in COMMUTATIVE and sorted(a.inputs) == sorted(b.inputs))


class FoldDimension(Rule, family="identity"):
    """gather(shape(x), i) -> constant  when these dimensions are known."""

    canonicalises = True
    shapes = "x i:const"
    allow_multi_use = True

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.Gather(op.Shape(x, start="start", end="end"), i)

    def where(self, m: Captures, x: Val, i: Val) -> None:
        dims = x.shape[slice(m.start, m.end)]
        for k in i.ints:
            require(-len(dims) <= k < len(dims), "the index is out of range")
            require(isinstance(dims[k], int), "a dimension is not a known number")

    def target(self, op: Op, m: Captures, x: Val, i: Val) -> Any:
        dims = x.shape[slice(m.start, m.end)]
        return _constant(op, [[*dims][k] for k in i.ints], i.array.shape)


class FoldDimensions(Rule, family="identity"):
    """slice(shape(x)) -> constant  when these dimensions are known."""

    canonicalises = True
    optional = ("axes", "steps")
    shapes = "x starts:const ends:const axes:const steps:const"
    allow_multi_use = True

    def source(self, op: Op, x: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
        return op.Slice(op.Shape(x, start="start", end="end"), starts, ends, axes, steps)

    def where(self, m: Captures, x: Val, starts: Val, ends: Val, steps: Val | None) -> None:
        dims = self._dims(m, x, starts, ends, steps)
        require(all(isinstance(d, int) for d in dims), "a dimension is not a known number")

    def target(self, op: Op, m: Captures, x: Val, starts: Val, ends: Val, steps: Val | None) -> Any:
        return _constant(op, self._dims(m, x, starts, ends, steps))

    @staticmethod
    def _dims(m: Captures, x: Val, starts: Val, ends: Val, steps: Val | None) -> Sequence[Dim]:
        profitable(len(starts.ints) == 1, "there are several axes")
        (start,), (step,) = starts.ints, (1,) if steps is None else steps.ints
        profitable(step != 0, "it stands still")
        (end,) = slice_ends(ends.ints, (step,))
        return x.shape[slice(m.start, m.end)][start:end:step]


def _constant(op: Op, numbers: Any, shape: Sequence[int] | None = None) -> Any:
    """An int64 constant."""
    array = np.asarray(numbers, np.int64)
    return op.Identity(array if shape is None else array.reshape(shape))
