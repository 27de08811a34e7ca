"""Rules that fold constants next to convolutions and matrix products into their weights, and that merge constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from rewrite_rules.elementwise import WIDE, sum_of
from rewrite_rules.shapes import either, per_rank
from xrlflow.ir import FLOATS, INTEGERS, Attrs
from xrlflow.rewrite import Captures, Op, Rule, Val, profitable, require

NUMBERS = FLOATS | INTEGERS


def group_of(attrs: Attrs) -> int:
    """A convolution's number of groups."""
    group = attrs.get("group", 1)
    assert isinstance(group, int)
    return group


def flat(op: Op, c: Val) -> Any:
    """The elements of a constant as one row."""
    return c if c.rank == 1 else op.Reshape(c, [-1])


def is_single(c: Val) -> bool:
    """Whether a constant has one element."""
    return all(d == 1 for d in c.sizes)


def scale_rows(op: Op, w: Val, s: Val) -> Any:
    """w[i, ...] * s[i] for each row i; if s is a single number, w * s."""
    return op.Mul(w, op.Reshape(s, [-1] + [1] * (w.rank - 1)))


def scale_columns(op: Op, w: Val, s: Val, group: int) -> Any:
    """w[g*i, j, ...] * s[g*j], where both w's rows and the columns of all groups are divided into `group` groups."""
    if group == 1 or is_single(s):
        return op.Mul(w, op.Reshape(s, [1, -1] + [1] * (w.rank - 2)))
    rows, columns, *kernel = w.sizes
    require(all(w.sizes), "a dimension is 0")
    parts = op.Reshape(w, [group, rows // group, columns, *kernel])
    scaled = op.Mul(parts, op.Reshape(s, [group, 1, columns] + [1] * len(kernel)))
    return op.Reshape(scaled, [rows, columns, *kernel])


def normalised(op: Op, x: Any, statistics: Sequence[Any], which: str = "") -> Any:
    """The pattern of a BatchNormalization, with scale, shift, mean and variance as `statistics`. Its epsilon is
    captured.
    """
    return op.BatchNormalization(x, *statistics, epsilon=f"epsilon{which}", momentum=f"momentum{which}")


def factor_and_shift(op: Op, statistics: Sequence[Val], epsilon: float) -> tuple[Any, Any]:
    """The factor and the shift for each channel that a BatchNormalization applies."""
    scale, shift, mean, var = statistics
    factor = op.Div(scale, op.Sqrt(op.Add(var, epsilon)))
    return factor, op.Sub(shift, op.Mul(mean, factor))


def folded_behind(op: Op, statistics: Sequence[Val], epsilon: float, b: Any) -> tuple[Any, Any]:
    """For a BatchNormalization after an operator with the bias b (None: none): its factor, and the bias of the merged
    operator.
    """
    scale, shift, mean, var = statistics
    factor = op.Div(scale, op.Sqrt(op.Add(var, epsilon)))
    centre = op.Neg(mean) if b is None else op.Sub(b, mean)
    return factor, op.Add(op.Mul(centre, factor), shift)


def _require_type(statistics: Sequence[Val], w: Val) -> None:
    """Refuse a scale or mean whose element type is not that of the weights."""
    scale, _, mean, _ = statistics
    require(scale.dtype == mean.dtype == w.dtype, "the statistics are of another element type")


# A BatchNormalization with parameters in float and data of another type.
STATISTICS = "float[2] s = {1, 2}, float[2] b = {3, 4}, float[2] m = {1, -1}, float[2] v = {1, 4}"

# A BatchNormalization whose means and variances have another element type than its scale.
_MIXED = STATISTICS.replace("float[2] m", "double[2] m").replace("float[2] v", "double[2] v")


class _Convolution(Rule, family="linear"):
    """A rule for operators next to a convolution. Conv has weights w[M, C/g, ...], ConvTranspose w[C, M/g, ...]."""

    convolution = "Conv"
    optional = ("b",)

    def outputs(self, w: Val, attrs: Attrs) -> int:
        """The number M of output channels."""
        return w.size(0) if self.convolution == "Conv" else w.size(1) * group_of(attrs)

    def scaled(self, op: Op, w: Val, s: Val, attrs: Attrs) -> Any:
        """The weights with each output channel scaled by s[M] (or a single number)."""
        if self.convolution == "Conv":
            return scale_rows(op, w, s)
        return scale_columns(op, w, s, group_of(attrs))

    def scaled_inputs(self, op: Op, w: Val, s: Val, attrs: Attrs) -> Any:
        """The weights with each input channel scaled by s[C] (or a single number)."""
        if self.convolution == "Conv":
            return scale_columns(op, w, s, group_of(attrs))
        return scale_rows(op, w, s)

    def added(self, op: Op, b: Val | None, c: Val, channels: int) -> Any:
        """The bias b[M] + c."""
        if b is not None:
            return op.Add(b, flat(op, c))
        return op.Expand(op.Reshape(c, [1]), [channels]) if is_single(c) else flat(op, c)

    def require_channel(self, c: Val, channels: int) -> None:
        require(is_single(c) or prod(c.sizes) == channels, "the constant is not one number per channel")


# Shapes of a constant that is one number, or one per channel, and that broadcasts against [N, C, ...].
_PER_CHANNEL = (
    "{0}[]:const",
    "{0}[1]:const",
    "{0}[1,1{{1}}]:const",
    "{0}[{1}{{1}}]:const",
    "{0}[1,{1}{{1}}]:const",
)


def _conv_shapes(name: str, channel: str, weight: str = "w[m,p{k}]:const", image: str = "x[i,c{h}]") -> str:
    return per_rank(*(f"{image} {weight} b[m]:const {shape.format(name, channel)}" for shape in _PER_CHANNEL))


class FoldBatchNormIntoConv(_Convolution):
    """batch_norm(conv(x, w, b)) -> conv(x, w * f, (b - mean) * f + shift)  with f = scale / sqrt(var + eps)."""

    may_add_nonfinite = True
    arity = (4, 4)
    shapes = per_rank("x[i,c{h}] w[m,p{k}]:const b[m]:const s*[m]:const")
    near_misses: ClassVar[tuple[str, ...]] = (
        f"agraph (double[N,2,3] x) => (double[N,2,3] y) <double[2,2,1] w = {{1, 2, 3, 4}}, {STATISTICS}>"
        " { a = Conv(x, w) y = BatchNormalization(a, s, b, m, v) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, *s: Any) -> Any:
        return normalised(op, op[self.convolution](x, w, b, attrs="c"), s)

    def where(self, x: Val, w: Val, b: Val | None, *s: Val) -> None:
        _require_type(s, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, *s: Val) -> Any:
        factor, bias = folded_behind(op, s, m.epsilon, b)
        return op[self.convolution](x, self.scaled(op, w, factor, m.c), bias, attrs=m.c)


class FoldBatchNormIntoConvTranspose(FoldBatchNormIntoConv):
    """batch_norm(conv_transpose(x, w, b)) -> conv_transpose(x, w * f, (b - mean) * f + shift)."""

    convolution = "ConvTranspose"
    near_misses = ()
    shapes = per_rank(
        "x[i,c{h}] w[c,m{k}]:const b[m]:const s*[m]:const", "x[i,c{h}] w[c,p{k}]:const b[m]:const s*[m]:const"
    )


class FoldScaleIntoConv(_Convolution):
    """conv(x, w, b) * s -> conv(x, w * s, b * s)  with s constant, one number or one per channel."""

    shapes = _conv_shapes("s", "m")

    def source(self, op: Op, x: Any, w: Any, b: Any, s: Any) -> Any:
        return op.Mul(op[self.convolution](x, w, b, attrs="c"), s)

    def where(self, m: Captures, w: Val, s: Val) -> None:
        self.require_channel(s, self.outputs(w, m.c))

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, s: Val) -> Any:
        bias = None if b is None else op.Mul(b, flat(op, s))
        return op[self.convolution](x, self.scaled(op, w, s, m.c), bias, attrs=m.c)


class FoldScaleIntoConvTranspose(FoldScaleIntoConv):
    """conv_transpose(x, w, b) * s -> conv_transpose(x, w * s, b * s)  with s constant."""

    convolution = "ConvTranspose"
    shapes = f"{_conv_shapes('s', 'm', 'w[c,m{k}]:const')} | {_conv_shapes('s', 'm', 'w[c,p{k}]:const')}"
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: the constant is not one number per channel": "one channel becomes many, and so does the filter of it"
    }


class FoldBiasIntoConv(_Convolution):
    """conv(x, w, b) + c -> conv(x, w, b + c)  with c constant, one number or one per channel."""

    shapes = _conv_shapes("c", "m", "w[m,p{k}]", "x[i,j{h}]")

    def source(self, op: Op, x: Any, w: Any, b: Any, c: Any) -> Any:
        return op.Add(op[self.convolution](x, w, b, attrs="c"), c)

    def where(self, m: Captures, w: Val, c: Val) -> None:
        self.require_channel(c, self.outputs(w, m.c))

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, c: Val) -> Any:
        return op[self.convolution](x, w, self.added(op, b, c, self.outputs(w, m.c)), attrs=m.c)


