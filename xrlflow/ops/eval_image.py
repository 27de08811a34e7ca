"""Evaluation of operators on images and signals: Resize, GridSample, boxes, Fourier transform, windows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import floor

import numpy as np

from xrlflow.ir import Attrs
from xrlflow.ops.eval_spec import (
    OpSpec,
    integer,
    integers,
    number,
    single,
    string,
    table,
)
from xrlflow.ops.field import Array, Field, NotEvaluable

# --- Resize: a weighted sum of a few neighbours, one axis after the other ---

_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def cubic(distance: Array, a: float) -> Array:
    """Keys' cubic convolution kernel (IEEE Trans. ASSP 29(6), 1981), with coefficient `a`."""
    d = np.abs(distance)
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, inner, np.where(d < 2, outer, 0.0))


def _sources(mode: str, out: int, size: int, scale: float, start: float, end: float) -> Array:
    """For the elements of an axis of size `out`, their positions in the original axis of size `size`."""
    i = np.arange(out, dtype=np.float64)
    if mode == "align_corners":
        length = scale * size
        return i * (size - 1) / (length - 1) if length != 1 else i * 0.0
    if mode == "asymmetric":
        return i / scale
    if mode == "tf_crop_and_resize":
        if out == 1:
            return np.array([0.5 * (start + end) * (size - 1)])
        return start * (size - 1) + i * (end - start) * (size - 1) / (out - 1)
    if mode == "pytorch_half_pixel" and out == 1:
        return np.zeros(1)
    x = (i + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        x = x + size / 2 * (1 - out / (scale * size))
    return x


def _neighbours(x: Array, mode: str, scale: float, a: float) -> tuple[Array, Array]:
    """Indices and weights of the neighbours of each position. Both arrays are [taps, positions]."""
    scale = min(scale, 1.0)
    reach = 2 if mode == "cubic" else 1
    first = floor(-reach / scale) + 1
    taps = np.arange(first, 2 - first)[:, None]
    base = np.floor(x)
    distance = (base + taps - x) * scale
    weights = cubic(distance, a) if mode == "cubic" else np.clip(1 - np.abs(distance), 0, 1)
    if scale < 1.0:
        weights = weights / weights.sum(axis=0)
    return (base + taps).astype(np.int64), weights


def _resize_axis(field: Field, attrs: Attrs, x: Array, axis: int, positions: Array, scale: float) -> Array:
    size, mode = x.shape[axis], string(attrs, "mode", "nearest")
    if mode == "nearest":
        nearest = _NEAREST[string(attrs, "nearest_mode", "round_prefer_floor")](positions)
        return x.take(np.clip(nearest, 0, size - 1).astype(np.int64), axis=axis)
    smooth = scale if integer(attrs, "antialias", 0) else 1.0
    index, weights = _neighbours(positions, mode, smooth, number(attrs, "cubic_coeff_a", -0.75))
    if integer(attrs, "exclude_outside", 0):
        weights = np.where((index >= 0) & (index < size), weights, 0.0)
        weights = weights / weights.sum(axis=0)
    index = np.clip(index, 0, size - 1)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    total: Array | None = None
    for i, w in zip(index, weights):
        part = field.mul(x.take(i, axis=axis), field.lift(w).reshape(shape))
        total = part if total is None else field.add(total, part)
    assert total is not None
    return total


def _resize(
    field: Field,
    attrs: Attrs,
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
) -> Array:
    axes = [a % x.ndim for a in integers(attrs, "axes") or range(x.ndim)]
    lengths = [x.shape[a] for a in axes]
    if scales is not None and scales.size:
        factors = [float(s) for s in scales]
        lengths_out = [floor(n * s) for n, s in zip(lengths, factors)]
    else:
        if sizes is None:
            raise ValueError("Resize with neither scales nor sizes")
        lengths_out = [int(s) for s in sizes]
        factors = [w / n for w, n in zip(lengths_out, lengths)]
        policy = string(attrs, "keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = min(factors) if policy == "not_larger" else max(factors)
            factors = [one] * len(axes)
            lengths_out = [floor(one * n + 0.5) for n in lengths]
    mode = string(attrs, "coordinate_transformation_mode", "half_pixel")
    crop = mode == "tf_crop_and_resize"
    integral = x.dtype.kind in "iub"
    y = field.lift(x) if integral and string(attrs, "mode", "nearest") != "nearest" else x
    outside = np.zeros((), dtype=np.bool_)
    for i, axis in enumerate(axes):
        start, end = 0.0, 1.0
        if crop and roi is not None:
            start, end = float(roi[i]), float(roi[i + len(axes)])
        elif lengths_out[i] == lengths[i] and factors[i] == 1.0:
            continue
        positions = _sources(mode, lengths_out[i], lengths[i], factors[i], start, end)
        if crop:
            beyond = (positions < 0) | (positions > lengths[i] - 1)
            outside = outside | beyond.reshape([-1 if j == axis else 1 for j in range(x.ndim)])
        y = _resize_axis(field, attrs, y, axis, positions, factors[i])
    if crop and outside.any():
        y = np.where(outside, field.constant(number(attrs, "extrapolation_value", 0.0)), y)
    return np.rint(y).astype(x.dtype) if y.dtype != x.dtype and integral else y


# --- GridSample ---


def _reflect(index: Array, low: float, high: float) -> Array:
    """Indices mirrored into [low, high]."""
    span = high - low
    if span <= 0:
        return np.full_like(index, low)
    offset = np.abs(index - low) % (2 * span)
    return low + np.minimum(offset, 2 * span - offset)


def _grid_sample(field: Field, attrs: Attrs, x: Array, grid: Array) -> Array:
    """x is [n,c,d1,...,dk]; grid is [n,o1,...,ok,k] with the last coordinate first. Coordinates range from -1 to 1."""
    mode, padding = string(attrs, "mode", "linear"), string(attrs, "padding_mode", "zeros")
    corners = bool(integer(attrs, "align_corners", 0))
    size = x.shape[2:]
    axes: list[tuple[Array, Array]] = []  # for each axis: indices and weights, [taps, n, positions...]
    for axis, n in enumerate(size):
        g = grid[..., len(size) - 1 - axis]
        position = (g + 1) / 2 * (n - 1) if corners else ((g + 1) * n - 1) / 2
        low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
        if mode == "cubic":
            base, taps = np.floor(position), np.arange(-1, 3)
            index = base + taps.reshape(-1, *(1,) * g.ndim)
            weights = cubic(index - position, -0.75)
        else:
            # Positions are clamped before their neighbours are computed, as runtimes do.
            if padding == "border":
                position = np.clip(position, 0, n - 1)
            elif padding == "reflection":
                position = np.clip(_reflect(position, low, high), 0, n - 1)
            if mode == "nearest":
                index = np.rint(position)[None]
                weights = np.ones_like(index)
            else:
                base = np.floor(position)
                index = np.stack((base, base + 1))
                weights = np.stack((base + 1 - position, position - base))
        if padding == "zeros":
            weights = np.where((index >= 0) & (index <= n - 1), weights, 0.0)
        elif padding == "reflection" and mode == "cubic":
            index = _reflect(index, low, high)
        axes.append((np.clip(index, 0, n - 1).astype(np.int64), weights))
    batch = np.arange(x.shape[0]).reshape(-1, *(1,) * len(size))
    channels_last = np.moveaxis(x, 1, -1)
    out = np.zeros((*grid.shape[:-1], x.shape[1]), dtype=x.dtype)
    for taps_at in product(*(range(len(weights)) for _, weights in axes)):
        index_at = tuple(index[t] for t, (index, _) in zip(taps_at, axes))
        weight = np.prod([weights[t] for t, (_, weights) in zip(taps_at, axes)], axis=0)
        out += channels_last[(batch, *index_at)] * weight[..., None]
    return np.moveaxis(out, -1, 1)


def _affine_grid(field: Field, attrs: Attrs, theta: Array, size: Array) -> Array:
    """A grid for GridSample from theta [n,k,k+1] and the size (n,c,d1,...,dk)."""
    spatial = size.tolist()[2:]
    steps = []
    for n in spatial:
        if integer(attrs, "align_corners", 0):
            steps.append(np.linspace(-1.0, 1.0, n))
        else:
            steps.append((np.arange(n) * 2 + 1) / n - 1)
    mesh = np.meshgrid(*steps, indexing="ij")
    points = np.stack([*mesh[::-1], np.ones(spatial)], axis=-1)
    y = points.reshape(1, -1, len(spatial) + 1) @ theta.swapaxes(1, 2)
    return y.reshape(theta.shape[0], *spatial, len(spatial))


# --- boxes ---


def _overlap(a: Array, boxes: Array) -> Array:
    """Intersection over union of a box with other boxes. A box is (low, low, high, high)."""
    low, high = np.maximum(a[:2], boxes[:, :2]), np.minimum(a[2:], boxes[:, 2:])
    common = np.prod(np.clip(high - low, 0, None), axis=1)
    area = np.prod(a[2:] - a[:2]) + np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) - common
    return np.where(area > 0, common / np.where(area > 0, area, 1.0), 0.0)


def _non_max_suppression(
    field: Field,
    attrs: Attrs,
    boxes: Array,
    scores: Array,
    maximum: Array | None = None,
    overlap: Array | None = None,
    minimum: Array | None = None,
) -> Array:
    """From boxes [n,k,4] and scores [n,classes,k]: rows (batch, class, box), best scores first."""
    limit = 0 if maximum is None else int(maximum.item())
    threshold = 0.0 if overlap is None else float(overlap.item())
    first, second = boxes[..., :2], boxes[..., 2:]
    if integer(attrs, "center_point_box", 0):
        first, second = first - second / 2, first + second / 2
    corners = np.concatenate((np.minimum(first, second), np.maximum(first, second)), axis=-1)
    selected: list[tuple[int, int, int]] = []
    for n, c in np.ndindex(*scores.shape[:2]):
        order = np.argsort(-scores[n, c], kind="stable")
        if minimum is not None:
            order = order[scores[n, c][order] > float(minimum.item())]
        count = 0
        while len(order) and count < limit:
            best, order = order[0], order[1:]
            selected.append((n, c, int(best)))
            count += 1
            order = order[_overlap(corners[n, best], corners[n][order]) <= threshold]
    return np.array(selected, dtype=np.int64).reshape(-1, 3)


def _roi_align(field: Field, attrs: Attrs, x: Array, rois: Array, batch: Array) -> Array:
    """From x [n,c,h,w], rois [k,4] as (x1,y1,x2,y2) and batch [k]: the result [k,c,oh,ow]."""
    mode = string(attrs, "mode", "avg")
    shape = (integer(attrs, "output_height", 1), integer(attrs, "output_width", 1))
    ratio, scale = integer(attrs, "sampling_ratio", 0), number(attrs, "spatial_scale", 1.0)
    half = string(attrs, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    size = x.shape[2:]
    out = np.empty((len(rois), x.shape[1], *shape))
    for k, (roi, image) in enumerate(zip(rois * scale - (0.5 if half else 0.0), x[batch])):
        taps = []  # for each axis: indices and weights, [2, bins * samples], with several samples in each bin
        for axis in (0, 1):
            low, length = roi[1 - axis], roi[3 - axis] - roi[1 - axis]
            if not half:
                length = max(length, 1.0)
            step = length / shape[axis]
            count = ratio or max(int(np.ceil(step)), 0)
            bins = np.arange(shape[axis])[:, None] + (np.arange(count) + 0.5) / max(count, 1)
            position = (low + bins * step).reshape(-1)
            inside = (position >= -1.0) & (position <= size[axis])
            position = np.clip(position, 0, size[axis] - 1)
            base = np.minimum(np.floor(position), max(size[axis] - 2, 0)).astype(np.int64)
            fraction = position - base
            index = np.stack((base, np.minimum(base + 1, size[axis] - 1)))
            taps.append((index, np.stack((1 - fraction, fraction)) * inside, count))
        (rows, down, high), (columns, across, wide) = taps
        parts = [
            image[:, rows[i]][:, :, columns[j]] * np.outer(down[i], across[j])
            for i, j in product((0, 1), (0, 1))
        ]
        split = (x.shape[1], shape[0], high, shape[1], wide)
        if mode == "avg":
            out[k] = sum(parts).reshape(split).sum(axis=(2, 4)) / max(high * wide, 1)
        else:  # the greatest of the weighted neighbours, as the specification says
            out[k] = np.max(parts, axis=0).reshape(split).max(axis=(2, 4))
    return out


# --- signals ---


def _cosines(*coefficients: float) -> Callable[..., Array]:
    """A function that makes a window as a sum of cosines."""

    def window(field: Field, attrs: Attrs, size: Array) -> Array:
        n = int(size.item())
        length = n if integer(attrs, "periodic", 1) else n - 1
        if integer(attrs, "output_datatype", 1) not in (1, 10, 11, 16):
            raise NotEvaluable("a window of integers")
        angle = 2 * np.pi * np.arange(n) / length
        terms = [(-1) ** k * c * np.cos(k * angle) for k, c in enumerate(coefficients)]
        return np.sum(terms, axis=0)  # type: ignore[no-any-return]

    return window


# Up to this length a transform is computed as a product, with the field's rounding errors.
_BY_DEFINITION = 16


def _by_definition(field: Field, x: Array, along: int, columns: int, inverse: int) -> Array:
    """The first `columns` numbers of a transform along an axis."""
    n = x.shape[along]
    angles = np.outer(np.arange(n), np.arange(columns)) % max(n, 1) * (2 * np.pi / max(n, 1))
    # Those that are 0 become 0.
    cosine, sine = (np.rint(f(angles) * 2.0**45) / 2.0**45 for f in (np.cos, np.sin))
    sine = sine if inverse else -sine
    rows = [np.moveaxis(x[..., part], along, -1)[None] for part in range(x.shape[-1])]
    real, imaginary = field.matmul(rows[0], cosine), field.matmul(rows[0], sine)
    if len(rows) > 1:
        real = field.sub(real, field.matmul(rows[1], sine))
        imaginary = field.add(imaginary, field.matmul(rows[1], cosine))
    y = np.stack([np.moveaxis(part[0], -1, along) for part in (real, imaginary)], axis=-1)
    return field.mul(y, 1.0 / n) if inverse else y


def _dft(
    field: Field, attrs: Attrs, x: Array, length: Array | None = None, axis: Array | None = None
) -> Array:
    """x is [..., 1 or 2]: the real part, or real and imaginary parts."""
    along = -2 if axis is None else int(axis.item())
    along = along % x.ndim
    n = x.shape[along] if length is None else int(length.item())
    onesided = integer(attrs, "onesided", 0)
    if n == x.shape[along] <= _BY_DEFINITION and not onesided * integer(attrs, "inverse", 0):
        return _by_definition(field, x, along, n // 2 + 1 if onesided else n, integer(attrs, "inverse", 0))
    signal = x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0].astype(np.complex128)
    if integer(attrs, "inverse", 0):
        if onesided:
            return np.fft.irfft(signal, n=None if length is None else n, axis=along)[..., None]
        y = np.fft.ifft(signal, n=n, axis=along)
    else:
        y = np.fft.fft(signal, n=n, axis=along)
        if onesided:
            y = y[(slice(None),) * along + (slice(0, n // 2 + 1),)]
    return np.stack((y.real, y.imag), axis=-1)


def _stft(
    field: Field,
    attrs: Attrs,
    signal: Array,
    step: Array,
    window: Array | None = None,
    length: Array | None = None,
) -> Array:
    """From a signal [b,n] or [b,n,1 or 2]: the result [b,frames,bins,2]."""
    if signal.ndim == 2:
        signal = signal[..., None]
    if window is None and length is None:
        raise ValueError("STFT with neither window nor frame length")
    size = int(length.item()) if length is not None else len(window)  # type: ignore[arg-type]
    hop = int(step.item())
    count = (signal.shape[1] - size) // hop + 1
    index = np.arange(count)[:, None] * hop + np.arange(size)
    frames = signal[:, index]  # [b, frames, size, 1 or 2]
    if window is not None:
        frames = frames * window[:, None]
    values = frames[..., 0] + 1j * frames[..., 1] if signal.shape[-1] == 2 else frames[..., 0]
    y = np.fft.fft(values, axis=-1)
    if integer(attrs, "onesided", 1):
        y = y[..., : size // 2 + 1]
    return np.stack((y.real, y.imag), axis=-1)


def _det(field: Field, attrs: Attrs, x: Array) -> Array:
    return np.asarray(np.linalg.det(x))


SPECS: dict[str, OpSpec] = {
    **table(
        "numeric",
        AffineGrid=single(_affine_grid),
        BlackmanWindow=single(_cosines(0.42, 0.5, 0.08)),
        Det=single(_det),
        DFT=single(_dft),
        GridSample=single(_grid_sample),
        HammingWindow=single(_cosines(25 / 46, 21 / 46)),
        HannWindow=single(_cosines(0.5, 0.5)),
        NonMaxSuppression=single(_non_max_suppression),
        Resize=single(_resize),
        RoiAlign=single(_roi_align),
        STFT=single(_stft),
    ),
}
