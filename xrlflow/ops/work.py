"""How much an operator computes and how many bytes it moves. Cost models divide these by the machine's speed.

`work` returns the floating-point operations, bytes and kind of one node, from the types of its inputs and outputs.
`COUNTS` has a small function for each operator, `ELEMENTWISE` the operations per element. An operator in neither table
counts as one operation per element of its first output.

Conventions: a multiplication and an addition are two operations. Every input is read once and every output is written
once, unless the operator touches only a part (Slice, Gather, Split). An operator for which ONNX Runtime does not touch
data (Reshape, Squeeze, ...) is a VIEW: it counts no operations and no bytes, only the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TypeVar

from xrlflow.ir import Body, Const, Dim, Graph, Node, TensorType, Value, dims
from xrlflow.ops.schema import plain_name
from xrlflow.ops.symbolic_values import evaluate_call

Shape = tuple[int, ...]

# The size that is assumed for a dimension that is neither a number nor bound. It is 1 if the dimension is named like a
# batch, or is first and nameless, because users measure the latency of one sample; it is 64 for any other dimension
# (sequence, height, ...). Only the name decides, so that a symbol has the same size everywhere.
BATCH_DIM = 1
OTHER_DIM = 64
# More elements than any machine holds.
_MOST_ELEMENTS = 1 << 62
_BATCH_NAMES = frozenset({"n", "b", "bs"})


class OpKind(Enum):
    """Kinds of operators. Operators of one kind reach a similar part of the machine's speed."""

    GEMM = "gemm"
    CONV = "conv"
    GROUPED_CONV = "grouped conv"  # several groups, with several channels each
    DEPTHWISE_CONV = "depthwise conv"  # one channel per group
    RECURRENT = "recurrent"  # LSTM, GRU, RNN
    ELEMENTWISE = "elementwise"
    REDUCE = "reduce"  # reductions, normalisations, softmax, pooling
    MOVE = "move"  # copies runs of neighbouring elements
    SHUFFLE = "shuffle"  # copies element by element: a Transpose of the innermost dimension
    VIEW = "view"  # touches no data
    OTHER = "other"  # control flow, sorting, unknown operators


@dataclass(frozen=True, slots=True)
class Gemm:
    """The size of a product: `count` independent products of an [m, k] and a [k, n] matrix.

    A convolution is one product per group: m output positions, n output channels, k = channels x kernel.
    """

    count: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of an operator does.

    `flops`: number of operations. `bytes`: memory traffic. `footprint`: bytes in use at a time, which decide whether
    the traffic stays in the cache (fewer than `bytes` if weights are read at every step). `gemm`: the underlying
    product, if there is one. `channels`: input channels per group of a convolution, else 0. `bits`: the width of the
    computed elements.
    """

    flops: float
    bytes: float
    kind: OpKind
    footprint: float = -1.0
    gemm: Gemm | None = None
    channels: int = 0
    bits: int = 32

    def __post_init__(self) -> None:
        if self.footprint < 0:
            object.__setattr__(self, "footprint", self.bytes)


def dimensions(type: TensorType, bindings: Mapping[str, int]) -> Shape:
    """The shape in numbers. `bindings` has the sizes of symbols; other symbols get a default (BATCH_DIM, OTHER_DIM).

    An unknown rank counts as one dimension of OTHER_DIM. If the tensor would have more elements than any machine holds,
    symbols count as 1.
    """
    if type.shape is None:
        return (OTHER_DIM,)
    sizes = tuple(
        d if isinstance(d, int) else _unbound(d, axis) if (n := number_of(d, bindings)) is None else n
        for axis, d in enumerate(type.shape)
    )
    if prod(sizes) > _MOST_ELEMENTS:
        return tuple(d if isinstance(d, int) else 1 for d in type.shape)
    return sizes


def number_of(dim: Dim, bindings: Mapping[str, int]) -> int | None:
    """The size of a dimension, given the sizes of symbols; None if the size does not follow from them."""
    return dims.value(dim, bindings, evaluate_call)


def _unbound(symbol: str | None, axis: int) -> int:
    if symbol is not None and dims.is_computed(symbol):
        usual = {name: _unbound(name, 1) for name in dims.symbols(dims.formula(symbol))}
        number = number_of(symbol, usual)
        return OTHER_DIM if number is None else max(number, 1)
    if symbol is None or symbol.startswith("unk__"):  # ONNX's inference invented this name
        return BATCH_DIM if axis == 0 else OTHER_DIM
    name = symbol.lower()
    return BATCH_DIM if name in _BATCH_NAMES or "batch" in name else OTHER_DIM


@dataclass(frozen=True, slots=True)
class Operands:
    """A node with its shapes in numbers and its tensors' bytes. An absent input has shape () and no bytes."""

    node: Node
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    in_bytes: tuple[float, ...]
    out_bytes: tuple[float, ...]
    bits: int
    bindings: Mapping[str, int]

    def number(self, name: str, default: int) -> int:
        value = self.node.attrs.get(name, default)
        return value if isinstance(value, int) else default

    def numbers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self.node.attrs.get(name, default)
        return tuple(int(v) for v in value) if isinstance(value, tuple) else default

    def input(self, index: int) -> Shape:
        return self.inputs[index] if index < len(self.inputs) else ()

    def input_bytes(self, index: int) -> float:
        return self.in_bytes[index] if index < len(self.in_bytes) else 0.0

    @property
    def read(self) -> float:
        return sum(self.in_bytes)

    @property
    def written(self) -> float:
        return sum(self.out_bytes)

    @property
    def elements(self) -> int:
        """The number of elements of the first output."""
        return prod(self.outputs[0])