class FoldBiasIntoConvTranspose(FoldBiasIntoConv):
    """conv_transpose(x, w, b) + c -> conv_transpose(x, w, b + c)  with c constant."""

    convolution = "ConvTranspose"
    shapes = " | ".join(_conv_shapes("c", "m", f"w[j,{n}{{k}}]", "x[i,j{h}]") for n in ("m", "p"))


class FoldScaleBeforeConv(_Convolution):
    """conv(x * s, w, b) -> conv(x, w * s, b)  with s constant, one number or one per input channel."""

    shapes = _conv_shapes("s", "c")

    def source(self, op: Op, x: Any, w: Any, b: Any, s: Any) -> Any:
        return op[self.convolution](op.Mul(x, s), w, b, attrs="c")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, s: Val) -> Any:
        return op[self.convolution](x, self.scaled_inputs(op, w, s, m.c), b, attrs=m.c)


class FoldScaleBeforeConvTranspose(FoldScaleBeforeConv):
    """conv_transpose(x * s, w, b) -> conv_transpose(x, w * s, b)  with s constant."""

    convolution = "ConvTranspose"
    shapes = _conv_shapes("s", "c", "w[c,p{k}]:const").replace("b[m]", "b[...]")


class FoldBiasBeforeConv(_Convolution):
    """conv(x + t, w, b) -> conv(x, w, b + sum(w * t))  with t constant and a convolution that does not pad."""

    may_round_inputs = True
    shapes = _conv_shapes("t", "c")

    def source(self, op: Op, x: Any, w: Any, b: Any, t: Any) -> Any:
        return op.Conv(op.Add(x, t), w, b, attrs="c")

    def where(self, m: Captures) -> None:
        require("pads" not in m.c and "auto_pad" not in m.c, "the convolution pads")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, t: Val) -> Any:
        weighted = self.scaled_inputs(op, w, t, m.c)
        shift = op.ReduceSum(weighted, list(range(1, w.rank)), keepdims=0)
        return op.Conv(x, w, sum_of(op, b, shift), attrs=m.c)


