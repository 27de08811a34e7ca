"""Evaluation of products, convolutions and pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from xrlflow.ir import Attrs
from xrlflow.ops.eval_shape import pad
from xrlflow.ops.eval_spec import Inputs, OpSpec, integer, integers, number, single, string, table
from xrlflow.ops.field import Array, Field, NotEvaluable, extreme

# The most elements of the matrix of windows that a convolution builds at a time (16 MiB of float64).
UNFOLDED = 1 << 21


def _matmul(field: Field, attrs: Attrs, a: Array, b: Array) -> Array:
    return field.matmul(a, b)


def gemm(field: Field, attrs: Attrs, a: Array, b: Array, c: Array | None = None) -> Array:
    alpha, beta = number(attrs, "alpha", 1.0), number(attrs, "beta", 1.0)
    y = field.matmul(
        a.T if integer(attrs, "transA", 0) else a,
        b.T if integer(attrs, "transB", 0) else b,
    )
    integral = y.dtype.kind != "f"
    if alpha != 1.0:
        y = field.mul(y, int(alpha) if integral else field.constant(alpha))
    if c is not None and beta != 0.0:
        if beta != 1.0:
            c = field.mul(c, int(beta) if integral else field.constant(beta))
        if np.broadcast_shapes(y.shape, c.shape) != y.shape:
            raise ValueError(f"Gemm with a bias of {c.shape} for {y.shape}")
        y = field.add(y, c)
    return y


# --- Einstein sums ---


def _labels(term: str, rank: int | None, ellipsis: list[str]) -> list[str]:
    """The labels of a term. "..." becomes the last labels of `ellipsis`: as many as the rank has besides the other
    labels.
    """
    if "..." not in term:
        return list(term)
    left, right = term.split("...")
    free = len(ellipsis) if rank is None else rank - len(left) - len(right)
    return [*left, *ellipsis[len(ellipsis) - free :], *right]


def contract(field: Field, equation: str, operands: Sequence[Array]) -> Array:
    """An Einstein sum. Operands are combined from left to right, each by a batched product of matrices."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = max(x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True))
    ellipsis = [f"...{i}" for i in range(free)]
    labels = [_labels(t, x.ndim, ellipsis) for t, x in zip(terms, operands)]
    if arrow:
        result = _labels(right, None, ellipsis)
    else:
        flat = [label for one in labels for label in one]
        once = sorted(label for label in set(flat) if flat.count(label) == 1 and len(label) == 1)
        result = [*(ellipsis if "..." in left else []), *once]

    sizes: dict[str, int] = {}
    for one, x in zip(labels, operands):
        for label, size in zip(one, x.shape):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    parts: list[tuple[list[str], Array]] = []
    for one, x in zip(labels, operands):
        x = np.broadcast_to(x, [sizes[label] for label in one])
        unique = list(dict.fromkeys(one))
        if len(unique) < len(one):  # a label occurs twice: take the diagonal
            number_of = {label: i for i, label in enumerate(unique)}
            x = np.einsum(x, [number_of[label] for label in one], [number_of[label] for label in unique])
        parts.append((unique, x))

    current, x = parts[0]
    for i, (following, y) in enumerate(parts[1:], start=2):
        required = set(result).union(*(one for one, _ in parts[i:]))
        current, x = _sum_out(field, current, x, required.union(following))
        following, y = _sum_out(field, following, y, required.union(current))
        batch = [label for label in current if label in following and label in required]
        inner = [label for label in current if label in following and label not in required]
        rows = [label for label in current if label not in following]
        columns = [label for label in following if label not in current]
        x = x.transpose([current.index(label) for label in (*batch, *rows, *inner)])
        y = y.transpose([following.index(label) for label in (*batch, *inner, *columns)])
        lead = [sizes[label] for label in batch]
        m, k, n = (prod(sizes[label] for label in part) for part in (rows, inner, columns))
        x, y = x.reshape(*lead, m, k), y.reshape(*lead, k, n)
        x = field.matmul(x, y) if inner else field.mul(x, y)
        current = [*batch, *rows, *columns]
        x = x.reshape([sizes[label] for label in current])
    current, x = _sum_out(field, current, x, set(result))
    return x.transpose([current.index(label) for label in result])