Count = Callable[[Operands], Work]


def work(node: Node, in_types: Sequence[TensorType | None], bindings: Mapping[str, int]) -> Work:
    """What one call of a node does. `in_types[i]` is the type of `node.inputs[i]`, None if that is absent.

    For control flow the bodies count, see `bodies`.
    """
    weighted = list(bodies(node, in_types, bindings))
    if weighted:
        flops = sum(w * work(n, _in_types(g, n), bindings).flops for g, w in weighted for n in _running(g))
        nbytes = sum(w * work(n, _in_types(g, n), bindings).bytes for g, w in weighted for n in _running(g))
        return Work(flops, nbytes, OpKind.OTHER)
    operands = _operands(node, in_types, bindings)
    op = plain_name(node.op)
    count = COUNTS.get(op)
    if count is not None:
        return count(operands)
    per_element = ELEMENTWISE.get(op)
    kind = OpKind.OTHER if per_element is None else OpKind.ELEMENTWISE
    return _dense(operands, (per_element or 1) * operands.elements, kind)


# The number of iterations assumed for a Loop whose trip count is unknown. It is more than one, or there would be no
# Loop.
UNKNOWN_STEPS = 8.0


def bodies(
    node: Node,
    in_types: Sequence[TensorType | None],
    bindings: Mapping[str, int],
    consts: Mapping[Value, Const] = {},
) -> Iterator[tuple[Graph, float]]:
    """The graphs inside a control-flow node, each with how often one call of the node runs it.

    All branches of an If count in full, since any of them may run; only one of them if the condition is in `consts`. A
    Scan runs its body once per element of its scanned inputs. A Loop runs its body as often as its trip count says, if
    that is in `consts`, or once for each result that it collects.
    """
    graphs = [value.graph for value in node.attrs.values() if isinstance(value, Body)]
    weight = 1.0
    if node.op == "If":
        const = consts.get(node.inputs[0])
        if const is not None and const.array is not None and const.array.size == 1:
            branch = node.attrs.get("then_branch" if const.array.item() else "else_branch")
            graphs = [branch.graph] if isinstance(branch, Body) else graphs
    elif node.op == "Scan":
        explicit = in_types[: len(in_types) - node.captured]
        count = node.attrs.get("num_scan_inputs", 1)
        scanned = explicit[len(explicit) - count] if isinstance(count, int) else None
        axes = node.attrs.get("scan_input_axes", (0,))
        if scanned is not None and scanned.shape and isinstance(axes, tuple) and axes:
            weight = float(dimensions(scanned, bindings)[int(axes[0])])
    elif node.op == "Loop":
        weight = _steps(node, bindings, consts)
    for graph in graphs:
        yield graph, weight


def _steps(node: Node, bindings: Mapping[str, int], consts: Mapping[Value, Const]) -> float:
    const = consts.get(node.inputs[0]) if node.inputs else None
    if const is not None and const.array is not None and const.array.size == 1:
        count = int(const.array.item())
        return float(max(count, 0)) if count < 1 << 30 else UNKNOWN_STEPS  # else the condition ends it
    for type in node.types[max(len(node.explicit_inputs) - 2, 0) :]:
        first = type.shape[0] if type.shape else None
        number = bindings.get(first) if isinstance(first, str) else first
        if number is not None:
            return float(number)
    return UNKNOWN_STEPS