class FoldBatchNormBeforeConv(_Convolution):
    """conv(batch_norm(x), w, b) -> conv(x, w * f, b + sum(w * (shift - mean * f)))  if it does not pad."""

    may_round_inputs = True
    may_lose_errors = ("sizes",)
    may_add_nonfinite = True
    arity = (4, 4)
    shapes = per_rank("x[i,c{h}] w[m,p{k}]:const b[m]:const s*[c]:const")
    near_misses = (
        f"agraph (double[N,2,3] x) => (double[N,2,3] y) <double[2,2,1] w = {{1, 2, 3, 4}}, {STATISTICS}>"
        " { a = BatchNormalization(x, s, b, m, v) y = Conv(a, w) }",
        f"agraph (float[N,2,3] x) => (float[N,2,3] y) <float[2,2,1] w = {{1, 2, 3, 4}}, {_MIXED}>"
        " { a = BatchNormalization(x, s, b, m, v) y = Conv(a, w) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, *s: Any) -> Any:
        return op.Conv(normalised(op, x, s), w, b, attrs="c")

    def where(self, m: Captures, x: Val, w: Val, b: Val | None, *s: Val) -> None:
        require("pads" not in m.c and "auto_pad" not in m.c, "the convolution pads")
        _require_type(s, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, *s: Val) -> Any:
        factor, offset = factor_and_shift(op, s, m.epsilon)
        offset_ = op.ReduceSum(self.scaled_inputs(op, w, offset, m.c), list(range(1, w.rank)), keepdims=0)
        return op.Conv(x, self.scaled_inputs(op, w, factor, m.c), sum_of(op, b, offset_), attrs=m.c)


# Shapes of a constant that is one number, or one per column, and that broadcasts against [..., n].
def _row(name: str, columns: str, const: str = ":const") -> tuple[str, ...]:
    shapes = ("", "1", columns, "1,1", f"1,{columns}", "1,1,1", f"1,1,{columns}")
    return tuple(f"{name}[{dims}]{const}" for dims in shapes)


class FoldScaleIntoMatMul(Rule, family="linear"):
    """(x @ w) * s -> x @ (w * s)  with w and s constant, s one number or one per column."""

    dtypes = NUMBERS
    shapes = either("x[...,a,k] w[...,k,n]:const", _row("s", "n"))

    def source(self, op: Op, x: Any, w: Any, s: Any) -> Any:
        return op.Mul(op.MatMul(x, w), s)

    def where(self, x: Val, w: Val, s: Val) -> None:
        require(s.rank <= max(x.rank, w.rank), "the product gets more dimensions")

    def target(self, op: Op, x: Val, w: Val, s: Val) -> Any:
        return op.MatMul(x, op.Mul(w, flat(op, s)))


class FoldScaleIntoLeftMatMul(Rule, family="linear"):
    """(w @ x) * s -> (w * s) @ x  with w and s constant, s one number or one per row."""

    dtypes = NUMBERS
    shapes = either(
        "w[...,n,k]:const x[...,k,a]", ("s[]:const", "s[1]:const", "s[1,1]:const", "s[n,1]:const")
    )

    def source(self, op: Op, w: Any, x: Any, s: Any) -> Any:
        return op.Mul(op.MatMul(w, x), s)

    def target(self, op: Op, w: Val, x: Val, s: Val) -> Any:
        return op.MatMul(op.Mul(w, s), x)


class FoldScaleBeforeMatMul(Rule, family="linear"):
    """(x * s) @ w -> x @ (s^T * w)  with w and s constant, s one number or one per column of x."""

    dtypes = NUMBERS
    shapes = either("x[...,a,k] w[...,k,n]:const", _row("s", "k"))

    def source(self, op: Op, x: Any, w: Any, s: Any) -> Any:
        return op.MatMul(op.Mul(x, s), w)

    def where(self, x: Val, s: Val) -> None:
        require(s.rank <= x.rank, "the product gets more dimensions")

    def target(self, op: Op, x: Val, w: Val, s: Val) -> Any:
        return op.MatMul(x, op.Mul(w, op.Reshape(s, [-1, 1])))


class MoveBiasBehindMatMul(Rule, family="linear"):
    """(x + t) @ w -> x @ w + t @ w  with w and t constant, t one number or one per column of x."""

    dtypes = NUMBERS
    may_round_inputs = True
    shapes = either("x[...,a,k] w[k,n]:const", _row("t", "k"))

    def source(self, op: Op, x: Any, w: Any, t: Any) -> Any:
        return op.MatMul(op.Add(x, t), w)

    def where(self, x: Val, t: Val) -> None:
        require(t.rank <= x.rank, "the sum gets more dimensions")

    def target(self, op: Op, x: Val, w: Val, t: Val) -> Any:
        return op.Add(op.MatMul(x, w), _times(op, t, w))


def _times(op: Op, t: Val, w: Val) -> Any:
    """The row t @ w for a constant row t (or a single number, which stands for a row of it)."""
    row = flat(op, t)
    if is_single(t):
        row = op.Expand(row, [w.size(0)])
    return op.MatMul(row, w)


class FoldBatchNormIntoMatMul(Rule, family="linear"):
    """batch_norm(x @ w) -> x @ (w * f) + (shift - mean * f)  for matrices, f = scale / sqrt(var + eps)."""

    may_add_nonfinite = True
    arity = (4, 4)
    dtypes = FLOATS
    shapes = "x[a,k] w[k,n]:const s*[n]:const"
    near_misses = (
        f"agraph (double[N,2] x) => (double[N,2] y) <double[2,2] w = {{1, 2, 3, 4}}, {STATISTICS}>"
        " { a = MatMul(x, w) y = BatchNormalization(a, s, b, m, v) }",
        f"agraph (float[N,2] x) => (float[N,2] y) <float[2,2] w = {{1, 2, 3, 4}}, {_MIXED}>"
        " { a = MatMul(x, w) y = BatchNormalization(a, s, b, m, v) }",
    )

    def source(self, op: Op, x: Any, w: Any, *s: Any) -> Any:
        return normalised(op, op.MatMul(x, w), s)

    def where(self, x: Val, w: Val, *s: Val) -> None:
        _require_type(s, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, *s: Val) -> Any:
        factor, offset = factor_and_shift(op, s, m.epsilon)
        return op.Add(op.MatMul(x, op.Mul(w, factor)), offset)


# Gemm's weights: as they are, or transposed.
_WEIGHT = ("w[k,n]:const", "w[n,k]:const")

# Gemm's bias, except one with a number per row.
_BIAS = ("b[]:const", "b[1]:const", "b[n]:const", "b[1,n]:const")


class _Gemm(Rule, family="linear"):
    """A rule for operators next to a Gemm with constant weights."""

    dtypes = FLOATS
    optional = ("b",)

    def columns(self, m: Captures, w: Val) -> int:
        return w.size(0 if m.c.get("transB") else 1)

    def scaled(self, op: Op, m: Captures, w: Val, s: Val) -> Any:
        """The weights with each column of the result scaled by s[n] (or a single number)."""
        return op.Mul(w, op.Reshape(s, [-1, 1] if m.c.get("transB") else [1, -1]))

    def bias(self, op: Op, m: Captures, b: Val) -> Any:
        """The bias of a Gemm times its beta."""
        beta = m.c.get("beta", 1.0)
        return b if beta == 1.0 else op.Mul(b, beta)

    def require_row(self, m: Captures, w: Val, s: Val) -> None:
        require(is_single(s) or s.size(-1) == self.columns(m, w), "the constant is not one number per column")


class FoldScaleIntoGemm(_Gemm):
    """gemm(x, w, b) * s -> gemm(x, w * s, b * s)  with w, b and s constant, s one number or one per column."""

    shapes = either("x[a,i]", _WEIGHT, _BIAS, _row("s", "n")[:5])

    def source(self, op: Op, x: Any, w: Any, b: Any, s: Any) -> Any:
        return op.Mul(op.Gemm(x, w, b, attrs="c"), s)

    def where(self, m: Captures, w: Val, s: Val) -> None:
        profitable(is_single(s) or s.size(-1) == self.columns(m, w), "the scale makes more columns")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, s: Val) -> Any:
        return op.Gemm(x, self.scaled(op, m, w, s), None if b is None else op.Mul(b, s), attrs=m.c)