def _sum_out(field: Field, labels: list[str], x: Array, remaining: set[str]) -> tuple[list[str], Array]:
    axes = tuple(i for i, label in enumerate(labels) if label not in remaining)
    if not axes:
        return labels, x
    return [label for label in labels if label in remaining], field.sum(x, axes)


def _einsum(field: Field, attrs: Attrs, *operands: Array) -> Array:
    return contract(field, string(attrs, "equation", ""), operands)


# --- windows ---


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a convolution or pool: their sizes and positions, for each spatial axis, in elements."""

    size: tuple[int, ...]  # the sizes of the input
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]  # the padding as declared
    out: tuple[int, ...]

    @property
    def overhang(self) -> tuple[int, ...]:
        """The padding at the end that the last window needs. Negative: how many elements at the end it does not
        reach.
        """
        return tuple(
            (o - 1) * s + d * (k - 1) + 1 - size - b
            for o, s, d, k, size, b in zip(
                self.out, self.strides, self.dilations, self.kernel, self.size, self.before
            )
        )

    def offsets(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Each position in the kernel, with the elements of the padded input with which it is multiplied."""
        for offset in np.ndindex(*self.kernel):
            yield (
                offset,
                tuple(
                    slice(i * d, i * d + max((o - 1) * s + 1, 0), s)
                    for i, d, o, s in zip(offset, self.dilations, self.out, self.strides)
                ),
            )