def _running(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if not n.const]


def _in_types(graph: Graph, node: Node) -> list[TensorType | None]:
    return [graph.type(v) if v else None for v in node.inputs]


def _operands(node: Node, in_types: Sequence[TensorType | None], bindings: Mapping[str, int]) -> Operands:
    inputs = tuple(() if t is None else dimensions(t, bindings) for t in in_types)
    outputs = tuple(dimensions(t, bindings) for t in node.types)
    first = in_types[0] if in_types and in_types[0] is not None else node.types[0]
    return Operands(
        node,
        inputs,
        outputs,
        tuple(0.0 if t is None else prod(s) * t.dtype.bits / 8 for t, s in zip(in_types, inputs)),
        tuple(prod(s) * t.dtype.bits / 8 for t, s in zip(node.types, outputs)),
        first.dtype.bits,
        bindings,
    )


def _dense(o: Operands, flops: float, kind: OpKind) -> Work:
    """The work of an operator that reads every input and writes every output."""
    return Work(flops, o.read + o.written, kind, bits=o.bits)


def _product(o: Operands, gemm: Gemm, kind: OpKind = OpKind.GEMM, channels: int = 0) -> Work:
    return Work(gemm.flops, o.read + o.written, kind, gemm=gemm, channels=channels, bits=o.bits)


# --- data movement ---


def _view(o: Operands) -> Work:
    return Work(0.0, 0.0, OpKind.VIEW)


def _copy(o: Operands) -> Work:
    """The work of an operator that reads every input and writes the output."""
    return Work(0.0, o.read + o.written, OpKind.MOVE)


def _pick(o: Operands) -> Work:
    """The work of an operator that reads only as many elements of its first input as it writes."""
    return Work(0.0, 2 * o.written + o.read - o.input_bytes(0), OpKind.MOVE)


def _transpose(o: Operands) -> Work:
    shape = o.input(0)
    perm = o.numbers("perm", tuple(reversed(range(len(shape)))))
    permuted = [axis for axis in perm if axis < len(shape) and shape[axis] != 1]
    neighbours_stay = not permuted or permuted[-1] == max(permuted)
    return Work(0.0, o.read + o.written, OpKind.MOVE if neighbours_stay else OpKind.SHUFFLE)


def _fill(o: Operands) -> Work:
    return Work(0.0, o.written, OpKind.MOVE)


def _scatter(o: Operands) -> Work:
    """The work of an operator that copies the data, then overwrites a part of it. The updates are the last input."""
    return Work(0.0, o.read + o.written + o.in_bytes[-1], OpKind.MOVE)


# --- products ---


def _matmul(o: Operands) -> Work:
    return _product(o, matmul_shape(o.input(0), o.input(1)))


def matmul_shape(a: Shape, b: Shape) -> Gemm:
    """The size of NumPy's matmul. If the right operand is a matrix, all leading dimensions of the left operand are
    rows.
    """
    a = a if len(a) > 1 else (1, *(a or (1,)))
    b = b if len(b) > 1 else (*(b or (1,)), 1)
    m, k, n = a[-2], a[-1], b[-1]
    if prod(b[:-2]) == 1:
        return Gemm(1, prod(a[:-1]), n, k)
    rank = max(len(a), len(b))
    lead = zip((1,) * (rank - len(a)) + a[:-2], (1,) * (rank - len(b)) + b[:-2])
    return Gemm(prod(max(x, y) for x, y in lead), m, n, k)


def _qlinear_matmul(o: Operands) -> Work:
    return _product(o, matmul_shape(o.input(0), o.input(3)))


def _fused_matmul(o: Operands) -> Work:
    a, b = o.input(0), o.input(1)
    a = (*a[:-2], *a[:-3:-1]) if o.number("transA", 0) else a
    b = (*b[:-2], *b[:-3:-1]) if o.number("transB", 0) else b
    return _product(o, matmul_shape(a, b))


# Operations that take as long as unpacking a weight of MatMulNBits does, for one row and for several; and the time of
# products of bytes (`accuracy_level` 4) in that of products of float32. Measured on Zen 4 with one thread, 512 and 768
# rows of weights: 0.08 and 0.15 ns a weight at 106 GFLOP/s, and 0.71 to 0.93.
_UNPACKED, _BYTES = (6.0, 16.0), 0.8