class FoldBatchNormIntoGemm(_Gemm):
    """batch_norm(gemm(x, w, b)) -> gemm(x, w * f, (b - mean) * f + shift)  with f = scale / sqrt(var + eps)."""

    may_add_nonfinite = True
    arity = (4, 4)
    shapes = either("x[a,i]", _WEIGHT, _BIAS, "s*[n]:const")
    near_misses = (
        f"agraph (double[N,2] x) => (double[N,2] y) <double[2,2] w = {{1, 2, 3, 4}}, {STATISTICS}>"
        " { a = Gemm(x, w) y = BatchNormalization(a, s, b, m, v) }",
        f"agraph (float[N,2] x) => (float[N,2] y) <float[2,2] w = {{1, 2, 3, 4}}, {_MIXED}>"
        " { a = Gemm(x, w) y = BatchNormalization(a, s, b, m, v) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, *s: Any) -> Any:
        return normalised(op, op.Gemm(x, w, b, attrs="c"), s)

    def where(self, x: Val, w: Val, b: Val | None, *s: Val) -> None:
        _require_type(s, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, *s: Val) -> Any:
        factor, bias = folded_behind(op, s, m.epsilon, None if b is None else self.bias(op, m, b))
        return op.Gemm(x, self.scaled(op, m, w, factor), bias, attrs=m.c, beta=None)


class FoldBiasIntoGemm(_Gemm):
    """gemm(x, w, b) + c -> gemm(x, w, b + c)  with b and c constant, c one number or one per column."""

    shapes = either("x[...]", ("w[k,n]", "w[n,k]"), _BIAS, _row("c", "n")[:5])

    def source(self, op: Op, x: Any, w: Any, b: Any, c: Any) -> Any:
        return op.Add(op.Gemm(x, w, b, attrs="c"), c)

    def where(self, m: Captures, w: Val, c: Val) -> None:
        self.require_row(m, w, c)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, c: Val) -> Any:
        bias = c if b is None else op.Add(self.bias(op, m, b), c)
        return op.Gemm(x, w, bias, attrs=m.c, beta=None)


