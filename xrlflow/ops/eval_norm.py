"""Evaluation of reductions, softmax and normalisations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xrlflow.ir import Attrs
from xrlflow.ops.eval_spec import (
    Evaluate,
    Inputs,
    OpSpec,
    f32,
    integer,
    integers,
    listed,
    number,
    several,
    single,
    table,
)
from xrlflow.ops.field import Array, Field

Axes = tuple[int, ...] | None
EPSILON = f32(1e-5)


def _reduction(reduce: Callable[[Field, Array, Axes, bool], Array], prepared: bool = False) -> Evaluate:
    """Evaluation of a reduction whose axes are an input. `prepared`: whether `reduce` is called even if there are no
    axes to reduce, because it changes each element (a sum of squares, for example).
    """

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        x = inputs[0]
        assert x is not None
        axes = listed(inputs[1]) if len(inputs) > 1 else None
        if not axes:
            axes = None
            if integer(attrs, "noop_with_empty_axes", 0):
                if not prepared:
                    return (x,)
                axes = ()
        y = np.asarray(reduce(field, x, axes, bool(integer(attrs, "keepdims", 1))))
        return (y if y.dtype == x.dtype or x.dtype.kind == "f" else y.astype(x.dtype),)

    return evaluate


def _sum(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.sum(x, axes, keep)


def _mean(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.mean(x, axes, keep)


def _prod(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.prod(x, axes, keep)


def _max(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.max(x, axes, keep)


def _min(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.min(x, axes, keep)


def _l1(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.sum(field.unary("abs", x), axes, keep)


def _l2(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.unary("sqrt", _sum_square(field, x, axes, keep))


def _sum_square(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.sum(field.square(x), axes, keep)


def _log_sum(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    return field.unary("log", field.sum(x, axes, keep))


def _log_sum_exp(field: Field, x: Array, axes: Axes, keep: bool) -> Array:
    shift = field.stabiliser(x, axes)
    y = field.unary("log", field.sum(field.unary("exp", field.sub(x, shift)), axes, True))
    y = np.asarray(field.add(y, shift))
    return y if keep else y.squeeze(axes)


def _cumsum(field: Field, attrs: Attrs, x: Array, axis: Array) -> Array:
    along = int(axis.item())
    if integer(attrs, "reverse", 0):
        x = np.flip(x, along)
    y = field.cumsum(x, along)
    if integer(attrs, "exclusive", 0):
        y = np.roll(y, 1, along)
        y[(slice(None),) * (along % x.ndim) + (0,)] = 0
    return np.flip(y, along) if integer(attrs, "reverse", 0) else y


# --- softmax ---


def _top(field: Field, x: Array, axis: int) -> Any:
    """What softmax subtracts from a row: its greatest element. If that is infinite, the row becomes NaN, as in
    runtimes.
    """
    return field.max(x, (axis,), True) if field.real else field.stabiliser(x, (axis,))


def softmax(field: Field, x: Array, axis: int) -> Array:
    powers = field.unary("exp", field.sub(x, _top(field, x, axis)))
    return field.div(powers, field.sum(powers, (axis,), True))


def _softmax(field: Field, attrs: Attrs, x: Array) -> Array:
    return softmax(field, x, integer(attrs, "axis", -1))


def _log_softmax(field: Field, attrs: Attrs, x: Array) -> Array:
    axis = integer(attrs, "axis", -1)
    y = field.sub(x, _top(field, x, axis))
    return field.sub(y, field.unary("log", field.sum(field.unary("exp", y), (axis,), True)))


def _hardmax(field: Field, attrs: Attrs, x: Array) -> Array:
    axis = integer(attrs, "axis", -1)
    y = np.zeros_like(x)
    np.put_along_axis(y, np.expand_dims(np.argmax(x, axis=axis), axis), 1, axis)
    return y


# --- normalisation ---


def _inverse_deviation(field: Field, variance: Array, epsilon: float) -> Array:
    deviation = field.unary("sqrt", field.add(variance, field.constant(epsilon)))
    return field.div(field.constant(1), deviation)


def _moments(field: Field, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Mean, deviation from the mean, and variance of x over the axes."""
    mean = field.mean(x, axes, True)
    centred = field.sub(x, mean)
    return mean, centred, field.mean(field.square(centred), axes, True)


def _along_channels(x: Array, parameter: Array) -> Array:
    if parameter.size != x.shape[1]:
        raise ValueError(f"{parameter.size} parameters for {x.shape[1]} channels")
    return parameter.reshape(-1, *(1,) * (x.ndim - 2))


