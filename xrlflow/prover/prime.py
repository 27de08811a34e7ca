"""A prime field for proofs. At a random point equal polynomials agree, and different ones almost never (Schwartz,
Zippel).

J. T. Schwartz, "Fast probabilistic algorithms for verification of polynomial identities", J. ACM 27 (1980).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from xrlflow.ops.field import Array, Field, NotEvaluable, Number
from xrlflow.prover.machine import MACHINE

# The greatest primes below 2^22. Products of two elements, and sums of 512 such products, are exact in float64.
PRIMES = (4194301, 4194287)
_EXACT = 1 << 53
_MASK = (1 << 64) - 1

# Powers with integer exponents in this range are computed by multiplication. Other powers are keyed functions (see
# `PrimeField`), except the square root.
_LEAST_POWER, _MOST_POWER = -2, 4


# The exponents that `frexp` gives for the least and for the greatest float64.
_LEAST_EXPONENT, _MOST_EXPONENT = -1073, 1024


@lru_cache(maxsize=8)
def _powers_of_two(prime: int) -> Array:
    """2**(e - 53) modulo `prime` for each exponent e that `frexp` may return, the least first. A float is its integer
    mantissa of 53 bits times this power.
    """
    exponents = range(_LEAST_EXPONENT, _MOST_EXPONENT + 1)
    return np.array([pow(2, exponent - 53, prime) for exponent in exponents], np.int64)


class ZeroDenominator(ArithmeticError):
    """A denominator is zero, so the inputs must be drawn again."""


class PrimeField(Field):
    """The integers modulo `prime`, as float64 arrays of 0 ... prime - 1.

    exp, Relu, max and others are *keyed functions*: hashes of their name, parameters and arguments. Their only
    properties are that equal arguments give equal results, and that max and min are commutative. `key` seeds the
    hashes. `lowest`, with which max pooling pads, is `prime` itself, a symbol outside of the field.
    """

    real = False

    def __init__(self, prime: int, key: int) -> None:
        self.prime = prime
        self.key = key
        self._terms = _EXACT // (prime * prime)

    # Elements

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Uniformly distributed elements."""
        elements: Array = rng.integers(0, self.prime, shape).astype(np.float64)
        return elements

    def lift(self, array: Array) -> Array:
        kind = array.dtype.kind
        if kind in "iub":
            return np.asarray(np.remainder(array.astype(object), self.prime), np.float64)
        wide = array.astype(np.float64)
        if not np.isfinite(wide).all():
            raise NotEvaluable("a number that is not finite")
        # Every float is an integer times a power of two.
        mantissa, exponent = np.frexp(wide)
        integers = (mantissa * float(1 << 53)).astype(np.int64) % self.prime
        power = _powers_of_two(self.prime)[exponent - _LEAST_EXPONENT]
        return (integers * power % self.prime).astype(np.float64)  # type: ignore[no-any-return]

    def constant(self, value: Number) -> Any:
        if isinstance(value, float) and not np.isfinite(value):
            raise NotEvaluable("a number that is not finite")
        number = Fraction(value)
        if number.denominator % self.prime == 0:
            raise ZeroDenominator(str(value))
        inverse = pow(number.denominator, -1, self.prime)
        return np.float64(number.numerator % self.prime * inverse % self.prime)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        raise NotEvaluable("an element of a field as an integer")

    # Arithmetic

    def _are_integers(self, *operands: Any) -> bool:
        """Whether all operands are integers or booleans, which are computed as ordinary numbers."""
        return all(np.asarray(o).dtype.kind in "iub" for o in operands)

    def _element(self, a: Any) -> Any:
        """An operand as elements of the field. Integers, which may be negative, are reduced modulo `prime`."""
        array = np.asarray(a)
        return np.remainder(array, self.prime).astype(np.float64) if array.dtype.kind in "iu" else a

    def add(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return np.add(a, b)  # type: ignore[no-any-return]
        a, b = self._element(a), self._element(b)
        return np.fmod(np.add(a, b), self.prime)  # type: ignore[no-any-return]

    def sub(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return np.subtract(a, b)  # type: ignore[no-any-return]
        a, b = self._element(a), self._element(b)
        return np.fmod(np.subtract(a, b) + self.prime, self.prime)  # type: ignore[no-any-return]

    def mul(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return np.multiply(a, b)  # type: ignore[no-any-return]
        a, b = self._element(a), self._element(b)
        return np.fmod(np.multiply(a, b), self.prime)  # type: ignore[no-any-return]

    def neg(self, a: Any) -> Array:
        if self._are_integers(a):
            return np.negative(a)  # type: ignore[no-any-return]
        return np.fmod(self.prime - np.asarray(a), self.prime)  # type: ignore[no-any-return]

    def inverse(self, a: Any) -> Array:
        """1 / a in the field, by Fermat's little theorem. Raises ZeroDenominator if an element is 0."""
        base = np.asarray(a, np.float64)
        if (np.fmod(base, self.prime) == 0).any():
            raise ZeroDenominator("a denominator")
        out = np.ones_like(base)
        exponent = self.prime - 2
        while exponent:
            if exponent & 1:
                out = np.fmod(out * base, self.prime)
            base = np.fmod(base * base, self.prime)
            exponent >>= 1
        return out

    def div(self, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return MACHINE.div(a, b)
        return self.mul(a, self.inverse(self._element(b)))

    def matmul(self, a: Array, b: Array) -> Array:
        if self._are_integers(a, b):
            return np.matmul(a, b)  # type: ignore[no-any-return]
        a, b = self._element(a), self._element(b)
        depth = a.shape[-1]
        if depth <= self._terms:
            return np.fmod(np.matmul(a, b), self.prime)  # type: ignore[no-any-return]
        total: Array | None = None
        for start in range(0, depth, self._terms):
            rows = b[..., start : start + self._terms, :] if b.ndim > 1 else b[start : start + self._terms]
            part = np.fmod(np.matmul(a[..., start : start + self._terms], rows), self.prime)
            total = part if total is None else np.fmod(total + part, self.prime)
        assert total is not None
        return total

    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        total = np.asarray(np.sum(a, axis=axes, keepdims=keepdims, dtype=a.dtype))
        return total if self._are_integers(a) else np.fmod(total, self.prime)

    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        if self._are_integers(a):
            return np.asarray(np.prod(a, axis=axes, keepdims=keepdims, dtype=a.dtype))
        return self._fold(a, axes, keepdims, lambda x, y: np.fmod(x * y, self.prime), 1.0)

    def _fold(
        self, a: Array, axes: tuple[int, ...] | None, keepdims: bool, merge: Any, empty: float
    ) -> Array:
        """Reduce along axes, one element after the other. `merge` combines two elements; `empty` is the result of
        none.
        """
        reduced = tuple(range(a.ndim)) if axes is None else tuple(i % a.ndim for i in axes)
        remaining = [i for i in range(a.ndim) if i not in reduced]
        shape = [a.shape[i] for i in remaining]
        flat = a.transpose([*remaining, *reduced]).reshape([*shape, -1])
        out = np.full(shape, empty)
        for i in range(flat.shape[-1]):
            out = flat[..., 0] if i == 0 else merge(out, flat[..., i])
        return out.reshape([1 if i in reduced else d for i, d in enumerate(a.shape)]) if keepdims else out

    def cumsum(self, a: Array, axis: int) -> Array:
        total = np.cumsum(a, axis=axis, dtype=a.dtype)
        return total if self._are_integers(a) else np.fmod(total, self.prime)

    # Keyed functions

    def _hash(self, name: str, *parts: Any) -> Array:
        """Hash a name and elements (arrays that broadcast) to elements of the field."""
        seed = self.key
        for byte in name.encode():
            seed = (seed * 0x100000001B3 ^ byte) & _MASK
        state = np.asarray(seed, np.uint64)
        for part in parts:
            with np.errstate(over="ignore"):
                state = _scramble(state ^ np.asarray(self._element(part), np.float64).astype(np.uint64))
        return (state % np.uint64(self.prime)).astype(np.float64)

    def unary(self, name: str, a: Any, *parameters: Number) -> Array:
        return (
            MACHINE.unary(name, a, *parameters)
            if self._are_integers(a)
            else self._hash(f"{name}{parameters}", a)
        )

    def binary(self, name: str, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            return MACHINE.binary(name, a, b)
        if name != "pow":
            return self._hash(name, a, b)
        base, exponent = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
        out = self._hash(name, base, exponent)
        for power in range(_LEAST_POWER, _MOST_POWER + 1):
            at = exponent == power % self.prime
            if at.any():
                value = np.ones(int(at.sum()))
                for _ in range(abs(power)):
                    value = np.fmod(value * base[at], self.prime)
                out[at] = self.inverse(value) if power < 0 else value
        at = exponent == self.constant(Fraction(1, 2))
        if at.any():
            out[at] = self.unary("sqrt", base[at])
        return out

    def _extreme(self, name: str, a: Any, b: Any) -> Array:
        """max or min as a commutative and idempotent keyed function, whose neutral element is `lowest`."""
        a, b = np.asarray(a), np.asarray(b)
        if self._are_integers(a, b):
            return (np.maximum if name == "max" else np.minimum)(a, b)  # type: ignore[no-any-return]
        out = self._hash(name, np.minimum(a, b), np.maximum(a, b))
        out = np.where(a == b, a, out)
        return np.where(a == self.lowest, b, np.where(b == self.lowest, a, out))

    def maximum(self, a: Any, b: Any) -> Array:
        return self._extreme("max", a, b)

    def minimum(self, a: Any, b: Any) -> Array:
        return self._extreme("min", a, b)

    def _extreme_of(self, name: str, a: Array, axes: tuple[int, ...] | None, keepdims: bool) -> Array:
        """max or min along axes: a keyed function of the sorted elements."""
        if self._are_integers(a):
            function = np.max if name == "max" else np.min
            return np.asarray(function(a, axis=axes, keepdims=keepdims))
        reduced = tuple(range(a.ndim)) if axes is None else tuple(i % a.ndim for i in axes)
        remaining = [i for i in range(a.ndim) if i not in reduced]
        shape = [a.shape[i] for i in remaining]
        flat = np.sort(a.transpose([*remaining, *reduced]).reshape([*shape, -1]), axis=-1)
        if flat.shape[-1] == 0:
            raise NotEvaluable("the extreme of nothing")
        if flat.shape[-1] == 1:
            out = flat[..., 0]
        elif flat.shape[-1] == 2:
            out = self._extreme(name, flat[..., 0], flat[..., 1])
        else:
            out = self._hash(f"{name} of many", *(flat[..., i] for i in range(flat.shape[-1])))
        return out.reshape([1 if i in reduced else d for i, d in enumerate(a.shape)]) if keepdims else out

    def max(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._extreme_of("max", a, axes, keepdims)

    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._extreme_of("min", a, axes, keepdims)

    @property
    def lowest(self) -> float:
        return float(self.prime)

    def compare(self, name: str, a: Any, b: Any) -> Array:
        if self._are_integers(a, b):
            functions = {"equal": np.equal, "less": np.less, "less_equal": np.less_equal}
            return functions[name](a, b)  # type: ignore[no-any-return]
        if name != "equal":
            raise NotEvaluable("an order of the elements of a field")
        return np.equal(a, b)  # type: ignore[no-any-return]

    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        return np.float64(0.0)

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        if self._are_integers(a):
            {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[name].at(
                a, index, updates
            )
        elif name == "add":
            np.add.at(a, index, updates)
            np.fmod(a, self.prime, out=a)
        else:
            raise NotEvaluable(f"scatter by {name} in a field")


def _scramble(state: Any) -> Any:
    """One round of splitmix64 (G. L. Steele et al., OOPSLA 2014)."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
