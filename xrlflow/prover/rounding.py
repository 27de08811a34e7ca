"""Compares the rounding errors of both sides, by Monte Carlo arithmetic.

D. S. Parker, "Monte Carlo arithmetic: exploiting randomness in floating-point arithmetic", UCLA CSD-970002 (1997).

Both sides are computed several times. In each run each result of an operation is off by up to one rounding, at random.
The change of the left side's outputs is its own error: large where it loses digits itself, small where it does not. The
right side's error may be a fixed multiple of the left side's, for each element. Operands are drawn so that digits
cancel: nearly equal (also to the graph's constants), of opposite signs, and far apart in magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.ir import FLOATS, DType, Graph
from xrlflow.ops.evaluate import Evaluation, NotEvaluable
from xrlflow.ops.field import Array
from xrlflow.prover.cases import Case, Feeds, Unusable, Wrong, both_sides, draw_feeds, sides, tried_bindings
from xrlflow.prover.machine import MACHINE, Machine, evaluation, round_to
from xrlflow.rewrite import AnyRule

Side = list[Array]

# One rounding, relative to the result, as in float32. The size does not matter, since only quotients of errors are
# used.
_UNIT = 2.0**-24
# The rounding of a Cast to a narrower type, relative to the result.
_CAST = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
# The greatest ratio of the right side's error to that of the left side.
MOST_LOST = 64.0
# How many times each side is computed, and how many more times if the ratio of the errors seems too large.
_SAMPLES, _MORE = 3, 24
# Functions that ONNX defines, and runtimes compute, as exp(x) - 1 or log(exp(x) + 1): small results lose digits.
_NEAR_ONE = frozenset({"celu", "elu", "selu", "softplus"})
# The relative difference of nearly equal operands, and the factor by which small operands are smaller.
_APART, _SMALL = 2.0**-12, 2.0**-10
# Matrix products with more terms than this are not computed term by term.
_MOST_PRODUCTS = 1 << 17
# Operands far apart in magnitude are powers of two with exponents up to this.
_MOST_EXPONENT = 10.0


class Rounding(Machine):
    """Machine arithmetic in which each result is off by up to one rounding, at random.

    Without `always`, only results that float32 cannot hold are off.
    """

    def __init__(self, rng: np.random.Generator, always: bool) -> None:
        self._rng = rng
        self._always = always

    def _off(self, a: Any, unit: float = _UNIT) -> Any:
        """Numbers, each off by a random error."""
        if np.asarray(a).dtype.kind != "f":
            return a
        return a * (1.0 + unit * self._rng.uniform(-1.0, 1.0, np.shape(a)))

    def _rounded(self, a: Any, exact: Any = True) -> Any:
        """Numbers, with an error where float32 cannot hold them or where they are not `exact` in float64."""
        if np.asarray(a).dtype.kind != "f":
            return a
        if self._always:
            return self._off(a)
        representable = (np.float32(a) == a) & exact
        return a if representable.all() else np.where(representable, a, self._off(a))

    def perturbed(self, feeds: Feeds) -> Feeds:
        """The inputs, each off by up to one rounding."""
        return {v: self._off(a) for v, a in feeds.items()}

    def narrow(self, a: Array, to: DType) -> Array:
        # Rounding would be a jump, and one side might jump at other inputs than the other side. A random error has no
        # jumps.
        return np.where(round_to(a, to) == a, a, self._off(a, _CAST.get(to, _UNIT)))

    def add(self, a: Any, b: Any) -> Array:
        total = super().add(a, b)
        return self._rounded(total, np.subtract(total, a) == b)  # type: ignore[no-any-return]

    def sub(self, a: Any, b: Any) -> Array:
        difference = super().sub(a, b)
        return self._rounded(difference, np.subtract(a, difference) == b)  # type: ignore[no-any-return]

    def mul(self, a: Any, b: Any) -> Array:
        return self._rounded(super().mul(a, b))  # type: ignore[no-any-return]

    def div(self, a: Any, b: Any) -> Array:
        return self._rounded(super().div(a, b))  # type: ignore[no-any-return]

    def matmul(self, a: Array, b: Array) -> Array:
        if a.dtype.kind != "f" or min(a.ndim, b.ndim) < 2 or a.size * b.shape[-1] > _MOST_PRODUCTS:
            return self._rounded(super().matmul(self._off(a), self._off(b)))  # type: ignore[no-any-return]
        return self.sum(self.mul(a[..., :, :, None], b[..., None, :, :]), (-2,))

    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        """The sum in any order: if more than two terms are not 0, each term is off. Sums of integers are exact as long
        as all their parts are below 2^24.
        """
        total = super().sum(a, axes, keepdims)
        if a.dtype.kind != "f":
            return total
        several = np.sum(a != 0, axis=axes, keepdims=keepdims) > 2
        whole = np.all(a == np.trunc(a), axis=axes, keepdims=keepdims)
        several &= ~(whole & (np.sum(np.abs(a), axis=axes, keepdims=keepdims) < 1 / _UNIT))
        if several.any():
            total = np.where(several, super().sum(self._off(a), axes, keepdims), total)
        return self._rounded(total)  # type: ignore[no-any-return]

    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._rounded(super().prod(self._off(a), axes, keepdims))  # type: ignore[no-any-return]

    def cumsum(self, a: Array, axis: int) -> Array:
        return self._rounded(super().cumsum(self._off(a), axis))  # type: ignore[no-any-return]

    def unary(self, name: str, a: Any, *parameters: Any) -> Array:
        result = self._rounded(super().unary(name, a, *parameters))
        if name in _NEAR_ONE and np.asarray(result).dtype.kind == "f":
            # exp(x) is about 1; its rounding error is then multiplied by a parameter.
            change = np.minimum(_UNIT * max(map(abs, parameters), default=1.0), np.abs(result))
            result = result + np.where(
                np.asarray(a) < 0, change * self._rng.uniform(-1.0, 1.0, np.shape(result)), 0.0
            )
        return result  # type: ignore[no-any-return]

    def binary(self, name: str, a: Any, b: Any) -> Array:
        return self._rounded(super().binary(name, a, b))  # type: ignore[no-any-return]

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        super().scatter(name, a, index, self._off(updates))


@dataclass(frozen=True, slots=True)
class Operands:
    """Draws floats for operands: all near the number `base`, some of them small; or (`spread`) far apart in magnitude.

    All elements of an operand have one random sign, or each has its own.
    """

    rng: np.random.Generator
    base: float
    spread: bool

    def __call__(self, shape: tuple[int, ...], dtype: DType) -> Array:
        rng = self.rng
        if self.spread:
            size = 2.0 ** rng.uniform(-_MOST_EXPONENT, _MOST_EXPONENT, shape)
        else:
            size = self.base * (1.0 + _APART * rng.standard_normal(shape))
            size = size * (_SMALL if rng.random() < 0.3 else 1.0)
        sign = rng.choice([-1.0, 1.0], shape if rng.random() < 0.3 else ())
        return np.asarray(size * sign, np.float32).astype(np.float64)


def _base(case: Case, rng: np.random.Generator) -> float:
    """The number near which operands are drawn: 1, or one of the constants whose numbers rules can read."""
    if rng.random() < 0.5:
        return 1.0
    consts = case.before.leaves.consts
    inputs = {v for n in case.before.nodes() for v in n.inputs}
    arrays = [
        c.array
        for v in sorted(inputs & consts.keys())
        if v not in case.problem.opaque and (c := consts[v]).array is not None and c.type.dtype in FLOATS
    ]
    numbers = [float(n) for a in arrays for n in np.ravel(a)[:8]]
    usable = [abs(n) for n in numbers if n and 2.0**-_MOST_EXPONENT < abs(n) < 2.0**_MOST_EXPONENT]
    return usable[int(rng.integers(len(usable)))] if usable else float(rng.uniform(0.5, 4.0))


# The inputs of operators that add or subtract: an operand, the operand that it can cancel, and the sign it needs.
_CANCELLING = {
    "Add": ((0, 1, -1.0), (1, 0, -1.0)),
    "Sub": ((0, 1, 1.0), (1, 0, 1.0)),
    "BatchNormalization": ((0, 3, 1.0),),
}


def _cancel(case: Case, feeds: Feeds, rng: np.random.Generator) -> None:
    """Set one operand of a sum or a difference of the left side so that it nearly cancels the other operand."""
    graph = case.before
    operands = [
        (n.op, n.inputs[at], n.inputs[partner], sign)
        for n in graph.nodes()
        for at, partner, sign in _CANCELLING.get(n.op, ())
        if n.inputs[at] in feeds and n.inputs[at] != n.inputs[partner] and n.types[0].dtype in FLOATS
    ]
    if not operands:
        return
    op, operand, partner, sign = operands[int(rng.integers(len(operands)))]
    inner = Graph.make(graph.topological(), graph.inputs, (partner,), graph.leaves)
    shape = feeds[operand].shape
    try:
        (value,) = evaluation(inner).run(feeds, MACHINE)
        if op == "BatchNormalization":
            value = value.reshape(-1, *(1,) * (len(shape) - 2))
        value = value[(0,) * max(value.ndim - len(shape), 0)]
        broadcast = shape[len(shape) - value.ndim :]
        value = np.broadcast_to(value[tuple(slice(1 if d == 1 else None) for d in broadcast)], shape)
    except Exception:  # the left side has no value, which its own run will report
        return
    cancelling = sign * value * (1.0 + _APART * rng.standard_normal(shape))
    feeds[operand] = np.asarray(cancelling, np.float32).astype(np.float64)


def check_rounding(case: Case, rng: np.random.Generator, rule: AnyRule, turn: int = 0) -> float | None:
    """Compare the rounding errors of both sides for one draw of inputs.

    `turn` selects the inputs: nearly equal, far apart in magnitude, or far apart with one operand that nearly cancels
    another.

    Returns by what factor the right side's error exceeds the left side's (at least 1), or None if there is nothing to
    compare. Raises Wrong if the factor is more than `MOST_LOST`. If the rule may round inputs, the right side's error
    is also divided by the change of the left side's outputs when each input is rounded; then one of the two factors
    must be in the limit.
    """
    draw = _draw_sides(case, rng, turn)
    if draw is None:
        return None
    feeds, left, right = draw
    # The left side's errors are those to be expected of any result (`always`), the right side's those that really
    # occur.
    one, other = sides(case)
    field, before = Rounding(rng, always=True), evaluation(one)
    declared = rule.may_round_inputs
    try:
        own = _errors(before, feeds, left, field, _SAMPLES)
        new = _errors(evaluation(other), feeds, right, Rounding(rng, always=False), _SAMPLES)
        factor = _error_ratio((left, right), own, new)
        if factor <= MOST_LOST:
            return factor
        # The left side may have been exact by luck, or a function may have jumped on one side only. So the left side is
        # sampled again for the same inputs.
        own = _maxima(own, _errors(before, feeds, left, field, _MORE))
        factor = _error_ratio((left, right), own, new)
        if factor <= MOST_LOST:
            return factor
        if declared:
            own = _maxima(own, _errors(before, feeds, left, field, _MORE, perturbed=True))
            again = _error_ratio((left, right), own, new)
            if again <= MOST_LOST:
                return factor
            factor = again
    except (NotEvaluable, Unusable):
        return None
    than = "a rounding of each input would make" if declared else "the left side makes"
    raise Wrong(f"its rounding errors are {factor:.3g} times those that {than}: digits cancel")


def _draw_sides(case: Case, rng: np.random.Generator, turn: int) -> tuple[Feeds, Side, Side] | None:
    """Inputs, and both sides computed for them without errors; None if the left side has no value."""
    for numbers in tried_bindings(case.problem, rng):
        try:
            feeds = draw_feeds(case.problem, numbers, rng, Operands(rng, _base(case, rng), turn % 3 > 0))
            if turn % 3 == 2:
                _cancel(case, feeds, rng)
            left, right = both_sides(case, feeds, MACHINE)
        except Unusable:
            continue
        except (NotEvaluable, Wrong):  # another test reports it
            return None
        alike = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(left, right, strict=True))
        return (feeds, left, right) if alike and any(a.dtype.kind == "f" and a.size for a in left) else None
    return None


def _errors(
    side: Evaluation, feeds: Feeds, exact: Side, field: Rounding, samples: int, perturbed: bool = False
) -> Side:
    """For each element of a side's float outputs, the greatest error in several runs. Raises NotEvaluable, Unusable if
    a run fails.
    """
    errors = [np.zeros(a.shape) for a in exact]
    for _ in range(samples):
        try:
            results = side.run(field.perturbed(feeds) if perturbed else feeds, field)
        except NotEvaluable:
            raise
        except Exception as error:  # a size or an index depends on rounded numbers
            raise Unusable(str(error)) from error
        for greatest, a, b in zip(errors, exact, results, strict=True):
            if a.dtype.kind == "f":
                if a.shape != b.shape:
                    raise Unusable("a size depends on rounded numbers")
                with np.errstate(invalid="ignore"):
                    np.maximum(greatest, np.abs(b - a), out=greatest)
    return errors


def _maxima(one: Side, another: Side) -> Side:
    return [np.maximum(a, b) for a, b in zip(one, another, strict=True)]


def _error_ratio(exact: tuple[Side, Side], own: Side, new: Side) -> float:
    """The greatest quotient of a right side's error and the left side's. The latter counts as at least one rounding."""
    worst = 1.0
    for x, y, a, b in zip(*exact, own, new, strict=True):
        if x.dtype.kind != "f":
            continue
        bound = np.maximum(a, _UNIT * np.maximum(np.abs(x), np.abs(y)))
        # Subnormal numbers have fewer digits, so their errors are not compared.
        fair = np.isfinite(bound) & np.isfinite(b) & (b > np.finfo(np.float32).tiny)
        if fair.any():
            worst = max(worst, float((b[fair] / np.maximum(bound[fair], np.finfo(np.float64).tiny)).max()))
    return worst