class FoldScaleBeforeGemm(_Gemm):
    """gemm(x * s, w, b) -> gemm(x, s^T * w, b)  with w and s constant, s one number or one per column of x."""

    shapes = either("x[a,k] b[...]", _WEIGHT, _row("s", "k")[:5])

    def source(self, op: Op, x: Any, w: Any, b: Any, s: Any) -> Any:
        return op.Gemm(op.Mul(x, s), w, b, attrs="c")

    def where(self, m: Captures) -> None:
        require(not m.c.get("transA"), "x is transposed")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, s: Val) -> Any:
        return op.Gemm(x, op.Mul(w, op.Reshape(s, [1, -1] if m.c.get("transB") else [-1, 1])), b, attrs=m.c)


class FoldBiasBeforeGemm(_Gemm):
    """gemm(x + t, w, b) -> gemm(x, w, b + t @ w)  with w, b and t constant, t one number or one per column."""

    may_round_inputs = True
    shapes = either("x[a,k]", _WEIGHT, _BIAS, _row("t", "k")[:5])

    def source(self, op: Op, x: Any, w: Any, b: Any, t: Any) -> Any:
        return op.Gemm(op.Add(x, t), w, b, attrs="c")

    def where(self, m: Captures) -> None:
        require(not m.c.get("transA"), "x is transposed")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, t: Val) -> Any:
        offset = _times(op, t, op.Transpose(w) if m.c.get("transB") else w)
        alpha = m.c.get("alpha", 1.0)
        if alpha != 1.0:
            offset = op.Mul(offset, alpha)
        return op.Gemm(
            x, w, offset if b is None else op.Add(self.bias(op, m, b), offset), attrs=m.c, beta=None
        )


