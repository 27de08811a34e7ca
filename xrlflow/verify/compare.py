"""Whether one output may replace another. Tolerances come from rounding, never from a runtime's mistakes.

An output is compared with a target `y`, by its largest element and element by element:

    all elements   max |new - y| <= 4 max noise + eps max |y|        y: our float64 evaluation
                   max |new - y| <= 8 max(max noise, eps max |y|)    y: an output of the original
    each element   |new - y| <= 1024 noise + 2^-10 |y| + 8 grid      narrow floats: 32 noise + 4 eps |y| + 8 grid

`noise` is how far rounding moves each element of the original. At first it is the difference of two of the original's
results (in ONNX Runtime and in float64; without float64: with ONNX Runtime's optimisations and without), but at most
2^-16 of the magnitudes around the element: a larger difference does not count as rounding until the noise is measured.
If an output exceeds a tolerance, its noise is measured (`noise.py`), and the output is judged again with three
targets: the float64 evaluation, the original as the user runs it, and the original without ONNX Runtime's
optimisations. The output must equal one of these within the tolerance.

`eps` is 2^-20 for float32, 2^-36 for float64, and the type's own epsilon for narrower floats; 2^-16 stands for 16 eps
(4 of narrower floats), and 2^-10 is at least four epsilons of the type. `grid` is the largest power of two, at most
2^-24, of which all elements of the original are multiples: a kernel that ends with an addition (a Sigmoid as
0.5 + p / q) rounds small elements to it.

Float64 evaluation is slow, so it may be omitted for some inputs. For these, the tolerance of an output is at least
five times the greatest relative noise that the output had on the other inputs.

Each slice of the output (all elements at one index of an axis) that has 64 elements or more is also judged by its own
magnitude:

    |new - y| in the slice <= 16 noise in the slice + 2^-10 |y| in the slice + eps / 8 |y| + 8 grid

(8 noise for narrow floats). This test finds a channel that lost its bias. An output passes only if all three
comparisons pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.verify.runner import Array

EPS, _DOUBLE_EPS = 2.0**-20, 2.0**-36
_LEAST_SLICE = 64
_SLICE_ERROR, _SCALE = 16.0, 2.0**-10
_GRID, _COARSEST_GRID = 8.0, 2.0**-24
# A factor of the noise in the tolerance of one element: noise is measured on a few samples, which may show much less
# than the element really has. It is not used for narrow floats, where 1024 times the noise is more than the element.
_ELEMENT_ERROR = 1024.0
_NARROW_SLICE, _NARROW_ELEMENT = 8.0, 32.0
# The most noise that is inferred from the difference of one pair of results, as a multiple of eps times the magnitudes
# around the element.
_UNPROVEN = 16.0


class Criterion(Enum):
    """What an output was compared with."""

    FLOAT64 = "float64"  # our float64 evaluation
    DEVIATION = "deviation"  # the original as the user runs it
    PLAIN = "unoptimised"  # the original without the runtime's optimisations
    EXACT = "exact"  # integers, booleans, strings
    LAYERS = "layers"  # a quantised model, layer by layer
    TIE = "near-tie"  # integers that may differ because they come from numbers that are equal up to rounding


class Exemption(Enum):
    """Which elements of an output are not compared, because numbers that they depend on are NaN or infinite."""

    NONE = "none"  # all are compared: where one output is NaN or infinite, the other must be too
    MENDS = "mends"  # those that are NaN or infinite in the original
    SPREADS = "spreads"  # those that are NaN or infinite in the original or in the new output


@dataclass(frozen=True, slots=True)
class Element:
    """One element of an output, for messages. `reference`: its value in the float64 evaluation, if there is one."""

    index: tuple[int, ...]
    original: Any
    new: Any
    reference: float | None = None

    def __str__(self) -> str:
        text = f"[{','.join(map(str, self.index))}]: {_number(self.new)} instead of {_number(self.original)}"
        return text if self.reference is None else f"{text} (float64: {_number(self.reference)})"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target with which an output is compared, and the noise that decides the tolerance."""

    criterion: Criterion
    original: Array
    other: Array | None
    """For FLOAT64: our evaluation. For DEVIATION and PLAIN: the original's output without the runtime's optimisations;
    None, with DEVIATION only, if that output is unknown.
    """
    relative: float = 0.0  # the greatest noise on other inputs, divided by the largest element
    noise: Array | None = None  # how far rounding moves each element, if that was measured
    variants: tuple[Array, ...] = ()
    """Further outputs of the original: an element may be NaN or infinite as in one of them."""

    def error(self) -> float:
        """The greatest noise divided by the largest element."""
        y, noise = self.measure()
        scale = _scale(y)
        return _max(noise) / scale if scale else 0.0

    def measure(self) -> tuple[Array, Array]:
        """The target array, and the noise of each element (0 where the element is not finite), both in float64."""
        y = a = wide(self.original)
        if self.other is not None and self.criterion is Criterion.PLAIN:
            y = wide(self.other)
        elif self.other is not None and self.criterion is Criterion.FLOAT64:
            y = np.where(np.isfinite(a), wide(self.other), a)
        if self.noise is not None:
            return y, self.noise
        if self.other is None or self.criterion is Criterion.PLAIN:
            return y, np.zeros(a.shape)
        eps = epsilon(self.original)
        limit = (4 if eps > EPS else _UNPROVEN) * eps * around(_finite(y))
        return y, np.minimum(_distance(a, wide(self.other)), limit)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one output of one case. The numbers are absolute, and 0 for exact comparisons."""

    criterion: Criterion
    error: float = 0.0  # the number that is compared with the tolerance
    tolerance: float = 0.0
    difference: float = 0.0  # the greatest |new - original| over finite elements
    worst: Element | None = None
    reason: str = ""  # why it failed, or ""

    @property
    def passed(self) -> bool:
        return not self.reason

    @property
    def ratio(self) -> float:
        """The error divided by the tolerance: above 1 if it failed."""
        if self.reason:
            return max(2.0, self.error / self.tolerance if self.tolerance else 2.0)
        return self.error / self.tolerance if self.tolerance else 0.0


def is_float(array: Array) -> bool:
    """Whether the elements have a type that rounds: floats of any width, complex numbers."""
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and array.dtype.name in _NARROW)


_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


def _finfo(array: Array) -> Any:
    return ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]


def epsilon(array: Array) -> float:
    """2^-20, or the type's own epsilon if that is coarser; 2^-36 for float64."""
    return (
        _DOUBLE_EPS
        if array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1) == 8
        else max(EPS, float(_finfo(array).eps))
    )


