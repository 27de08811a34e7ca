"""Rules for discrete Fourier transforms. ONNX Runtime computes them on one core, without vector instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, front, same_dims
from rewrite_rules.elementwise import made_by
from rewrite_rules.examples import graphs
from rewrite_rules.reading import carrier_of, most_of
from xrlflow.ir import ABSENT, Dim, DType, Node, TensorType, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, profitable, require

# The numbers of a matrix, which the file has to hold.
_MOST_NUMBERS = 1 << 20


def _zeros(reader: Reader, value: Value) -> bool:
    """Whether all elements of a value are 0, also if its shape is computed."""
    node = reader.producer(value)
    if node is not None and node.op == "Expand":
        return _zeros(reader, node.inputs[0])
    if node is not None and node.op == "ConstantOfShape":
        return reader.val(value).uniform == 0.0 if reader.is_const(value) else _fills_zeros(node)
    return reader.is_const(value) and reader.val(value).uniform == 0.0


def _fills_zeros(node: Node) -> bool:
    filling: Any = node.attrs.get("value")
    return filling is None or (filling.array is not None and not filling.array.any())


class DropImaginaryZeros(RegionRule, family="idioms"):
    """dft(concat(x, 0)) -> dft(x)  with real parts x and imaginary parts of 0."""

    canonicalises = True
    may_add_nonfinite = True  # where x is infinite, products with 0 need not be NaN in the same places
    may_remove_nonfinite = True
    proof = "numeric"
    relies_on = "a real signal is a complex one without imaginary parts"
    dtypes = frozenset({DType.FLOAT})
    anchors = ("DFT",)
    reads_from = ("Concat",)
    examples = graphs(
        "(float[N,4,3,1] x) => (float[N,4,3,2] y) { s = Shape(x) z = Expand(0.0, s) c = Concat<axis=3>(x, z) "
        "y = DFT(c, , 2) }",
        "(float[2,5,1] x) => (float[2,5,2] y) <float[2,5,1] z = {0,0,0,0,0,0,0,0,0,0}> { c = Concat<axis=-1>(x, z) "
        "y = DFT(c) }",
        "(float[2,5,1] x) => (float[2,5,2] y) { s = Shape(x) z = ConstantOfShape(s) c = Concat<axis=-1>(x, z) "
        "y = DFT(c) }",
    )
    near_misses = graphs(
        "(float[N,4,3,1] x) => (float[N,4,3,2] y) { s = Shape(x) z = Expand(1.0, s) c = Concat<axis=3>(x, z) "
        "y = DFT(c, , 2) }",
        "(float[N,4,3,1] x) => (float[N,4,6,1] y) { s = Shape(x) z = Expand(0.0, s) c = Concat<axis=2>(x, z) "
        "d = DFT(c, , 2) y = Slice(d, [0], [1], [3]) }",
        "(float[N,4,3,1] x) => (float[N,4,3,2] y) { s = Shape(x) z = Expand(0.0, s) c = Concat<axis=3>(z, x) "
        "y = DFT(c, , 2) }",
        "(float[2,5,1] x) => (float[2,8,1] y) { s = Shape(x) z = Expand(0.0, s) c = Concat<axis=-1>(x, z) "
        "y = DFT<inverse=1,onesided=1>(c) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        concat = made_by(reader, node.inputs[0], "Concat")
        rank = reader.type(node.inputs[0]).rank
        if concat is None or rank is None or len(concat.inputs) != 2 or axis_of(concat, rank) != rank - 1:
            return None
        x, imaginary = concat.inputs
        require(same_dims(reader.type(x).shape, reader.type(imaginary).shape or ()), "the sizes may not fit")
        if (reader.type(x).shape or ())[-1:] != (1,) or not _zeros(reader, imaginary):
            return None
        require(
            not (node.attrs.get("inverse") and node.attrs.get("onesided")), "half of a spectrum is complex"
        )
        return Region(node.outputs, (x, *node.inputs[1:]), (node,), node.attrs)

    def target(self, op: Op, region: Region, x: Val, *others: Val) -> Any:
        return op.DFT(x, *others, attrs=region.data)


def _bounded(shape: str, result: str, table: str, transform: str) -> str:
    """The text of a graph in which N is 31 at most: the first N numbers of a table of 31 are added to the input."""
    numbers = ",".join(map(str, range(31)))
    return (
        f"(float[{shape}] z) => (float[{result}] y) <float[{table}] t = {{{numbers}}}> "
        f"{{ n = Shape<start=1,end=2>(z) p = Slice(t, [0], n, [1]) x = Add(z, p) y = {transform} }}"
    )


class ReplaceDFTByMatMul(RegionRule, family="idioms"):
    """dft(x) -> x @ f  with the matrix f of the roots of unity, for the last axis before that of complex numbers; for
    another axis behind a transpose.

    For an open length n, f is computed: exp(-2 pi i (j k mod n) / n), once for all axes of this length. The model must
    bound it: n x n numbers of a recording would not fit into any memory.
    """

    backend = "onnxruntime"
    may_add_nonfinite = True  # an infinite element meets other roots of unity
    may_remove_nonfinite = True
    proof = "numeric"
    relies_on = "the definition of the transform"
    dtypes = frozenset({DType.FLOAT})
    anchors = ("DFT",)
    survivors: ClassVar[Mapping[str, str]] = {
        "attribute axis of Concat (call 39)": "for a length of 1 the numbers of the matrix lie the same"
    }
    examples = graphs(
        "(float[N,3,5,1] x) => (float[N,3,5,2] y) { y = DFT(x, , 2) }",
        "(float[N,3,5,2] x) => (float[N,3,5,2] y) { y = DFT(x, , 1) }",
        "(float[N,6,1] x) => (float[N,4,2] y) { y = DFT<onesided=1>(x) }",
        "(float[2,3,5,2] x) => (float[2,3,5,2] y) { y = DFT<inverse=1>(x, 5) }",
        _bounded("2,N,3,2", "2,N,3,2", "1,31,1,1", "DFT(x, , 1)"),
        _bounded("3,N,1", "3,N,2", "1,31,1", "DFT(x, , -2)"),
    )
    near_misses = graphs(
        "(float[2,3,5,2] x) => (float[2,3,4,2] y) { y = DFT(x, 4) }",
        "(float[2,5,2] x) => (float[2,8,1] y) { y = DFT<inverse=1,onesided=1>(x) }",
        _bounded("2,N,3,2", "2,N,3,2", "1,31,1,1", "DFT<inverse=1>(x, , 1)"),
        _bounded("2,N,3,1", "2,M,3,2", "1,31,1,1", "DFT<onesided=1>(x, , 1)"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, length, along = (*node.inputs, ABSENT, ABSENT)[:3]
        type = reader.type(x)
        if type.shape is None or type.shape[-1] not in (1, 2) or node.types[0].shape is None:
            return None
        require(along == ABSENT or reader.is_const(along), "the axis is computed")
        axis = front(-2 if along == ABSENT else int(reader.val(along).array.item()), len(type.shape))
        size = type.shape[axis]
        inverse, onesided = (bool(node.attrs.get(name)) for name in ("inverse", "onesided"))
        require(not (inverse and onesided), "the result is real")
        if isinstance(size, int):
            same = length == ABSENT or (
                reader.is_const(length) and int(reader.val(length).array.item()) == size
            )
            require(same, "the signal is cut off or filled up")
            require(size > 0, "there is no signal")
            rows, columns = (side * size for side in (type.shape[-1], 2))
            profitable(rows * columns <= _MOST_NUMBERS, "the matrix is too large")
            return Region(node.outputs, (x,), (node,), (axis, inverse, onesided, None))
        require(length == ABSENT, "the signal may be cut off or filled up")
        require(not inverse and not onesided, "the length is open")
        # The matrix has the square of the length.
        most = most_of(reader, size)
        profitable(most is not None and most * most <= _MOST_NUMBERS, "the length is open, and may be large")
        sized, at = carrier_of(reader, x, axis)
        return Region(node.outputs, (x, sized), (node,), (axis, False, False, at))

    def target(self, op: Op, region: Region, x: Val, *sized: Val) -> Any:
        axis, inverse, onesided, at = region.data
        last = x.rank - 2
        perm = list(range(x.rank))
        perm[axis], perm[last] = last, axis
        turned = x if axis == last else op.Transpose(x, perm=perm)
        y = self._open(op, turned, sized[0], at) if sized else self._known(op, turned, inverse, onesided)
        return y if axis == last else op.Transpose(y, perm=perm)

    @staticmethod
    def _known(op: Op, x: Val, inverse: bool, onesided: bool) -> Any:
        """The product with a matrix whose rows and columns alternate between real and imaginary parts."""
        n, parts, end = x.size(x.rank - 2), x.size(x.rank - 1), x.rank - 1
        m = n // 2 + 1 if onesided else n
        cosine, sine = _roots(op, np.int64(n), np.int64(m))
        rows = [(cosine, sine if inverse else op.Neg(sine))]
        if parts == 2:
            rows.append((op.Neg(sine) if inverse else sine, cosine))
        columns = [op.Concat(*(op.Unsqueeze(c, [2]) for c in row), axis=2) for row in rows]
        matrix = op.Concat(*(op.Unsqueeze(c, [1]) for c in columns), axis=1) if parts == 2 else columns[0]
        matrix = op.Reshape(op.Div(matrix, float(n)) if inverse else matrix, [n * parts, 2 * m])
        lead = [0] * (x.rank - 2)
        flat = op.Squeeze(x, [end]) if parts == 1 else op.Reshape(x, [*lead, parts * n])
        return op.Reshape(op.MatMul(flat, matrix), [*lead, m, 2])

    @staticmethod
    def _open(op: Op, x: Val, sized: Val, at: int) -> Any:
        n = op.Squeeze(op.Shape(sized, start=at, end=at + 1), [0])
        cosine, sine = _roots(op, n, n, x.shape[x.rank - 2])
        end = x.rank - 1
        real = op.Squeeze(op.Slice(x, [0], [1], [end]), [end])
        parts = [op.MatMul(real, cosine), op.Neg(op.MatMul(real, sine))]
        if x.size(end) == 2:
            imaginary = op.Squeeze(op.Slice(x, [1], [2], [end]), [end])
            parts = [
                op.Add(parts[0], op.MatMul(imaginary, sine)),
                op.Add(op.MatMul(imaginary, cosine), parts[1]),
            ]
        return op.Concat(*(op.Unsqueeze(p, [end]) for p in parts), axis=end)


def _roots(op: Op, n: Any, m: Any, open: Dim = None) -> tuple[Any, Any]:
    """Cosine and sine of 2 pi j k / n, for all j below n and k below m: float[n,m]. `open`: the dimension that n and m
    are, if they are computed.

    Angles are integers, in units of which n make a right angle, until they are between 0 and two right angles. So
    numbers that are 0 are 0.
    """
    declared = [TensorType(DType.INT64, (open,))] if open is not None else None
    lines = [op.Range(np.int64(0), size, np.int64(1), declared=declared) for size in (n, m)]
    right = op.Max(n, np.int64(1))  # an integer is not divided by 0, even if there is none
    half, whole = op.Mul(right, np.int64(2)), op.Mul(right, np.int64(4))
    turns = op.Mod(op.Mul(op.Mul(op.Unsqueeze(lines[0], [1]), lines[1]), np.int64(4)), whole)
    ahead = op.Mod(op.Add(turns, right), whole)
    return _sine(op, ahead, right, half), _sine(op, turns, right, half)


def _sine(op: Op, angle: Any, right: Any, half: Any) -> Any:
    quotient = op.Div(*(op.Cast(v, to=int(DType.FLOAT)) for v in (op.Mod(angle, half), right)))
    sine = op.Sin(op.Mul(quotient, np.pi / 2))
    return op.Where(op.Less(angle, half), sine, op.Neg(sine))
