"""Evaluation of the operators that move data: shapes, slices, gathers, scatters, generators."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper

from xrlflow.ir import Attrs, DType, RawAttr
from xrlflow.ops.eval_elementwise import cast, promote
from xrlflow.ops.eval_spec import (
    Inputs,
    OpSpec,
    integer,
    integers,
    listed,
    optional_integer,
    single,
    string,
    table,
)
from xrlflow.ops.field import Array, Field, NotEvaluable


def _reshape(field: Field, attrs: Attrs, x: Array, shape: Array) -> Array:
    if shape.ndim != 1:
        raise ValueError(f"Reshape to what is no list, but of shape {shape.shape}")
    target = shape.tolist()
    if not integer(attrs, "allowzero", 0):
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    if min(target, default=0) < -1:  # NumPy accepts any negative number as -1
        raise ValueError(f"Reshape to {target}")
    return x.reshape(target)


def _transpose(field: Field, attrs: Attrs, x: Array) -> Array:
    return x.transpose(attrs.get("perm"))  # type: ignore[arg-type]


def _squeeze(field: Field, attrs: Attrs, x: Array, axes: Array | None = None) -> Array:
    return x.squeeze(listed(axes))


def _unsqueeze(field: Field, attrs: Attrs, x: Array, axes: Array) -> Array:
    return np.expand_dims(x, listed(axes) or ())


def _flatten(field: Field, attrs: Attrs, x: Array) -> Array:
    axis = integer(attrs, "axis", 1)
    rows = prod(x.shape[: axis if axis >= 0 else axis + x.ndim])
    return x.reshape(rows, prod(x.shape) // rows if rows else prod(x.shape[axis:]))


def _expand(field: Field, attrs: Attrs, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist())))


def _tile(field: Field, attrs: Attrs, x: Array, repeats: Array) -> Array:
    return np.tile(x, tuple(repeats.tolist()))


def _concat(field: Field, attrs: Attrs, *inputs: Array) -> Array:
    return np.concatenate(inputs, axis=integer(attrs, "axis", 0))


def _split(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    x = inputs[0]
    assert x is not None
    axis = integer(attrs, "axis", 0)
    sizes = listed(inputs[1]) if len(inputs) > 1 else None
    if sizes is None:
        parts = integer(attrs, "num_outputs", outputs)
        chunk = -(-x.shape[axis] // parts)
        ends = [min(chunk * (i + 1), x.shape[axis]) for i in range(parts - 1)]
    else:
        if sum(sizes) != x.shape[axis]:
            raise ValueError(f"parts of {sizes} do not make {x.shape[axis]}")
        ends = np.cumsum(sizes)[:-1].tolist()
    return tuple(np.split(x, ends, axis=axis))


def ends_of_slice(ends: Array, steps: Array) -> Array:
    """The ends of a slice, as ONNX defines them. The same array if nothing changes.

    ONNX Runtime takes the largest int32 and int64 as "up to the last element" for negative steps, too: such a slice
    includes the first element of the axis.
    """
    if ends.shape != steps.shape:  # the operator fails for such inputs
        return ends
    largest = [n for n in (2**31 - 1, 2**63 - 1) if n <= np.iinfo(ends.dtype).max]
    beyond = np.isin(ends, largest) & (steps < 0)
    return np.where(beyond, np.iinfo(ends.dtype).min, ends).astype(ends.dtype) if beyond.any() else ends


def _slice(
    field: Field,
    attrs: Attrs,
    x: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    begin = starts.tolist()
    axis = axes.tolist() if axes is not None else range(len(begin))
    step = steps.tolist() if steps is not None else [1] * len(begin)
    end = (ends if steps is None else ends_of_slice(ends, steps)).tolist()
    index: list[Any] = [slice(None)] * x.ndim
    for a, b, e, s in zip(axis, begin, end, step):
        size = x.shape[a]
        if b < 0:
            b += size
        if e < 0:
            e += size
        if s > 0:
            index[a] = slice(min(max(b, 0), size), min(max(e, 0), size), s)
        else:
            last = min(max(e, -1), size - 1)
            index[a] = slice(min(max(b, 0), size - 1), None if last < 0 else last, s)
    return x[tuple(index)]  # type: ignore[no-any-return]


def pad(x: Array, before: list[int], after: list[int], mode: str, value: Any) -> Array:
    """`x` with this many elements added (or, if negative, removed) before and after, along each axis."""
    crop = tuple(
        slice(max(0, -b), size - max(0, -a)) for b, a, size in zip(before, after, x.shape, strict=True)
    )
    x = x[crop]
    widths = [(max(0, b), max(0, a)) for b, a in zip(before, after)]
    if not any(b or a for b, a in widths):
        return x
    if mode == "constant":
        out = np.full([s + b + a for s, (b, a) in zip(x.shape, widths)], value, dtype=x.dtype)
        out[tuple(slice(b, b + s) for s, (b, _) in zip(x.shape, widths))] = x
        return out
    return np.pad(x, widths, mode=mode)  # type: ignore[call-overload, no-any-return]


def _pad(
    field: Field,
    attrs: Attrs,
    x: Array,
    pads: Array,
    value: Array | None = None,
    axes: Array | None = None,
) -> Array:
    which = listed(axes)
    if which is None:
        which = tuple(range(x.ndim))
    sizes, n = pads.tolist(), len(which)
    before, after = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(which):
        before[axis], after[axis] = sizes[i], sizes[i + n]
    fill = 0 if value is None or value.size == 0 else value.reshape(-1)[0]
    return pad(x, before, after, string(attrs, "mode", "constant"), fill)


def _center_crop_pad(field: Field, attrs: Attrs, x: Array, shape: Array) -> Array:
    axes = integers(attrs, "axes") or tuple(range(x.ndim))
    for axis, length in zip(axes, shape.tolist()):
        size = x.shape[axis]
        before, after = [0] * x.ndim, [0] * x.ndim
        extra = length - size
        if extra >= 0:
            before[axis] = extra // 2
        else:
            before[axis] = -(-extra // 2)
        after[axis] = extra - before[axis]
        x = pad(x, before, after, "constant", 0)
    return x


def _gather(field: Field, attrs: Attrs, x: Array, indices: Array) -> Array:
    axis = integer(attrs, "axis", 0)
    if x.size == 0 and indices.size and not -x.shape[axis] <= indices.min() <= indices.max() < x.shape[axis]:
        raise IndexError(
            f"Gather beyond the {x.shape[axis]} positions of an axis"
        )  # NumPy does not check this
    return x.take(indices, axis=axis)


def _within(x: Array, axis: int, indices: Array) -> Array:
    """`x`, cut to the size of `indices` along every axis except `axis`."""
    if all(i == axis or a == b for i, (a, b) in enumerate(zip(x.shape, indices.shape))):
        return x
    return x[tuple(slice(None) if i == axis else slice(0, s) for i, s in enumerate(indices.shape))]


def _gather_elements(field: Field, attrs: Attrs, x: Array, indices: Array) -> Array:
    axis = integer(attrs, "axis", 0) % max(x.ndim, 1)
    return np.take_along_axis(_within(x, axis, indices), indices.astype(np.int64, copy=False), axis)


def _tuple_index(indices: Array, batch: int, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """The index arrays in the last axis of `indices`, after index arrays for the `batch` leading axes."""
    grids = np.indices(indices.shape[:-1], sparse=True)[:batch]
    return (*grids, *np.moveaxis(indices, -1, 0))


def _gather_nd(field: Field, attrs: Attrs, x: Array, indices: Array) -> Array:
    return x[_tuple_index(indices, integer(attrs, "batch_dims", 0), x.shape)]


_REDUCTIONS = {"add": "add", "mul": "mul", "max": "max", "min": "min"}


def _scatter_into(field: Field, attrs: Attrs, x: Array, index: Any, updates: Array) -> Array:
    out = x.copy()
    reduction = string(attrs, "reduction", "none")
    if reduction == "none":
        out[index] = updates
    else:
        field.scatter(_REDUCTIONS[reduction], out, index, updates)
    return out


def _scatter_elements(field: Field, attrs: Attrs, x: Array, indices: Array, updates: Array) -> Array:
    axis = integer(attrs, "axis", 0) % max(x.ndim, 1)
    index: list[Any] = list(np.indices(indices.shape, sparse=True))
    index[axis] = indices
    return _scatter_into(field, attrs, x, tuple(index), updates)


def _scatter_nd(field: Field, attrs: Attrs, x: Array, indices: Array, updates: Array) -> Array:
    return _scatter_into(field, attrs, x, tuple(np.moveaxis(indices, -1, 0)), updates)


# --- generators ---


def _shape(field: Field, attrs: Attrs, x: Array) -> Array:
    shape = x.shape[integer(attrs, "start", 0) : optional_integer(attrs, "end")]
    return np.array(shape, dtype=np.int64)


def _size(field: Field, attrs: Attrs, x: Array) -> Array:
    return np.array(x.size, dtype=np.int64)


def _range(field: Field, attrs: Attrs, start: Array, limit: Array, delta: Array) -> Array:
    if start.dtype.kind == "f" and not field.real:
        raise NotEvaluable("Range of floats")
    first, step = start.item(), delta.item()
    count = max(0, int(np.ceil((limit.item() - first) / step)))
    return np.asarray(first + np.arange(count, dtype=start.dtype) * step, dtype=start.dtype)


def tensor(field: Field, attr: RawAttr) -> Array:
    """The tensor of a tensor attribute. Floats become elements of the field."""
    array = onnx.numpy_helper.to_array(onnx.AttributeProto.FromString(attr.proto).t)
    return promote(field, array)


def _constant_of_shape(field: Field, attrs: Attrs, shape: Array) -> Array:
    value = attrs.get("value")
    fill = tensor(field, value).reshape(()) if isinstance(value, RawAttr) else np.float64(0)
    return np.broadcast_to(fill, shape.tolist())


def _constant(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    (name, value), *_ = attrs.items()
    if isinstance(value, RawAttr):
        if name != "value":
            raise NotEvaluable(f"Constant with {name}")
        return (tensor(field, value),)
    if isinstance(value, (str, bytes)):
        return (np.array(value, dtype=object),)
    if isinstance(value, tuple):
        if name == "value_ints":
            return (np.array(value, dtype=np.int64),)
        if name == "value_floats":
            return (np.array([field.constant(v) for v in value], dtype=np.float64),)  # type: ignore[arg-type]
        return (np.array(value, dtype=object),)
    if isinstance(value, int):
        return (np.array(value, dtype=np.int64),)
    return (np.array(field.constant(value), dtype=np.float64),)  # type: ignore[arg-type]


def _eye_like(field: Field, attrs: Attrs, x: Array) -> Array:
    rows, columns = x.shape
    out = np.eye(rows, columns, k=integer(attrs, "k", 0), dtype=np.int64)
    if "dtype" in attrs:
        return cast(field, out, DType(integer(attrs, "dtype", 1)))
    return out.astype(x.dtype)


def _trilu(field: Field, attrs: Attrs, x: Array, k: Array | None = None) -> Array:
    shift = 0 if k is None else int(k.item())
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    keep = columns - rows >= shift if integer(attrs, "upper", 1) else columns - rows <= shift
    return np.where(keep, x, np.zeros((), x.dtype))


def _one_hot(field: Field, attrs: Attrs, indices: Array, depth: Array, values: Array) -> Array:
    axis, n = integer(attrs, "axis", -1), int(depth.reshape(-1)[0])
    axis = axis if axis >= 0 else axis + indices.ndim + 1
    hot = np.trunc(indices).astype(np.int64)
    hot = np.where((hot >= -n) & (hot < n), hot % max(n, 1), -1)
    classes = np.arange(n).reshape([-1 if i == axis else 1 for i in range(indices.ndim + 1)])
    return np.where(np.expand_dims(hot, axis) == classes, values[1], values[0])  # type: ignore[no-any-return]


def _non_zero(field: Field, attrs: Attrs, x: Array) -> Array:
    return np.array(np.nonzero(np.atleast_1d(x)), dtype=np.int64)


def _compress(field: Field, attrs: Attrs, x: Array, condition: Array) -> Array:
    return np.compress(condition, x, axis=optional_integer(attrs, "axis"))


def _depth_to_space(field: Field, attrs: Attrs, x: Array) -> Array:
    n, c, h, w = x.shape
    b = integer(attrs, "blocksize", 1)
    if string(attrs, "mode", "DCR") == "DCR":
        parts = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // (b * b), h * b, w * b)


def _space_to_depth(field: Field, attrs: Attrs, x: Array) -> Array:
    n, c, h, w = x.shape
    b = integer(attrs, "blocksize", 1)
    parts = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * b * b, h // b, w // b)


def _reverse_sequence(field: Field, attrs: Attrs, x: Array, lengths: Array) -> Array:
    time, batch = integer(attrs, "time_axis", 0), integer(attrs, "batch_axis", 1)
    transposed = np.moveaxis(x, (batch, time), (0, 1))
    steps = np.arange(transposed.shape[1])
    until = lengths.reshape(-1, 1)
    index = np.where(steps < until, until - 1 - steps, steps)
    return np.moveaxis(transposed[np.arange(transposed.shape[0])[:, None], index], (0, 1), (batch, time))


# --- sorting ---


def _arg(field: Field, attrs: Attrs, x: Array, largest: bool) -> Array:
    axis = integer(attrs, "axis", 0)
    pick = np.argmax if largest else np.argmin
    if integer(attrs, "select_last_index", 0):
        out = x.shape[axis] - 1 - pick(np.flip(x, axis), axis=axis)
    else:
        out = pick(x, axis=axis)
    out = np.asarray(out, dtype=np.int64)
    return np.expand_dims(out, axis) if integer(attrs, "keepdims", 1) else out


def _arg_max(field: Field, attrs: Attrs, x: Array) -> Array:
    return _arg(field, attrs, x, True)


def _arg_min(field: Field, attrs: Attrs, x: Array) -> Array:
    return _arg(field, attrs, x, False)


def _top_k(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    """The greatest or least elements, and their indices. Of equal elements, the one with the lower index comes
    first.
    """
    x, k = inputs
    assert x is not None
    assert k is not None
    axis = integer(attrs, "axis", -1)
    if k.item() < 0:  # NumPy would return nothing
        raise ValueError(f"TopK of {k.item()} elements")
    if integer(attrs, "largest", 1):
        backwards = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
        order = x.shape[axis] - 1 - np.flip(backwards, axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    order = np.take(order, np.arange(int(k.item())), axis=axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64, copy=False)


def _unique(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    x = inputs[0]
    assert x is not None
    axis = optional_integer(attrs, "axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not integer(attrs, "sorted", 1):
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values = np.take(values, order, axis=axis or 0)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    return values, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64)


SPECS: dict[str, OpSpec] = {
    **table(
        "movement",
        CenterCropPad=single(_center_crop_pad),
        Compress=single(_compress),
        Concat=single(_concat),
        Constant=_constant,
        ConstantOfShape=single(_constant_of_shape),
        DepthToSpace=single(_depth_to_space),
        Expand=single(_expand),
        EyeLike=single(_eye_like),
        Flatten=single(_flatten),
        Gather=single(_gather),
        GatherElements=single(_gather_elements),
        GatherND=single(_gather_nd),
        OneHot=single(_one_hot),
        Pad=single(_pad),
        Range=single(_range),
        Reshape=single(_reshape),
        ReverseSequence=single(_reverse_sequence),
        ScatterElements=single(_scatter_elements),
        ScatterND=single(_scatter_nd),
        Shape=single(_shape),
        Size=single(_size),
        Slice=single(_slice),
        SpaceToDepth=single(_space_to_depth),
        Split=_split,
        Squeeze=single(_squeeze),
        Tile=single(_tile),
        Transpose=single(_transpose),
        Trilu=single(_trilu),
        Unsqueeze=single(_unsqueeze),
    ),
    **table(
        "numeric",
        ArgMax=single(_arg_max),
        ArgMin=single(_arg_min),
        NonZero=single(_non_zero),
        TopK=_top_k,
        Unique=_unique,
    ),
}