def _least(array: Array) -> float:
    """The magnitude below which a runtime may flush numbers to zero; 0 for narrow types, which runtimes compute in
    float32.
    """
    info = _finfo(array)
    return float(info.smallest_normal if info.bits >= 32 else 4 * info.smallest_subnormal)


def wide(array: Array) -> Array:
    """The array in float64 or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def by_reference(original: Array, reference: Array) -> Target | None:
    """The target from a float64 evaluation; None if its shape differs from the original's, or if an element is not
    finite that is finite in the original.
    """
    if reference.shape != original.shape or reference.dtype.kind not in "fc":
        return None
    if not np.isfinite(reference[np.isfinite(wide(original))]).all():
        return None
    return Target(Criterion.FLOAT64, original, reference)


def by_deviation(original: Array, unoptimized: Array | None) -> Target:
    """The target from the original's outputs at two optimisation levels."""
    if unoptimized is not None and (unoptimized.shape, unoptimized.dtype) != (original.shape, original.dtype):
        unoptimized = None
    return Target(Criterion.DEVIATION, original, unoptimized)


def tolerance(target: Target, y: Array, noise: Array, eps: float) -> float:
    """The greatest admissible distance from the target y over the whole output."""
    scale = _scale(y)
    if target.criterion is Criterion.FLOAT64:
        return 4 * _max(noise) + eps * scale
    return max(8 * max(_max(noise), eps * scale), (5 * target.relative + eps) * scale)