class FuseMatMulAddIntoGemm(Rule, family="linear"):
    """x @ w + b -> gemm(x, w, b)  for matrices, b of at most the product's shape."""

    dtypes = WIDE
    shapes = either("x[a,k] w[k,n]", ("b[]", "b[1]", "b[n]", "b[1,1]", "b[1,n]", "b[a,1]", "b[a,n]"))

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Add(op.MatMul(x, w), b)

    def target(self, op: Op, x: Val, w: Val, b: Val) -> Any:
        return op.Gemm(x, w, b)


class SplitGemm(Rule, family="linear"):
    """gemm(x, w, b) -> x @ w + b."""

    nonempty = True
    dtypes = WIDE
    optional = ("b",)
    shapes = either("x[i,j] w[k,n]", ("b[]", "b[1]", "b[c]", "b[r,c]"))

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Gemm(x, w, b, alpha="alpha", beta="beta", transA="transA", transB="transB")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        rows = op.Transpose(x) if m.transA else x
        right = op.Transpose(w) if m.transB else w
        if m.alpha != 1.0:
            if x.const:
                rows = op.Mul(rows, m.alpha)
            else:
                right = op.Mul(right, m.alpha)
        y = op.MatMul(rows, right)
        if b is None:
            return y
        return op.Add(y, b if m.beta == 1.0 else op.Mul(b, m.beta))


# The reason why mutants without a condition on the magnitudes of numbers pass.
_ROOM = "the numbers have room in float64, and what the runtime computes in float32 is infinite on both sides"
