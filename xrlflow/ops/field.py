"""What operators compute in: the real numbers (float64), or a prime field in proofs.

Operators are written once, in terms of `Field`. Arrays of dtype float64 hold elements of the field. Integers, booleans
and strings are ordinary NumPy arrays in every field; all methods below accept them and treat them as NumPy does, except
that division truncates as in ONNX. Moving data (reshape, gather, where) needs no field: operators use NumPy directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
        """Floats of any precision, integers or booleans as elements: an array of dtype float64."""

    @abstractmethod
    def constant(self, value: Number) -> Any:
        """One element: a rational number. A float stands for the rational number that it is exactly."""

    @abstractmethod
    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        """Elements rounded towards zero, as integers of `dtype`. Raises NotEvaluable if the field has no order."""

    def narrow(self, a: Array, to: DType) -> Array:
        """Elements as floats of a narrower type. By default nothing is rounded."""
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
        """The neutral element of `maximum`. Max pooling pads with it."""

    @abstractmethod
    def compare(self, name: str, a: Any, b: Any) -> Array:
        """Booleans: "equal", "less", "less_equal". Raises NotEvaluable if the field has no order."""

    @abstractmethod
    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        """What softmax subtracts from `a` before exp, along `axes`, which are kept with size 1.

        It cancels, so a field may return zero.
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


# W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969): numerators
# and denominators, highest power first, for |x| <= 0.46875, up to 4, and above 4 (in 1/x^2).
_ERF_SMALL = (
    (
        1.85777706184603153e-1,
        3.16112374387056560e00,
        1.13864154151050156e02,
        3.77485237685302021e02,
        3.20937758913846947e03,
    ),
    (
        1.0,
        2.36012909523441209e01,
        2.44024637934444173e02,
        1.28261652607737228e03,
        2.84423683343917062e03,
    ),
)
_ERFC_MIDDLE = (
    (
        2.15311535474403846e-8,
        5.64188496988670089e-1,
        8.88314979438837594e00,
        6.61191906371416295e01,
        2.98635138197400131e02,
        8.81952221241769090e02,
        1.71204761263407058e03,
        2.05107837782607147e03,
        1.23033935479799725e03,
    ),
    (
        1.0,
        1.57449261107098347e01,
        1.17693950891312499e02,
        5.37181101862009858e02,
        1.62138957456669019e03,
        3.29079923573345963e03,
        4.36261909014324716e03,
        3.43936767414372164e03,
        1.23033935480374942e03,
    ),
)
_ERFC_LARGE = (
    (
        1.63153871373020978e-2,
        3.05326634961232344e-1,
        3.60344899949804439e-1,
        1.25781726111229246e-1,
        1.60837851487422766e-2,
        6.58749161529837803e-4,
    ),
    (
        1.0,
        2.56852019228982242e00,
        1.87295284992346725e00,
        5.27905102951428412e-1,
        6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)
_ERF_BLOCK = 1 << 15  # elements per block, so that temporary arrays stay in the cache


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    out = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        out *= x
        out += c
    return out


def _erf_block(x: Array) -> Array:
    size = np.abs(x)
    out = np.empty_like(x)
    small, large = size <= 0.46875, size > 4.0
    s = x[small]
    s2 = s * s
    out[small] = s * _polynomial(_ERF_SMALL[0], s2) / _polynomial(_ERF_SMALL[1], s2)
    middle = ~(small | large)  # includes NaN
    m = size[middle]
    erfc = np.exp(-m * m) * _polynomial(_ERFC_MIDDLE[0], m) / _polynomial(_ERFC_MIDDLE[1], m)
    out[middle] = np.copysign(1.0 - erfc, x[middle])
    if large.any():
        t = np.minimum(size[large], 10.0)
        inverse = 1.0 / (t * t)
        tail = inverse * _polynomial(_ERFC_LARGE[0], inverse) / _polynomial(_ERFC_LARGE[1], inverse)
        erfc = np.exp(-t * t) / t * (1.0 / np.sqrt(np.pi) - tail)
        out[large] = np.copysign(1.0 - erfc, x[large])
    return out


def erf(x: Any) -> Array:
    """The error function in double precision (absolute error below 1e-15)."""
    flat = np.asarray(x, dtype=np.float64).reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _ERF_BLOCK):
        out[start : start + _ERF_BLOCK] = _erf_block(flat[start : start + _ERF_BLOCK])
    result: Array = out.reshape(np.shape(x))
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
    """A power. Squares are one multiplication, as in runtimes, which is much faster."""
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
        return np.asarray(np.max(a, axis=axes, keepdims=keepdims, **_given(initial)))

    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        initial = extreme(a.dtype, False) if a.size == 0 else None
        return np.asarray(np.min(a, axis=axes, keepdims=keepdims, **_given(initial)))

    @property
    def lowest(self) -> float:
        return -np.inf

    def compare(self, name: str, a: Any, b: Any) -> Array:
        return COMPARISONS[name](a, b)  # type: ignore[no-any-return]

    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        if a.size == 0:
            return 0.0
        top = np.max(a, axis=axes, keepdims=True)
        # A row of only -inf gives 0 / 0 either way; +inf must not turn the whole row into inf - inf.
        return top if np.isfinite(top).all() else np.where(np.isfinite(top), top, 0.0)

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        SCATTERS[name].at(a, index, updates)


def _given(initial: Any) -> dict[str, Any]:
    return {} if initial is None else {"initial": initial}


REALS = Reals()