def _packed_matmul(o: Operands) -> Work:
    """The work of a product with packed weights: each weight is unpacked in each run, except for products of bytes."""
    a, k, n = o.input(0), o.number("K", 1), o.number("N", 1)
    gemm = Gemm(1, prod(a[:-1]), n, k)
    done = _product(o, gemm)
    if o.number("accuracy_level", 0) == 4:
        return replace(done, flops=_BYTES * gemm.flops)
    return replace(done, flops=gemm.flops + _UNPACKED[gemm.m > 1] * n * k)


def _gemm(o: Operands) -> Work:
    a, b = o.input(0), o.input(1)
    if len(a) != 2 or len(b) != 2:
        return _dense(o, o.elements, OpKind.OTHER)
    m, k = (a[1], a[0]) if o.number("transA", 0) else a
    return _product(o, Gemm(1, m, b[0] if o.number("transB", 0) else b[1], k))


def _einsum(o: Operands) -> Work:
    equation = o.node.attrs.get("equation", "")
    plan = einsum_shape(equation if isinstance(equation, str) else "", o.inputs)
    if plan is None:
        return Work(0.0, o.read + o.written, OpKind.SHUFFLE)
    return _product(o, plan)


def einsum_shape(equation: str, shapes: Sequence[Shape]) -> Gemm | None:
    """The size of the product in an Einsum of at least two operands (further ones make it larger); None for one
    operand.

    Labels of both operands and the result are batch dimensions. Labels of only one operand and the result are rows or
    columns. All other labels are summed over.
    """
    if len(shapes) < 2:
        return None
    left, _, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    labels: list[str] = []
    for term, shape in zip(left.split(","), shapes):
        hidden = len(shape) - len(term.replace("...", ""))
        term = term.replace("...", "".join(chr(0x3B1 + i) for i in range(hidden)))
        labels.append(term)
        for label, size in zip(term, shape):
            sizes[label] = max(size, sizes.get(label, 1))
    if "->" in equation:
        ellipsis = sorted(label for label in sizes if label >= "\u03b1")
        result = set(right.replace("...", "".join(ellipsis)))
    else:
        joined = "".join(labels)
        result = {label for label in sizes if joined.count(label) == 1 or label >= "\u03b1"}
    first, others = set(labels[0]), set("".join(labels[1:]))
    return Gemm(
        prod(sizes[x] for x in first & others & result),
        prod(sizes[x] for x in (first - others) & result),
        prod(sizes[x] for x in (others - first) & result),
        prod(sizes[x] for x in sizes if x not in result),
    )


def _conv(o: Operands) -> Work:
    return _conv_over(o, o.input(1))


def _qlinear_conv(o: Operands) -> Work:
    return _conv_over(o, o.input(3))


