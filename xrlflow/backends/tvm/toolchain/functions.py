"""Elementary functions in the arithmetic of a vector unit.

LLVM compiles `exp`, `tanh` and `erf` of a vector to one call of the C library for each lane: 400,000 sigmoids in an
activation of EfficientNet take milliseconds. This module has the usual polynomial and rational approximations in single
precision: exp is exact within 1 unit in the last place, sigmoid within 2, tanh and erf within 5 (see the tests);
infinities and NaN are as in IEEE 754. (Powers: see `powers`.) The coefficients come from Cephes (Moshier) for exp, and
from Eigen for tanh and erf.

Half precision is computed in single precision. Double precision, and other functions, are left to the C library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_LOG2_E = 1.44269504088896341
# ln 2 in two parts. The first has few bits, so that n * _LN2_HIGH is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_MINUS = tuple(c if i % 2 else -c for i, c in enumerate(_EXP))
# Arguments are limited to these bounds, at which the result is infinite or zero without further code.
_EXP_HIGHEST, _EXP_LOWEST = 89.0, -105.0
_ROUNDING = 1.5 * 2**23 + 254
# For sigmoid, whose power of 2 is a single factor: its exponent bits range from those of zero to those of infinity.
_SHORT_ROUNDING, _SIGMOID_HIGHEST = 1.5 * 2**23 + 127, 88.0
_TANH_LIMIT = 7.90531110763549805
_TANH_ABOVE = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_LIMIT = 3.7439211627767994
_ERF_ABOVE = (
    2.2905065861350646e-04,
    3.4082910107109506e-03,
    5.0955695062380861e-02,
    1.8520832239976145e-01,
    1.128379143519084,
)
_ERF_BELOW = (
    -1.1791602954361697e-07,
    2.3547966471313185e-05,
    1.0179625278914885e-03,
    1.4070470171167667e-02,
    1.1098505178285362e-01,
    4.9746925110067538e-01,
    1.0,
)


# Functions that TVM would call without vectors, and only in single and double precision.
FROM_C = ("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh")


def register() -> None:
    """Make TVM compute functions as this module does on processors, once per process."""
    from tvm import tirx

    written = {"exp": _exp, "tanh": _tanh, "erf": _erf, "sigmoid": _sigmoid}
    for name in (*written, *FROM_C):
        lower = _lowering(name, written.get(name))
        tirx.register_intrin_lowering(f"tirx.{name}", target="llvm", f=lower, level=99)


def _lowering(name: str, single: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """The function that lowers a call. `single`: its code in single precision; None: the C library computes it."""
    from tvm import tirx

    def lower(call: Any) -> Any:
        (x,) = call.args
        kind = kind_of(x)
        if kind == "float16":
            return in_single(x.astype(like(x, "float32"))).astype(x.ty.dtype)
        if kind == "float32":
            return in_single(x)
        if name == "exp":
            return tirx.call_llvm_pure_intrin(x.ty.dtype, "llvm.exp", x)
        if name == "sigmoid":
            one = tirx.const(1.0, x.ty.dtype)
            return one / (one + tirx.exp(-x))
        return _each(name, x)

    def in_single(x: Any) -> Any:
        return _each(f"{name}f", x) if single is None else bound(x, single)

    return lower


def kind_of(x: Any) -> str:
    """The type of a vector's elements."""
    return str(x.ty.dtype).partition("x")[0]


def like(x: Any, kind: str) -> str:
    """The type of a vector with as many elements as `x`, of type `kind`."""
    _, by, lanes = str(x.ty.dtype).partition("x")
    return kind + by + lanes


def _each(name: str, x: Any) -> Any:
    """A function of the C library, called for each element of a vector: called with the vector, it would compute the
    first element only."""
    from tvm import tirx

    lanes = int(like(x, "").removeprefix("x") or 1)
    if lanes == 1:
        return tirx.call_pure_extern(x.ty.dtype, name, x)

    def computed(vector: Any) -> Any:
        indices = [tirx.IntImm("int32", lane) for lane in range(lanes)]
        parts = [tirx.Shuffle([vector], [index]) for index in indices]
        return tirx.Shuffle([tirx.call_pure_extern(kind_of(x), name, part) for part in parts], indices)

    return bound(x, computed)


def bound(value: Any, body: Callable[[Any], Any]) -> Any:
    """The expression `body(variable)`, where the variable holds `value`, so that the value is computed once. If the
    value is a constant, the expression is `body(value)`. (TVM's simplification replaces such a variable by its
    constant, and fails if it sees the variable twice.)"""
    from tvm import tirx

    if isinstance(value.value if isinstance(value, tirx.Broadcast) else value, tirx.FloatImm | tirx.IntImm):
        return body(value)
    variable = tirx.Var("t", value.ty)
    return tirx.Let(variable, value, body(variable))