def magnitudes(array: Array) -> Array:
    """The magnitudes of the elements in float64; 0 where they are not finite."""
    return _finite(wide(array))


def _finite(y: Array) -> Array:
    """The magnitudes of the elements; 0 where y is not finite."""
    finite = np.isfinite(y)
    return np.abs(y if finite.all() else np.where(finite, y, 0))


def _scale(y: Array) -> float:
    return _max(_finite(y))


def around(magnitude: Array, minimum: int = 1) -> Array:
    """For each element, the smallest of the largest magnitudes of the slices, one along each axis, that it is in.
    Slices with fewer than `minimum` elements do not count.

    The magnitude around each element. An element lies in one slice for each axis; the result is the least of the
    maxima of these slices. Slices with fewer than `minimum` elements do not count.
    """
    result = np.full(magnitude.shape, _max(magnitude))
    for axis, length in enumerate(magnitude.shape if magnitude.size else ()):
        axes = tuple(i for i in range(magnitude.ndim) if i != axis)
        if magnitude.size // length >= minimum:
            result = np.minimum(result, magnitude.max(axes, keepdims=True))
    return result


def judge_floats(target: Target, new: Array, exemption: Exemption = Exemption.NONE) -> Judgement:
    """Whether `new` is as accurate as the original's output. Both have the same shape and type."""
    original, criterion = target.original, target.criterion
    y, noise = target.measure()
    a, b = wide(original), wide(new)
    eps, tiny = epsilon(original), _least(original)
    # Runtimes may flush denormal numbers to zero.
    allowed = tolerance(target, y, noise, eps) + tiny
    difference = _max(_distance(a, b))

    def element(index: tuple[int, ...]) -> Element:
        reference = float(y[index]) if criterion is Criterion.FLOAT64 and y.dtype.kind == "f" else None
        return Element(index, original[index].item(), new[index].item(), reference)

    unlike: Array = np.zeros(y.shape, bool)
    if not (np.isfinite(y).all() and np.isfinite(b).all()):
        unlike = _kinds(y) != _kinds(b)
        if exemption is not Exemption.NONE:
            unlike &= np.isfinite(y) & (exemption is Exemption.MENDS)
        for variant in target.variants:
            unlike &= _kinds(wide(variant)) != _kinds(b)
    if unlike.any():
        reason = f"{np.count_nonzero(unlike)} of {a.size} elements are NaN or infinite in one model only"
        return Judgement(criterion, float("inf"), allowed, difference, element(_greatest(unlike)), reason)
    error = _distance(b, y)
    if not error.size:
        return Judgement(criterion)
    index, greatest = _greatest(error), _max(error)
    if greatest > allowed:
        reason = f"the error {greatest:.3g} exceeds the tolerance {allowed:.3g} ({criterion.value})"
        return Judgement(criterion, greatest, allowed, difference, element(index), reason)
    expected = np.maximum(noise, target.relative * _finite(y))

    def worst(floor: float) -> tuple[tuple[int, ...], float, float, str] | None:
        return _worst_slice(y, error, expected, eps, floor) or _worst_element(
            y, error, expected, original, floor
        )

    outside = worst(tiny)
    if outside is not None:  # the grid, which only adds to the tolerance, takes time to compute
        outside = worst(tiny + _GRID * grid(original))
    if outside is not None:
        index, excess, limit, where = outside
        reason = f"the error {excess:.3g} {where} exceeds the tolerance {limit:.3g} there ({criterion.value})"
        return Judgement(criterion, excess, limit, difference, element(index), reason)
    return Judgement(criterion, greatest, allowed, difference, element(index))


