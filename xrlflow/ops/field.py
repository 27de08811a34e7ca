"""The numbers in which operators compute: the real numbers (float64), or a prime field in proofs.

Operators are written once, with the methods of `Field`. Arrays of dtype float64 hold elements of the field. Integers,
booleans and strings are ordinary NumPy arrays in every field; all methods below accept them and treat them as NumPy
does, except that division truncates as in ONNX. Moving data (reshape, gather, where) needs no field: operators use
NumPy directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.ir import DType

Array = npt.NDArray[Any]
Number = int | float | Fraction


class NotEvaluable(Exception):
    """The evaluator does not support this operator, or this use of it, over this field."""


class Field(ABC):
    """Arithmetic on arrays of elements.

    If a field is not `real`, `unary` and `binary` are functions of which only name and parameters are known. Operators
    whose meaning depends on order, rounding or irrational constants ("numeric", see OpSpec) are evaluated over a `real`
    field only.
    """

    real: bool

    @abstractmethod
    def lift(self, array: Array) -> Array:
        """Floats of any precision, integers or booleans, converted to elements of the field: an array of dtype
        float64.
        """

    @abstractmethod
    def constant(self, value: Number) -> Any:
        """One element of the field, from a rational number. A float stands for the rational number that it
        exactly is.
        """

    @abstractmethod
    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        """Elements rounded towards zero, as integers of `dtype`. Raises NotEvaluable if the field has no order."""

    def narrow(self, a: Array, to: DType) -> Array:
        """Elements after a cast to a narrower type of floats. By default nothing is rounded."""
        return a

    @abstractmethod
    def add(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def sub(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def mul(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def div(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def neg(self, a: Any) -> Array: ...

    @abstractmethod
    def matmul(self, a: Array, b: Array) -> Array:
        """The product over the last two axes; the axes before them are broadcast, as in numpy.matmul."""

    @abstractmethod
    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array: ...

    @abstractmethod
    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array: ...

    @abstractmethod
    def cumsum(self, a: Array, axis: int) -> Array: ...

    @abstractmethod
    def unary(self, name: str, a: Any, *parameters: Number) -> Array:
        """A function of one argument, element by element. Raises NotEvaluable for an unknown name."""

    @abstractmethod
    def binary(self, name: str, a: Any, b: Any) -> Array:
        """A function of two arguments that broadcast: "pow", "prelu", "mod", "fmod"."""

    @abstractmethod
    def maximum(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def minimum(self, a: Any, b: Any) -> Array: ...

    @abstractmethod
    def max(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array: ...

    @abstractmethod
    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array: ...

    @property
    @abstractmethod
    def lowest(self) -> Any:
        """The neutral element of `maximum`, with which max pooling pads."""

    @abstractmethod
    def compare(self, name: str, a: Any, b: Any) -> Array:
        """The result of a comparison, as booleans: "equal", "less", "less_equal". Raises NotEvaluable if the field has
        no order.
        """

    @abstractmethod
    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        """What softmax subtracts from `a` before exp, along `axes`; they stay in the result, with size 1.

        The subtraction does not change the softmax, so a field may return zero.
        """

    @abstractmethod
    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        """a[index] = name(a[index], updates) in place; repeated indices are applied one by one.

        `name` is "add", "mul", "max" or "min".
        """

    # --- derived from the methods above ---

    def mean(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        count = a.size if axes is None else prod(a.shape[i] for i in axes)
        total = self.sum(a, axes, keepdims)
        return self.div(total, self.constant(count) if total.dtype.kind == "f" else count)

    def square(self, a: Array) -> Array:
        return self.mul(a, a)


def integer_divide(a: Any, b: Any) -> Array:
    """The quotient of integers, rounded towards zero, as in ONNX and C."""
    quotient: Array = np.floor_divide(a, b)
    if quotient.dtype.kind == "i":
        quotient = quotient + ((np.remainder(a, b) != 0) & ((np.less(a, 0)) != np.less(b, 0)))
    return quotient


def erf(x: Any) -> Array:
    """The error function in double precision."""
    from scipy.special import erf as of_floats  # slow to import, and most models do not need it

    result: Array = np.asarray(of_floats(np.asarray(x, dtype=np.float64)))
    return result


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _elu(x: Array, alpha: float) -> Array:
    return np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x)


def _thresholded(x: Array, alpha: float) -> Array:
    return np.where(x > alpha, x, np.zeros_like(x))


def _shrink(x: Array, bias: float, threshold: float) -> Array:
    return np.where(x < -threshold, x + bias, np.where(x > threshold, x - bias, np.zeros_like(x)))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + erf(x * np.sqrt(0.5)))


def _gelu_tanh(x: Array) -> Array:
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + np.tanh(inner))  # type: ignore[no-any-return]


REAL_UNARY: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "celu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0) / alpha), x),
    "cos": np.cos,
    "cosh": np.cosh,
    "elu": _elu,
    "erf": erf,
    "exp": np.exp,
    "floor": np.floor,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "hard_sigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0.0, 1.0),
    "leaky_relu": lambda x, alpha: np.where(x < 0, alpha * x, x),
    "log": np.log,
    "relu": lambda x: np.maximum(x, 0),
    "round": np.rint,
    "selu": lambda x, alpha, gamma: gamma * _elu(x, alpha),
    "shrink": _shrink,
    "sigmoid": _sigmoid,
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "thresholded_relu": _thresholded,
}


def _pow(x: Any, exponent: Any) -> Any:
    """A power. Squares are computed by one multiplication, as in runtimes, which is much faster."""
    if np.size(exponent) == 1 and np.ndim(exponent) <= np.ndim(x) and np.all(exponent == 2):
        return np.multiply(x, x)
    return np.power(x, exponent)


REAL_BINARY: dict[str, Callable[..., Any]] = {
    "fmod": np.fmod,
    "mod": np.mod,
    "pow": _pow,
    "prelu": lambda x, slope: np.where(x < 0, slope * x, x),
}

COMPARISONS: dict[str, Callable[..., Any]] = {
    "equal": np.equal,
    "less": np.less,
    "less_equal": np.less_equal,
}

SCATTERS: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def extreme(dtype: np.dtype[Any], lowest: bool) -> Any:
    """The least (or greatest) number of an integer or float type, including infinity."""
    if dtype.kind == "f":
        return -np.inf if lowest else np.inf
    if dtype.kind == "b":
        return not lowest
    info = np.iinfo(dtype)
    return info.min if lowest else info.max


class Reals(Field):
    """The real numbers as float64. Infinities and NaN behave as in IEEE 754."""

    real = True

    def lift(self, array: Array) -> Array:
        return array if array.dtype == np.float64 else array.astype(np.float64)

    def constant(self, value: Number) -> float:
        return float(value)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        return np.trunc(a).astype(dtype)

    def add(self, a: Any, b: Any) -> Array:
        return np.add(a, b)  # type: ignore[no-any-return]

    def sub(self, a: Any, b: Any) -> Array:
        return np.subtract(a, b)  # type: ignore[no-any-return]

    def mul(self, a: Any, b: Any) -> Array:
        return np.multiply(a, b)  # type: ignore[no-any-return]

    def div(self, a: Any, b: Any) -> Array:
        if getattr(a, "dtype", None) is not None and a.dtype.kind in "iu":
            return integer_divide(a, b)
        return np.divide(a, b)  # type: ignore[no-any-return]

    def neg(self, a: Any) -> Array:
        return np.negative(a)  # type: ignore[no-any-return]

    def matmul(self, a: Array, b: Array) -> Array:
        if b.ndim == 2 and a.ndim > 2 and a.flags.c_contiguous:  # one large product instead of many
            rows: Array = np.matmul(a.reshape(-1, a.shape[-1]), b) if a.shape[-1] else np.matmul(a, b)
            return rows.reshape(*a.shape[:-1], b.shape[1])
        return np.matmul(a, b)  # type: ignore[no-any-return]

    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return np.asarray(np.sum(a, axis=axes, keepdims=keepdims, dtype=a.dtype))

    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return np.asarray(np.prod(a, axis=axes, keepdims=keepdims, dtype=a.dtype))

    def cumsum(self, a: Array, axis: int) -> Array:
        return np.cumsum(a, axis=axis, dtype=a.dtype)

    def unary(self, name: str, a: Any, *parameters: Number) -> Array:
        function = REAL_UNARY.get(name)
        if function is None:
            raise NotEvaluable(name)
        return function(a, *parameters)  # type: ignore[no-any-return]

    def binary(self, name: str, a: Any, b: Any) -> Array:
        function = REAL_BINARY.get(name)
        if function is None:
            raise NotEvaluable(name)
        return function(a, b)  # type: ignore[no-any-return]

    def maximum(self, a: Any, b: Any) -> Array:
        return np.maximum(a, b)  # type: ignore[no-any-return]

    def minimum(self, a: Any, b: Any) -> Array:
        return np.minimum(a, b)  # type: ignore[no-any-return]

    def max(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        initial = extreme(a.dtype, True) if a.size == 0 else None
        return np.asarray(np.max(a, axis=axes, keepdims=keepdims, **_initial_argument(initial)))

    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        initial = extreme(a.dtype, False) if a.size == 0 else None
        return np.asarray(np.min(a, axis=axes, keepdims=keepdims, **_initial_argument(initial)))

    @property
    def lowest(self) -> float:
        return -np.inf

    def compare(self, name: str, a: Any, b: Any) -> Array:
        return COMPARISONS[name](a, b)  # type: ignore[no-any-return]

    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        if a.size == 0:
            return 0.0
        top = np.max(a, axis=axes, keepdims=True)
        # A row of only -inf gives 0 / 0 either way. A row with +inf must not become inf - inf everywhere.
        return top if np.isfinite(top).all() else np.where(np.isfinite(top), top, 0.0)

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        SCATTERS[name].at(a, index, updates)


def _initial_argument(initial: Any) -> dict[str, Any]:
    return {} if initial is None else {"initial": initial}


REALS = Reals()