def horner(x: Any, coefficients: Sequence[float]) -> Any:
    from tvm import tirx

    result = tirx.const(coefficients[0], x.ty.dtype)
    for coefficient in coefficients[1:]:
        result = result * x + tirx.const(coefficient, x.ty.dtype)
    return result


def clamped(x: Any, low: float, high: float) -> Any:
    """x limited to [low, high]. NaN remains: max(a, b) is `a > b ? a : b` and min(a, b) is `a < b ? a : b`, so NaN as b
    is returned."""
    from tvm import tirx

    return tirx.Min(tirx.const(high, x.ty.dtype), tirx.Max(tirx.const(low, x.ty.dtype), x))


def _exp(x: Any) -> Any:
    """exp(x) = 2^n exp(r), where r = x - n ln 2 is at most half of ln 2. The power has two factors, since n can be 128,
    for which 2^n is no float.

    Adding x / ln 2 to a number whose last place is worth 1 rounds it to n. The last bits of the sum are n + 254: the
    sum of the exponents of both factors.
    """
    from tvm import tirx

    def reduced(bounded: Any) -> Any:
        rounded = bounded * tirx.const(_LOG2_E, x.ty.dtype) + tirx.const(_ROUNDING, x.ty.dtype)
        return bound(rounded, lambda rounded: scaled(bounded, rounded))

    def scaled(bounded: Any, rounded: Any) -> Any:
        def remainder(n: Any) -> Any:
            return bounded - n * tirx.const(_LN2_HIGH, x.ty.dtype) - n * tirx.const(_LN2_LOW, x.ty.dtype)

        r = bound(rounded - tirx.const(_ROUNDING, x.ty.dtype), remainder)
        bits = tirx.reinterpret(like(x, "uint32"), rounded)
        return bound(r, lambda r: bound(bits, lambda bits: product(r, bits)))

    def product(r: Any, bits: Any) -> Any:
        def shifted(places: int) -> Any:
            return bits << tirx.const(places, bits.ty.dtype)

        one = tirx.const(1.0, x.ty.dtype)
        fraction = (horner(r, _EXP) * r + one) * r + one
        exponent = tirx.const(0xFF800000, bits.ty.dtype)  # the sign and the exponent of a float
        return bound(
            shifted(22) & exponent,  # half of the exponent, rounded down
            lambda half: (
                fraction
                * tirx.reinterpret(x.ty.dtype, half)
                * tirx.reinterpret(x.ty.dtype, shifted(23) - half)
            ),
        )

    return bound(clamped(x, _EXP_LOWEST, _EXP_HIGHEST), reduced)


def _rational(x: Any, limit: float, above: Sequence[float], below: Sequence[float]) -> Any:
    def of(bounded: Any) -> Any:
        return bound(
            bounded * bounded, lambda square: bounded * horner(square, above) / horner(square, below)
        )

    return bound(clamped(x, -limit, limit), of)


def _tanh(x: Any) -> Any:
    return _rational(x, _TANH_LIMIT, _TANH_ABOVE, _TANH_BELOW)


def _erf(x: Any) -> Any:
    return _rational(x, _ERF_LIMIT, _ERF_ABOVE, _ERF_BELOW)


def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)). The power of 2 needs one factor only: beyond its range the result is 0 or 1."""
    from tvm import tirx

    one = tirx.const(1.0, x.ty.dtype)
    rounding = tirx.const(_SHORT_ROUNDING, x.ty.dtype)

    def reduced(bounded: Any) -> Any:
        rounded = bounded * tirx.const(-_LOG2_E, x.ty.dtype) + rounding
        return bound(rounded, lambda rounded: remainder(bounded, rounded))

    def remainder(bounded: Any, rounded: Any) -> Any:
        def of(n: Any) -> Any:
            r = bounded + n * tirx.const(_LN2_HIGH, x.ty.dtype) + n * tirx.const(_LN2_LOW, x.ty.dtype)
            return bound(r, lambda r: divided(r, rounded))

        return bound(rounded - rounding, of)

    def divided(r: Any, rounded: Any) -> Any:
        bits = like(x, "uint32")
        scale = tirx.reinterpret(bits, rounded) << tirx.const(23, bits)
        power = (horner(r, _EXP_MINUS) * r - one) * r + one  # exp(-r)
        return one / (one + power * tirx.reinterpret(x.ty.dtype, scale))

    return bound(clamped(x, -_EXP_HIGHEST, _SIGMOID_HIGHEST), reduced)