def judge_exact(original: Array, new: Array) -> Judgement:
    """Whether two arrays of one shape and type are equal."""
    wrong = np.asarray(original != new)
    if not wrong.any():
        return Judgement(Criterion.EXACT)
    apart = (
        np.abs(new.astype(np.float64) - original.astype(np.float64)) if original.dtype.kind in "iu" else wrong
    )
    index, difference = _greatest(apart), _max(apart)
    reason = f"{np.count_nonzero(wrong)} of {wrong.size} elements differ, and must not"
    return Judgement(
        Criterion.EXACT, difference, 0.0, difference, Element(index, original[index], new[index]), reason
    )


def grid(array: Array) -> float:
    """The largest power of two, at most 2^-24, of which all finite elements are multiples."""
    if array.dtype.kind == "c" or not array.size:
        return 0.0
    digits = int(_finfo(array).nmant) + 1
    values = wide(array)
    fraction, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    mantissa = np.ldexp(np.abs(fraction), digits).astype(np.int64)
    last = np.ldexp((mantissa & -mantissa).astype(np.float64), exponent - digits)
    return min(_COARSEST_GRID, float(last.min(initial=_COARSEST_GRID, where=mantissa != 0)))


def _distance(a: Array, b: Array) -> Array:
    """|a - b| where both are finite, else 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Array = np.abs(a - b)
    if np.isfinite(distance).all():  # so all of a and b are finite
        return distance
    return np.where(np.isfinite(a) & np.isfinite(b), distance, 0.0)


def _kinds(a: Array) -> Array:
    """For each element: 0 finite, 1 NaN, 2 infinity, 3 minus infinity (a complex number: both parts)."""
    if a.dtype.kind == "c":
        return 4 * _kinds(a.real) + _kinds(a.imag)
    return np.isnan(a) + 2 * np.isposinf(a).astype(np.int8) + 3 * np.isneginf(a).astype(np.int8)


def _worst_slice(
    y: Array, error: Array, own: Array, eps: float, noise: float
) -> tuple[tuple[int, ...], float, float, str] | None:
    """The slice that exceeds its tolerance most, as (index of an element, error, tolerance, description); None if no
    slice exceeds its tolerance.

    `noise` is added to the tolerance of every element.
    """
    magnitude = _finite(y)
    factor = _SLICE_ERROR if eps <= EPS else _NARROW_SLICE
    floor = eps / 8 * _max(magnitude) + noise
    worst: tuple[tuple[int, ...], float, float, str] | None = None
    excess = 1.0
    for axis, length in enumerate(error.shape):
        if length < 2 or error.size // length < _LEAST_SLICE:
            continue
        axes = tuple(i for i in range(error.ndim) if i != axis)
        errors, owns, scales = error.max(axes), own.max(axes), magnitude.max(axes)
        limits = factor * owns + _SCALE * scales + floor
        at = int(np.argmax(errors / limits))
        if errors[at] > excess * limits[at]:
            excess = float(errors[at] / limits[at])
            part = np.take(error, at, axis=axis)
            inner = _greatest(part)
            index = (*inner[:axis], at, *inner[axis:])
            worst = (index, float(errors[at]), float(limits[at]), f"at {at} along axis {axis}")
    return worst


def _worst_element(
    y: Array, error: Array, noise: Array, original: Array, floor: float
) -> tuple[tuple[int, ...], float, float, str] | None:
    """The element that exceeds its own tolerance most, in the format of `_worst_slice`; None if no element does."""
    scale = max(_SCALE, 4 * float(_finfo(original).eps))
    if epsilon(original) <= EPS:
        limits_by_noise = _ELEMENT_ERROR * noise
    else:
        limits_by_noise = np.maximum(_NARROW_ELEMENT * noise, 2 * around(noise))
    limits = limits_by_noise + scale * _finite(y) + floor
    index = _greatest(error / limits)
    if error[index] <= limits[index]:
        return None
    return index, float(error[index]), float(limits[index]), "of an element"


def _greatest(array: Array) -> tuple[int, ...]:
    """The index of the greatest element. The array must not be empty."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(array)), array.shape))


def _max(array: Array) -> float:
    return float(array.max()) if array.size else 0.0


def _number(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, (float, complex)) else repr(value)