def _conv_over(o: Operands, weight: Shape) -> Work:
    out = o.outputs[0]
    if len(out) < 3 or len(weight) < 3:
        return _dense(o, o.elements, OpKind.OTHER)
    groups, channels = o.number("group", 1), weight[1]
    gemm = Gemm(groups, out[0] * prod(out[2:]), max(1, weight[0] // groups), channels * prod(weight[2:]))
    if groups == 1:
        return _product(o, gemm, OpKind.CONV, channels)
    return _product(o, gemm, OpKind.DEPTHWISE_CONV if channels == 1 else OpKind.GROUPED_CONV, channels)


def _conv_transpose(o: Operands) -> Work:
    """The work of a product into a buffer of columns, which is then read and summed into the image."""
    x, weight = o.input(0), o.input(1)
    if len(x) < 3 or len(weight) < 3:
        return _dense(o, o.elements, OpKind.OTHER)
    groups = o.number("group", 1)
    gemm = Gemm(groups, x[0] * prod(x[2:]), weight[1] * prod(weight[2:]), max(1, weight[0] // groups))
    columns = 2.0 * groups * gemm.m * gemm.n * o.bits / 8
    base = _product(o, gemm)
    return replace(base, bytes=base.bytes + columns, footprint=base.bytes + columns)


# Where an attention operator finds the keys of earlier positions, [b,h,p,d].
_PAST_KEYS = {"Attention": 4, "com.microsoft::GroupQueryAttention": 3}


def _attention(o: Operands) -> Work:
    """The work of softmax(Q K^T) V, in opset 23 and com.microsoft. Q, K, V are [b,h,s,d] or [b,s,h*d]."""
    query, key, value = o.input(0), o.input(1), o.input(2)
    if len(query) == 4 and len(key) == 4 and len(value) == 4:
        batch, heads, rows, depth = query
        columns, out = key[2], value[3]
    elif len(query) == 3 and len(key) == 3 and len(value) == 3:
        heads = max(1, o.number("q_num_heads", o.number("num_heads", 1)))
        shared = max(1, o.number("kv_num_heads", heads))
        batch, rows, depth = query[0], query[1], query[2] // heads
        columns, out = key[1], value[2] // shared
    else:
        return _dense(o, o.elements, OpKind.OTHER)
    op = plain_name(o.node.op)
    past = o.input(_PAST_KEYS[op]) if op in _PAST_KEYS else ()
    if len(past) == 4:
        columns += past[2]
    return _attend(o, batch * heads, rows, columns, depth, out)


def _attend(o: Operands, count: int, rows: int, columns: int, depth: int, out: int) -> Work:
    scores = float(count * rows * columns)
    flops = scores * (2 * depth + 2 * out + 3 + ELEMENTWISE["Exp"])
    nbytes = (
        o.read + o.written + 4 * scores * o.bits / 8
    )  # the softmax and the second product read and write the scores
    return Work(flops, nbytes, OpKind.GEMM, gemm=Gemm(count, rows, columns, depth + out), bits=o.bits)


def _packed_attention(o: Operands) -> Work:
    """The work of com.microsoft::Attention: the projection [b,s,d] x [d,3d], and the attention of its three parts."""
    x, weight = o.input(0), o.input(1)
    if len(x) != 3 or len(weight) != 2:
        return _dense(o, o.elements, OpKind.OTHER)
    heads, width = max(1, o.number("num_heads", 1)), weight[1] // 3
    attended = _attend(o, x[0] * heads, x[1], x[1], width // heads, width // heads)
    projection = Gemm(1, x[0] * x[1], weight[1], weight[0])
    return replace(attended, flops=attended.flops + projection.flops, gemm=projection)


def _recurrent(o: Operands) -> Work:
    """The work for X [t,b,i], W and R with gates*h rows (or columns). R is read again at every step."""
    x, weight, recurrence = o.input(0), o.input(1), o.input(2)
    if len(x) != 3 or len(weight) != 3 or len(recurrence) != 3:
        return _dense(o, o.elements, OpKind.OTHER)
    steps, batch = (x[1], x[0]) if o.number("layout", 0) else (x[0], x[1])
    directions = weight[0]
    rows = max(1, weight[1] * weight[2] // max(1, x[2]))
    step = Gemm(directions, batch, rows, x[2] + recurrence[1] * recurrence[2] // rows)
    pointwise = steps * batch * directions * rows * ELEMENTWISE["Sigmoid"]
    nbytes = o.read + o.written + max(0, steps - 1) * o.input_bytes(2)
    at_once = max(o.input_bytes(1), o.input_bytes(2))  # one weight matrix is read after the other
    return Work(steps * step.flops + pointwise, nbytes, OpKind.RECURRENT, at_once, step, bits=o.bits)


# --- reductions ---


def _per_input(flops: float) -> Count:
    def count(o: Operands) -> Work:
        return _dense(o, flops * prod(o.input(0)), OpKind.REDUCE)

    return count


def _transform(o: Operands) -> Work:
    """On one core, without vector instructions; a length that is no power of two takes about three times as long. The
    axis is an operand, so the first one that may be it decides."""
    data = o.input(0)[:-1]
    slow = any(n & (n - 1) for n in (data[1:] or data))
    return _dense(o, (2000.0 if slow else 700.0) * prod(o.input(0)), OpKind.REDUCE)


def _pool(o: Operands) -> Work:
    return _dense(o, float(o.elements * prod(o.numbers("kernel_shape", (1,)))), OpKind.REDUCE)


def _sort(o: Operands) -> Work:
    return _dense(o, 10.0 * prod(o.input(0)), OpKind.OTHER)


def _elementwise(flops: float) -> Count:
    def count(o: Operands) -> Work:
        return _dense(o, flops * o.elements, OpKind.ELEMENTWISE)

    return count


def _power(o: Operands) -> Work:
    """The work of a power. With a constant exponent (squares, cubes, roots, others) it is fast; otherwise the runtime
    computes one element at a time.
    """
    return _dense(o, (8.0 if prod(o.input(1)) == 1 else 270.0) * o.elements, OpKind.ELEMENTWISE)


def _sum(o: Operands) -> Work:
    return _dense(o, float(o.elements * max(1, len(o.inputs) - 1)), OpKind.ELEMENTWISE)


T = TypeVar("T")


def _table(*rows: tuple[str, T]) -> dict[str, T]:
    """A table of operators. Each row has several operators, separated by blanks, and their common entry."""
    return {op: value for ops, value in rows for op in ops.split()}


# Operations per element of the output, in units of a vector unit. Transcendental functions count the operations of
# their polynomials. For functions that ONNX Runtime computes one element at a time, by calling the C library, the count
# comes from their measured time compared with Tanh's.
ELEMENTWISE: dict[str, float] = _table(
    ("Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Equal", 1.0),
    ("Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Mul Neg Not Or Relu Sub Where Xor Abs", 1.0),
    ("Clip LeakyRelu Shrink ThresholdedRelu HardSigmoid DequantizeLinear", 2.0),
    ("Reciprocal Softsign QuantizeLinear RotaryEmbedding com.microsoft::RotaryEmbedding", 4.0),
    ("Ceil Div Floor HardSwish Round Sqrt", 8.0),
    ("Exp", 8.0),
    ("Tanh Sigmoid com.microsoft::QuickGelu", 12.0),
    ("Erf", 20.0),
    ("Gelu com.microsoft::Gelu com.microsoft::FastGelu com.microsoft::BiasGelu", 24.0),
    ("Log Elu Selu Celu Sign Asin Acos Atan", 70.0),
    ("Sin Cos PRelu", 150.0),
    ("Softplus Mish Mod Tan", 420.0),
    ("Sinh Cosh Asinh Acosh Atanh", 1300.0),
)

COUNTS: dict[str, Count] = _table(
    ("Reshape Squeeze Unsqueeze Flatten Identity Dropout Shape Size Constant", _view),
    ("Concat Expand Tile Pad DepthToSpace SpaceToDepth ReverseSequence Trilu Resize", _copy),
    ("Slice Split Gather GatherElements GatherND Compress CenterCropPad", _pick),
    ("ConstantOfShape Range EyeLike OneHot RandomNormal RandomUniform", _fill),
    ("Scatter ScatterElements ScatterND TensorScatter", _scatter),
    ("Transpose", _transpose),
    ("MatMul MatMulInteger", _matmul),
    ("com.microsoft::MatMulIntegerToFloat com.microsoft::DynamicQuantizeMatMul", _matmul),
    ("com.microsoft::FusedMatMul", _fused_matmul),
    ("QLinearMatMul", _qlinear_matmul),
    ("com.microsoft::MatMulNBits", _packed_matmul),
    ("Gemm com.microsoft::FusedGemm", _gemm),
    ("Einsum", _einsum),
    ("Conv ConvInteger DeformConv com.microsoft::FusedConv", _conv),
    ("QLinearConv", _qlinear_conv),
    ("ConvTranspose", _conv_transpose),
    ("Attention com.microsoft::MultiHeadAttention com.microsoft::GroupQueryAttention", _attention),
    ("com.microsoft::Attention", _packed_attention),
    ("LSTM GRU RNN com.microsoft::DynamicQuantizeLSTM", _recurrent),
    ("Pow", _power),
    ("Sum Max Min Mean", _sum),
    ("BatchNormalization", _elementwise(2)),
    ("MaxPool AveragePool LpPool", _pool),
    ("GlobalAveragePool GlobalMaxPool ReduceMean ReduceSum ReduceMax ReduceMin", _per_input(1)),
    ("ReduceProd ArgMax ArgMin CumSum", _per_input(1)),
    ("ReduceL1 ReduceL2 ReduceSumSquare LpNormalization GlobalLpPool DynamicQuantizeLinear", _per_input(2)),
    ("RMSNormalization com.microsoft::SkipSimplifiedLayerNormalization", _per_input(12)),
    ("InstanceNormalization GroupNormalization MeanVarianceNormalization", _per_input(20)),
    ("LayerNormalization com.microsoft::SkipLayerNormalization", _per_input(20)),
    ("ReduceLogSum ReduceLogSumExp", _per_input(10)),
    ("Softmax LogSoftmax Hardmax", _per_input(14)),
    ("LRN", _per_input(20)),
    ("DFT", _transform),
    ("TopK NonZero Unique NonMaxSuppression", _sort),
)