def windows(attrs: Attrs, size: tuple[int, ...], kernel: tuple[int, ...]) -> Windows:
    """The windows that follow from the attributes strides, dilations, pads, auto_pad and ceil_mode."""
    rank = len(size)
    strides = integers(attrs, "strides") or (1,) * rank
    dilations = integers(attrs, "dilations") or (1,) * rank
    span = [d * (k - 1) + 1 for d, k in zip(dilations, kernel)]
    auto = string(attrs, "auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        out = tuple(-(-n // s) for n, s in zip(size, strides))
        total = [max((o - 1) * s + e - n, 0) for o, s, e, n in zip(out, strides, span, size)]
        less, more = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (less, more) if auto == "SAME_UPPER" else (more, less)
        return Windows(size, kernel, strides, dilations, before, after, out)
    pads = integers(attrs, "pads") if auto == "NOTSET" else None
    pads = pads or (0,) * (2 * rank)
    before, after = pads[:rank], pads[rank:]
    counts = []
    for n, b, a, e, s in zip(size, before, after, span, strides):
        room = n + b + a - e
        count = room // s + 1
        # A window that would begin in the padding at the end is left out.
        if integer(attrs, "ceil_mode", 0) and room % s and count * s < n + b:
            count += 1
        counts.append(max(count, 0))
    return Windows(size, kernel, strides, dilations, before, after, tuple(counts))


def _padded(x: Array, w: Windows, value: Any) -> Array:
    after = [max(a, o) if o > 0 else a for a, o in zip(w.after, w.overhang)]
    return pad(x, [0, 0, *w.before], [0, 0, *after], "constant", value)


def conv(field: Field, attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """A convolution in any number of dimensions, computed as products with parts of the matrix of windows."""
    batch, channels = x.shape[:2]
    maps, depth = weight.shape[:2]
    groups = integer(attrs, "group", 1)
    fits = x.ndim == weight.ndim and channels == depth * groups and maps % groups == 0
    if not fits or (bias is not None and bias.shape != (maps,)):
        raise ValueError(f"Conv of {x.shape} with {weight.shape} in {groups} groups")
    w = windows(attrs, x.shape[2:], weight.shape[2:])
    rank, taps = len(w.kernel), prod(w.kernel)
    matrix = weight.reshape(groups, maps // groups, depth * taps)
    if taps == 1 and set(w.strides) == {1} and not any(w.before) and not any(w.after):
        y = field.matmul(matrix, x.reshape(batch, groups, depth, prod(w.size)))
    else:
        x = _padded(x, w, 0)
        y = np.empty((batch, groups, maps // groups, *w.out), dtype=x.dtype)
        spatial = x.strides[2:]
        row = channels * taps * prod(w.out[1:])  # of the matrix, for each index of axis 2
        step = max(1, UNFOLDED // max(row, 1))
        strides = (
            x.strides[1],
            *(s * d for s, d in zip(spatial, w.dilations)),
            *(s * t for s, t in zip(spatial, w.strides)),
        )
        for item in range(batch):
            for start in range(0, w.out[0], step):
                stop = min(start + step, w.out[0])
                shape = (channels, *w.kernel, stop - start, *w.out[1:])
                view = as_strided(x[item, :, start * w.strides[0] :], shape, strides, writeable=False)
                unfolded = view.reshape(groups, depth * taps, prod(shape[1 + rank :]))
                part = field.matmul(matrix, unfolded)
                y[item, :, :, start:stop] = part.reshape(groups, maps // groups, *shape[1 + rank :])
    y = y.reshape(batch, maps, *w.out)
    return y if bias is None else field.add(y, bias.reshape(-1, *(1,) * rank))


def _conv_transpose(field: Field, attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    batch, channels = x.shape[:2]
    size, kernel = x.shape[2:], weight.shape[2:]
    rank, groups, maps = len(size), integer(attrs, "group", 1), weight.shape[1]
    strides = integers(attrs, "strides") or (1,) * rank
    dilations = integers(attrs, "dilations") or (1,) * rank
    extra = integers(attrs, "output_padding") or (0,) * rank
    span = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(size, strides, dilations, kernel)]
    auto = string(attrs, "auto_pad", "NOTSET")
    shape = integers(attrs, "output_shape")
    if shape is not None:
        shape = shape[-rank:]
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        shape = tuple(n * s for n, s in zip(size, strides))
    if shape is None:
        pads = integers(attrs, "pads") if auto == "NOTSET" else None
        pads = pads or (0,) * (2 * rank)
        before, after = pads[:rank], pads[rank:]
    else:
        total = [e + x - o for e, x, o in zip(span, extra, shape)]
        less, more = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (less, more) if auto == "SAME_UPPER" else (more, less)

    full = np.zeros((batch, groups, maps, *(e + p for e, p in zip(span, extra))), dtype=x.dtype)
    flat = x.reshape(batch, groups, channels // groups, prod(size))
    w = Windows(size, kernel, strides, dilations, before, after, size)
    taps = np.moveaxis(weight.reshape(groups, channels // groups, maps, *kernel), 1, 2)
    for offset, where in w.offsets():
        part = field.matmul(taps[(slice(None),) * 3 + offset], flat).reshape(batch, groups, maps, *size)
        target = (slice(None),) * 3 + where
        full[target] = field.add(full[target], part)
    y = full.reshape(batch, groups * maps, *full.shape[3:])
    y = pad(y, [0, 0, *(-b for b in before)], [0, 0, *(-a for a in after)], "constant", 0)
    return y if bias is None else field.add(y, bias.reshape(-1, *(1,) * rank))


# --- pools ---


def _pool(x: Array, w: Windows, value: Any, merge: Callable[[Array, Array], Array]) -> Array:
    padded = _padded(x, w, value)
    out: Array | None = None
    for _, where in w.offsets():
        part = padded[(slice(None), slice(None), *where)]
        out = part if out is None else merge(out, part)
    assert out is not None
    return out


def _pool_windows(attrs: Attrs, x: Array) -> Windows:
    kernel = integers(attrs, "kernel_shape")
    if kernel is None:
        raise ValueError("a pool without kernel_shape")
    return windows(attrs, x.shape[2:], kernel)


def _max_pool(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    x = inputs[0]
    assert x is not None
    w = _pool_windows(attrs, x)
    lowest = field.lowest if x.dtype.kind == "f" else extreme(x.dtype, True)
    if outputs == 1:
        return (_pool(x, w, lowest, field.maximum),)
    if not field.real:
        raise NotEvaluable("indices of MaxPool")
    order = "F" if integer(attrs, "storage_order", 0) else "C"
    planes, area = prod(x.shape[:2]), prod(x.shape[2:])
    within = np.arange(area).reshape(x.shape[2:], order=order)  # type: ignore[call-overload]
    index = (np.arange(planes) * area).reshape(*x.shape[:2], *(1,) * within.ndim) + within
    values, indices = _padded(x, w, lowest), _padded(index, w, -1)
    best: Array | None = None
    for _, where in w.offsets():
        part, at = (a[(slice(None), slice(None), *where)] for a in (values, indices))
        if best is None:
            best, best_index = part.copy(), at.copy()
        else:
            better = (part > best) | ((best_index < 0) & (at >= 0))
            best, best_index = np.where(better, part, best), np.where(better, at, best_index)
    return best, best_index


def average_pool(field: Field, attrs: Attrs, x: Array) -> Array:
    w = _pool_windows(attrs, x)
    total = _pool(x, w, 0, field.add)
    padded = integer(attrs, "count_include_pad", 0)
    count = np.ones((), dtype=np.int64)
    for axis in range(len(w.size)):
        starts = np.arange(w.out[axis]) * w.strides[axis]
        positions = starts[:, None] + np.arange(w.kernel[axis]) * w.dilations[axis] - w.before[axis]
        low = -w.before[axis] if padded else 0
        high = w.size[axis] + (w.after[axis] if padded else 0)
        count = np.multiply.outer(count, ((positions >= low) & (positions < high)).sum(axis=1))
    first = count.flat[0] if count.size else 1
    if (count == first).all():
        return field.div(total, field.constant(int(first)))
    return field.div(total, field.lift(count))


def _lp(field: Field, attrs: Attrs, x: Array, total: Callable[[Array], Array]) -> Array:
    p = integer(attrs, "p", 2)
    if p == 1:
        return total(field.unary("abs", x))
    if p == 2:
        return field.unary("sqrt", total(field.square(x)))
    powers = total(field.binary("pow", field.unary("abs", x), field.constant(p)))
    return field.binary("pow", powers, field.constant(1 / p))


def _lp_pool(field: Field, attrs: Attrs, x: Array) -> Array:
    w = _pool_windows(attrs, x)
    return _lp(field, attrs, x, lambda a: _pool(a, w, 0, field.add))


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_average_pool(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.mean(x, _spatial(x), True)


def _global_max_pool(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.max(x, _spatial(x), True)


def _global_lp_pool(field: Field, attrs: Attrs, x: Array) -> Array:
    return _lp(field, attrs, x, lambda a: field.sum(a, _spatial(x), True))


def _max_unpool(field: Field, attrs: Attrs, x: Array, indices: Array, shape: Array | None = None) -> Array:
    """The indices refer to the smallest possible output. If a larger `shape` is given, zeros are added at the end."""
    rank = x.ndim - 2
    kernel = integers(attrs, "kernel_shape") or (1,) * rank
    strides = integers(attrs, "strides") or (1,) * rank
    pads = integers(attrs, "pads") or (0,) * (2 * rank)
    spatial = [
        (n - 1) * s + k - pads[i] - pads[i + rank]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel))
    ]
    smallest = (*x.shape[:2], *spatial)
    out = np.zeros(prod(smallest), dtype=x.dtype)
    out[indices.reshape(-1)] = x.reshape(-1)
    y = out.reshape(smallest)
    if shape is None:
        return y
    return pad(y, [0] * y.ndim, [a - b for a, b in zip(shape.tolist(), smallest)], "constant", 0)


def _col2im(field: Field, attrs: Attrs, x: Array, image: Array, block: Array) -> Array:
    size, kernel = tuple(image.tolist()), tuple(block.tolist())
    w = windows(attrs, size, kernel)
    batch, channels = x.shape[0], x.shape[1] // prod(kernel)
    columns = x.reshape(batch, channels, *kernel, *w.out)
    full = np.zeros(
        (batch, channels, *(n + b + a for n, b, a in zip(size, w.before, w.after))), dtype=x.dtype
    )
    for offset, where in w.offsets():
        target = (slice(None), slice(None), *where)
        column: tuple[Any, ...] = (slice(None), slice(None), *offset)
        full[target] = field.add(full[target], columns[column])
    return pad(full, [0, 0, *(-b for b in w.before)], [0, 0, *(-a for a in w.after)], "constant", 0)


SPECS: dict[str, OpSpec] = {
    **table(
        "polynomial",
        MatMul=single(_matmul),
        Gemm=single(gemm),
        Einsum=single(_einsum),
        Conv=single(conv),
        ConvTranspose=single(_conv_transpose),
        AveragePool=single(average_pool),
        GlobalAveragePool=single(_global_average_pool),
        Col2Im=single(_col2im),
    ),
    **table(
        "uninterpreted",
        MaxPool=_max_pool,
        GlobalMaxPool=single(_global_max_pool),
        LpPool=single(_lp_pool),
        GlobalLpPool=single(_global_lp_pool),
    ),
    **table("movement", MaxUnpool=single(_max_unpool)),
}