def _batch_norm(
    field: Field, attrs: Attrs, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> tuple[Any, ...]:
    outputs: tuple[Any, ...] = ()
    if integer(attrs, "training_mode", 0):
        axes = (0, *range(2, x.ndim))
        batch_mean, _, batch_variance = _moments(field, x, axes)
        keep = field.constant(number(attrs, "momentum", f32(0.9)))
        complement = field.sub(field.constant(1), keep)
        batch_mean, batch_variance = batch_mean.reshape(-1), batch_variance.reshape(-1)
        outputs = tuple(
            field.add(field.mul(old, keep), field.mul(new, complement))
            for old, new in ((mean, batch_mean), (variance, batch_variance))
        )
        mean, variance = batch_mean, batch_variance
    factor = field.mul(scale, _inverse_deviation(field, variance, number(attrs, "epsilon", EPSILON)))
    y = field.mul(field.sub(x, _along_channels(x, mean)), _along_channels(x, factor))
    return (field.add(y, _along_channels(x, bias)), *outputs)


def _instance_norm(field: Field, attrs: Attrs, x: Array, scale: Array, bias: Array) -> Array:
    _, centred, variance = _moments(field, x, tuple(range(2, x.ndim)))
    y = field.mul(centred, _inverse_deviation(field, variance, number(attrs, "epsilon", EPSILON)))
    return field.add(field.mul(y, _along_channels(x, scale)), _along_channels(x, bias))


def _group_norm(field: Field, attrs: Attrs, x: Array, scale: Array, bias: Array) -> Array:
    grouped = x.reshape(x.shape[0], integer(attrs, "num_groups", 1), -1)
    _, centred, variance = _moments(field, grouped, (2,))
    y = field.mul(centred, _inverse_deviation(field, variance, number(attrs, "epsilon", EPSILON)))
    y = y.reshape(x.shape)
    return field.add(field.mul(y, _along_channels(x, scale)), _along_channels(x, bias))


def _from(axis: int, x: Array) -> tuple[int, ...]:
    """An axis and all axes after it."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} of {x.shape}")
    return tuple(range(axis % x.ndim, x.ndim))


def layer_norm(
    field: Field, x: Array, scale: Array, bias: Array | None, axis: int, epsilon: float
) -> tuple[Array, Array, Array]:
    """The normalised output, the mean, and the inverse standard deviation."""
    mean, centred, variance = _moments(field, x, _from(axis, x))
    inverse = _inverse_deviation(field, variance, epsilon)
    y = field.mul(field.mul(centred, inverse), scale)
    return (y if bias is None else field.add(y, bias)), mean, inverse


def _layer_norm(
    field: Field, attrs: Attrs, x: Array, scale: Array, bias: Array | None = None
) -> tuple[Any, ...]:
    axis = integer(attrs, "axis", -1)
    return layer_norm(field, x, scale, bias, axis, number(attrs, "epsilon", EPSILON))


def rms_norm(field: Field, x: Array, scale: Array, axis: int, epsilon: float) -> Array:
    square = field.mean(field.square(x), _from(axis, x), True)
    return field.mul(field.mul(x, _inverse_deviation(field, square, epsilon)), scale)


def _rms_norm(field: Field, attrs: Attrs, x: Array, scale: Array) -> Array:
    return rms_norm(field, x, scale, integer(attrs, "axis", -1), number(attrs, "epsilon", EPSILON))


def _mean_variance_norm(field: Field, attrs: Attrs, x: Array) -> Array:
    _, centred, variance = _moments(field, x, integers(attrs, "axes") or (0, 2, 3))
    deviation = field.add(field.unary("sqrt", variance), field.constant(f32(1e-9)))
    return field.div(centred, deviation)


def _lp_norm(field: Field, attrs: Attrs, x: Array) -> Array:
    """The normalised x. A vector of zeros stays zeros."""
    axis = (integer(attrs, "axis", -1),)
    norm = (_l1 if integer(attrs, "p", 2) == 1 else _l2)(field, x, axis, True)
    zero = field.compare("equal", norm, 0)
    if not zero.any():
        return field.div(x, norm)
    return np.where(zero, 0.0, field.div(x, np.where(zero, field.constant(1), norm)))


def _lrn(field: Field, attrs: Attrs, x: Array) -> Array:
    size = integer(attrs, "size", 1)
    before = (size - 1) // 2
    square = field.square(x)
    channels = x.shape[1]
    total = np.zeros_like(x)
    for shift in range(-before, size - before):
        # Channel c gets the square of channel c + shift.
        to = slice(max(0, -shift), channels - max(0, shift))
        if to.start < to.stop:
            total[:, to] = field.add(total[:, to], square[:, to.start + shift : to.stop + shift])
    factor = field.div(field.constant(number(attrs, "alpha", f32(0.0001))), field.constant(size))
    base = field.add(field.constant(number(attrs, "bias", 1.0)), field.mul(factor, total))
    return field.div(x, field.binary("pow", base, field.constant(number(attrs, "beta", 0.75))))


SPECS: dict[str, OpSpec] = {
    **table(
        "polynomial",
        CumSum=single(_cumsum),
        ReduceMean=_reduction(_mean),
        ReduceProd=_reduction(_prod),
        ReduceSum=_reduction(_sum),
        ReduceSumSquare=_reduction(_sum_square, prepared=True),
    ),
    **table(
        "uninterpreted",
        BatchNormalization=several(_batch_norm),
        GroupNormalization=single(_group_norm),
        InstanceNormalization=single(_instance_norm),
        LayerNormalization=several(_layer_norm),
        LogSoftmax=single(_log_softmax),
        LpNormalization=single(_lp_norm),
        LRN=single(_lrn),
        MeanVarianceNormalization=single(_mean_variance_norm),
        ReduceL1=_reduction(_l1, prepared=True),
        ReduceL2=_reduction(_l2, prepared=True),
        ReduceLogSum=_reduction(_log_sum, prepared=True),
        ReduceLogSumExp=_reduction(_log_sum_exp, prepared=True),
        ReduceMax=_reduction(_max),
        ReduceMin=_reduction(_min),
        RMSNormalization=single(_rms_norm),
        Softmax=single(_softmax),
    ),
    **table("numeric", Hardmax=single(_hardmax)),
}
