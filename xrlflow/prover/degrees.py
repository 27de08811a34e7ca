"""Degrees: a field whose elements are the degrees of rational functions.

A *keyed function* is one that a prime field replaces by a hash, such as exp (see `PrimeField`). Every output of a graph
is a quotient of polynomials in the inputs and in the results of keyed functions. The bound of a proof needs their
degrees on both sides. Evaluation over `Degrees` gives upper bounds for the degrees of numerator and denominator, and
for the number of results of keyed functions that an element depends on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xrlflow.ops.field import Array, Field, NotEvaluable, Number
from xrlflow.prover.machine import MACHINE

# An element packs three counts of 17 bits each: the degree of the numerator, the degree of the denominator, and the
# number of applications of keyed functions.
_BITS = 17
_MOST = (1 << _BITS) - 1

Counts = tuple[Array, Array, Array]


def pack(numerator: Any, denominator: Any, applications: Any) -> Array:
    return _packed(
        *(np.minimum(np.asarray(p, np.int64), _MOST) for p in (numerator, denominator, applications))
    )


def _packed(numerator: Any, denominator: Any, applications: Any) -> Array:
    packed: Array = (numerator | denominator << _BITS | applications << 2 * _BITS).astype(np.float64)
    return packed


def unpack(a: Any) -> Counts:
    integers = np.asarray(a, np.float64).astype(np.int64)
    return integers & _MOST, integers >> _BITS & _MOST, integers >> 2 * _BITS


class Degrees(Field):
    """A field whose elements are packed counts.

    `applications` counts the elements to which keyed functions were applied. `steepest` is the greatest degree so far.
    `saturated`: a count exceeded its bits.
    """

    real = False

    def __init__(self) -> None:
        self.applications = 0
        self.steepest = 1
        self.saturated = False

    def variable(self, shape: tuple[int, ...]) -> Array:
        """Elements that are drawn at random: they have degree 1."""
        return np.ones(shape)

    def _pack(self, n: Any, d: Any, a: Any) -> Array:
        a = np.minimum(a, self.applications)  # an element depends on no more applications than there are
        if not n.shape == d.shape == a.shape:
            n, d, a = np.broadcast_arrays(n, d, a)
        if not n.size:
            return pack(n, d, a)
        top = max(int(n.max()), int(d.max()))
        self.steepest = max(self.steepest, min(top, _MOST))
        if top < _MOST and int(a.max()) < _MOST:
            return _packed(n, d, a)
        self.saturated = True
        return pack(n, d, a)

    def lift(self, array: Array) -> Array:
        return np.zeros(array.shape)

    def constant(self, value: Number) -> Any:
        return np.float64(0.0)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        raise NotEvaluable("an element of a field as an integer")

    @staticmethod
    def _are_integers(*operands: Any) -> bool:
        return all(np.asarray(o).dtype.kind in "iub" for o in operands)

    @staticmethod
    def _counts(a: Any) -> Counts:
        """The counts of an operand. Integers and booleans are constants, of degree 0."""
        array = np.asarray(a)
        return unpack(np.zeros(array.shape) if array.dtype.kind in "iub" else array)

    def _sum_of(self, a: Counts, b: Counts) -> Array:
        return self._pack(np.maximum(a[0] + b[1], b[0] + a[1]), a[1] + b[1], a[2] + b[2])

    def add(self, a: Any, b: Any) -> Array:
        return np.add(a, b) if self._are_integers(a, b) else self._sum_of(self._counts(a), self._counts(b))

    def sub(self, a: Any, b: Any) -> Array:
        return (
            np.subtract(a, b) if self._are_integers(a, b) else self._sum_of(self._counts(a), self._counts(b))
        )

    def mul(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return np.multiply(a, b)  # type: ignore[no-any-return]
        x, y = self._counts(a), self._counts(b)
        return self._pack(x[0] + y[0], x[1] + y[1], x[2] + y[2])

    def div(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return MACHINE.div(a, b)
        x, y = self._counts(a), self._counts(b)
        return self._pack(x[0] + y[1], x[1] + y[0], x[2] + y[2])

    def neg(self, a: Any) -> Array:
        return np.negative(a) if self._are_integers(a) else np.asarray(a)

    def _sum_along(self, counts: Counts, axis: tuple[int, ...], keepdims: bool) -> Array:
        n, d, a = counts
        total = d.sum(axis=axis, keepdims=True)
        top = (n - d).max(axis=axis, keepdims=True, initial=0) + total
        out = self._pack(top, total, a.sum(axis=axis, keepdims=True))
        return out if keepdims else out.squeeze(axis)

    def matmul(self, a: Array, b: Array) -> Array:
        if self._are_integers(a, b):
            return np.matmul(a, b)  # type: ignore[no-any-return]
        left = a[None, :] if a.ndim == 1 else a
        right = b[:, None] if b.ndim == 1 else b
        x = self._counts(left[..., :, :, None])
        y = self._counts(right[..., None, :, :])
        terms = (x[0] + y[0], x[1] + y[1], x[2] + y[2])
        out = self._sum_along(terms, (-2,), False)
        out = out.squeeze(-1) if b.ndim == 1 else out
        return out.squeeze(-1 if b.ndim == 1 else -2) if a.ndim == 1 else out

    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        if self._are_integers(a):
            return np.asarray(np.sum(a, axis=axes, keepdims=keepdims, dtype=a.dtype))
        return self._sum_along(self._counts(a), tuple(range(a.ndim)) if axes is None else axes, keepdims)

    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        if self._are_integers(a):
            return np.asarray(np.prod(a, axis=axes, keepdims=keepdims, dtype=a.dtype))
        return self._pack(*(c.sum(axis=axes, keepdims=keepdims) for c in self._counts(a)))

    def cumsum(self, a: Array, axis: int) -> Array:
        if self._are_integers(a):
            return np.cumsum(a, axis=axis, dtype=a.dtype)
        return np.broadcast_to(self._sum_along(self._counts(a), (axis,), True), a.shape).copy()

    # Keyed functions: each result counts as a new variable.

    def _applied(self, *operands: Any) -> Array:
        counts = [self._counts(o) for o in operands]
        applications = sum(c[2] for c in counts) + 1
        self.applications += int(np.size(applications))
        return self._pack(np.ones_like(applications), np.zeros_like(applications), applications)

    def unary(self, name: str, a: Any, *parameters: Number) -> Array:
        return MACHINE.unary(name, a, *parameters) if self._are_integers(a) else self._applied(a)

    def binary(self, name: str, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return MACHINE.binary(name, a, b)
        applied = self._applied(a, b)
        if name != "pow":
            return applied
        # The exponent may be a small integer: see PrimeField.
        n, d, _ = self._counts(a)
        return self._pack(4 * n + 2 * d + 1, 4 * d + 2 * n, unpack(applied)[2])

    def _extreme(self, a: Any, b: Any) -> Array:
        applied = self._applied(a, b)
        x, y = self._counts(a), self._counts(b)  # the extreme of equal numbers is that number
        return self._pack(np.maximum(np.maximum(x[0], y[0]), 1), np.maximum(x[1], y[1]), unpack(applied)[2])

    def maximum(self, a: Any, b: Any) -> Array:
        return np.maximum(a, b) if self._are_integers(a, b) else self._extreme(a, b)

    def minimum(self, a: Any, b: Any) -> Array:
        return np.minimum(a, b) if self._are_integers(a, b) else self._extreme(a, b)

    def _extreme_of(self, function: Any, a: Array, axes: tuple[int, ...] | None, keepdims: bool) -> Array:
        if self._are_integers(a):
            return np.asarray(function(a, axis=axes, keepdims=keepdims))
        n, d, applications = self._counts(a)
        total = applications.sum(axis=axes, keepdims=keepdims) + 1
        self.applications += int(np.size(total))
        top = np.maximum(n.max(axis=axes, keepdims=keepdims, initial=1), 1)
        return self._pack(top, d.max(axis=axes, keepdims=keepdims, initial=0), total)

    def max(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._extreme_of(np.max, a, axes, keepdims)

    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._extreme_of(np.min, a, axes, keepdims)

    @property
    def lowest(self) -> float:
        return 0.0

    def compare(self, name: str, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            functions = {"equal": np.equal, "less": np.less, "less_equal": np.less_equal}
            return functions[name](a, b)  # type: ignore[no-any-return]
        if name != "equal":
            raise NotEvaluable("an order of the elements of a field")
        return np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), np.bool_)

    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        return np.float64(0.0)

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        if self._are_integers(a):
            {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[name].at(
                a, index, updates
            )
        else:
            raise NotEvaluable(f"scatter by {name} in a field")


def chance(left: list[Array], right: list[Array], degrees: Degrees, prime: int) -> float:
    """An upper bound of the probability that one trial does not tell two different sides apart.

    `left` and `right` are the outputs over `degrees`. Suppose that an element differs between the sides, but is equal
    in a trial. One cause: two different arguments of a keyed function, or two of its results, are equal by chance. For
    each pair on which the element depends the probability is degree / prime. The other cause: the two elements are
    different rational functions, and the numerator of their difference, a polynomial, is zero by chance. The sum of
    both probabilities is doubled, because inputs with a zero denominator are drawn again. See J. T. Schwartz
    (`prover.prime`).
    """
    if degrees.saturated:
        return 1.0
    worst = 0.0
    for a, b in zip(left, right):
        if a.dtype.kind != "f" or b.dtype.kind != "f" or not a.size or a.shape != b.shape:
            continue
        x, y = unpack(a), unpack(b)
        degree = np.maximum(x[0] + y[1], y[0] + x[1]).astype(np.float64)
        count = np.minimum((x[2] + y[2]).astype(np.float64), degrees.applications)
        pairs = count * (count + 1) / 2  # pairs of arguments, or of their results
        worst = max(worst, float((degree + 2 * pairs * 2 * degrees.steepest).max()))
    return min(1.0, 2 * max(worst, 1.0) / prime)
