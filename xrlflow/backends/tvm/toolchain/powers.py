"""x to the power y, in the arithmetic of a vector unit.

LLVM compiles a power to one call of the C library for each lane. Here 2^(y log2 |x|) is computed in double precision,
and rounded once: it is exact within 1 unit in the last place, with signs, zeros, infinities and NaN as in C (see the
tests). A power with a small integer as its exponent becomes a product, and one with 0.5 a square root.

Half precision is computed in single precision. Double precision is left to the C library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from xrlflow.backends.tvm.toolchain.functions import bound, clamped, horner, kind_of, like

_PRECISE = "float64"
# Minimax polynomials. The first is log2(m) / s as a function of s^2, where s = (m - 1) / (m + 1) and m is between
# sqrt(1/2) and sqrt(2) (error 5e-12). The second is 2^r for |r| <= 1/2 (error 3e-9; half a unit in the last place is
# 6e-8).
_LOG2 = (
    0.34072521312762044,
    0.4116729915274935,
    0.5770835802397304,
    0.961796673367895,
    2.885390081790065,
)
_EXP2 = (
    0.0001546973198244552,
    0.0013400432165251623,
    0.00961802560294165,
    0.05550327214209535,
    0.24022651213595259,
    0.69314720671062,
    0.9999999999595488,
)
# Exponents beyond this limit give infinity or zero in single precision.
_EXPONENT_LIMIT = 200.0
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD  # the bits of a double
_FRACTION = (1 << 52) - 1
_BIAS = 1 << 10  # keeps the exponents of all numbers above zero
_TWO_52 = 0x4330000000000000  # the bits of 2^52, whose last place is worth 1
_ROUNDING = 1.5 * 2**52
# Powers with integer exponents up to the first number become products. Up to the second number, the products are
# computed in single precision, as in ONNX Runtime.
_LARGEST_PRODUCT, _SINGLE_PRODUCT = 8, 3


def register() -> None:
    """Make TVM compute powers as this module does on processors, once per process."""
    from tvm import tirx

    tirx.register_intrin_lowering("tirx.pow", target="llvm", f=_lowered, level=99)


def _lowered(call: Any) -> Any:
    """The lowered call of `pow`."""
    from tvm import tirx

    x, y = call.args
    kind = kind_of(x)
    if kind == "float16":
        single = like(x, "float32")
        return _single(x.astype(single), y.astype(single)).astype(x.ty.dtype)
    return _single(x, y) if kind == "float32" else tirx.call_llvm_pure_intrin(x.ty.dtype, "llvm.pow", x, y)


def _single(x: Any, y: Any) -> Any:
    """x^y in single precision."""
    exponent = _number(y)
    if exponent == 0.5:
        return bound(x, _root)
    if exponent is not None and is_short(exponent):
        return bound(x, lambda x: _product(x, int(exponent)))
    return bound(x, lambda x: bound(y, lambda y: _power(x, y)))


def is_short(exponent: float) -> bool:
    """Whether a power with this exponent is computed as a product or a root."""
    return exponent == 0.5 or (exponent.is_integer() and abs(exponent) <= _LARGEST_PRODUCT)


def _constant(y: Any) -> float | None:
    """The value of a constant, or of a vector whose lanes are all the same constant; None for other expressions."""
    from tvm import tirx

    if isinstance(y, tirx.Broadcast):
        y = y.value
    return float(y.value) if isinstance(y, tirx.FloatImm) else None


def _number(y: Any) -> float | None:
    """The value of a finite constant; None for other expressions."""
    value = _constant(y)
    return value if value is not None and math.isfinite(value) else None


def _product(x: Any, exponent: int) -> Any:
    """x to the power of a small integer. Products of more than `_SINGLE_PRODUCT` factors, and divisions by products,
    are computed in double precision and rounded once."""
    from tvm import tirx

    one = tirx.const(1.0, x.ty.dtype)
    if exponent == 0:
        return one
    if exponent == -1:
        return one / x
    if 0 < exponent <= _SINGLE_PRODUCT:
        return multiplied(x, exponent)

    def of(precise: Any) -> Any:
        product = multiplied(precise, abs(exponent))
        product = tirx.const(1.0, precise.ty.dtype) / product if exponent < 0 else product
        return product.astype(x.ty.dtype)

    return bound(x.astype(like(x, _PRECISE)), of)


def multiplied(x: Any, exponent: int) -> Any:
    """x to a positive integer power, as a product in which factors recur. LLVM computes each different factor once."""
    if exponent == 1:
        return x
    half = multiplied(x, exponent // 2)
    return half * half * x if exponent % 2 else half * half


def _root(x: Any) -> Any:
    """x to the power 0.5. Unlike the square root, the result is infinity for minus infinity, and plus zero for minus
    zero."""
    from tvm import tirx

    def const(value: float) -> Any:
        return tirx.const(value, x.ty.dtype)

    root = tirx.Select(x == const(-math.inf), const(math.inf), tirx.sqrt(x))
    return tirx.Select(x == const(0.0), const(0.0), root)


def _power(x: Any, y: Any) -> Any:
    """2^(y log2 |x|), negative if x is negative and y is odd; NaN for a negative number with an exponent that is not an
    integer."""
    from tvm import tirx

    double = like(x, _PRECISE)

    def const(value: float, kind: str = double) -> Any:
        return tirx.const(value, kind)

    def scaled(logarithm: Any, exponent: Any) -> Any:
        # x = 1 and y = 0 give 1 for NaN and infinity, too
        one = tirx.Or(logarithm == const(0.0), exponent == const(0.0))
        product = clamped(exponent * logarithm, -_EXPONENT_LIMIT, _EXPONENT_LIMIT)
        return bound(
            tirx.Select(one, const(0.0), product),
            lambda power: _exp2(power, lambda size: bound(size.astype(x.ty.dtype), signed)),
        )

    def signed(size: Any) -> Any:
        zero = const(0.0, x.ty.dtype)
        whole = tirx.floor(y) == y
        half = y * const(0.5, x.ty.dtype)
        odd = tirx.And(whole, tirx.floor(half) != half)
        bits = like(x, "uint32")
        sign = tirx.reinterpret(bits, x) & tirx.const(1 << 31, bits)
        result = tirx.reinterpret(bits, size) | tirx.Select(odd, sign, tirx.const(0, bits))
        undefined = tirx.And(tirx.And(x < zero, x > const(-math.inf, x.ty.dtype)), tirx.Not(whole))
        return tirx.Select(undefined, const(math.nan, x.ty.dtype), tirx.reinterpret(x.ty.dtype, result))

    def of(size: Any) -> Any:
        return _log2(size, lambda logarithm: bound(y.astype(double), lambda y: scaled(logarithm, y)))

    base = _constant(x)
    if base is not None:
        logarithm = math.log2(abs(base)) if base else -math.inf
        return bound(
            const(logarithm), lambda logarithm: bound(y.astype(double), lambda y: scaled(logarithm, y))
        )
    return bound(tirx.abs(x).astype(double), of)


def _log2(size: Any, then: Callable[[Any], Any]) -> Any:
    """The expression that `then` returns for the base-2 logarithm of a double, `size`, that is not negative. size = m
    2^k, where m is between sqrt(1/2) and sqrt(2). (`then` gets the variable of the logarithm, since TVM's
    simplification fails on nested variables.)"""
    from tvm import tirx

    def const(value: float) -> Any:
        return tirx.const(value, size.ty.dtype)

    def integer(value: int) -> Any:
        return tirx.const(value, like(size, "uint64"))

    def exponent(bits: Any) -> Any:
        shifted = (bits >> integer(52)) | integer(_TWO_52)
        return tirx.reinterpret(size.ty.dtype, shifted) - const(2.0**52 + _BIAS)

    def of(bits: Any) -> Any:
        m = tirx.reinterpret(size.ty.dtype, (bits & integer(_FRACTION)) + integer(_ROOT_OF_HALF))
        return bound(m, lambda m: bound((m - const(1.0)) / (m + const(1.0)), lambda s: squared(bits, s)))

    def squared(bits: Any, s: Any) -> Any:
        return bound(s * s, lambda square: bound(exponent(bits) + s * horner(square, _LOG2), special))

    def special(logarithm: Any) -> Any:
        logarithm = tirx.Select(size == const(0.0), const(-math.inf), logarithm)
        return bound(tirx.Select(size < const(math.inf), logarithm, size), then)  # infinity and NaN remain

    return bound(tirx.reinterpret(like(size, "uint64"), size) + integer((_BIAS << 52) - _ROOT_OF_HALF), of)


def _exp2(x: Any, then: Callable[[Any], Any]) -> Any:
    """The expression that `then` returns for 2^x, where x is a double within `_EXPONENT_LIMIT`."""
    from tvm import tirx

    rounding, whole = tirx.const(_ROUNDING, x.ty.dtype), like(x, "uint64")

    # The variable holds bits, because TVM's simplification would replace x - ((x + c) - c) by 0.
    def of(rounded: Any) -> Any:
        bits = rounded + tirx.const(1023, whole)
        scale = tirx.reinterpret(x.ty.dtype, bits << tirx.const(52, whole))
        n = tirx.reinterpret(x.ty.dtype, rounded) - rounding
        return bound(x - n, lambda r: then(horner(r, _EXP2) * scale))

    return bound(tirx.reinterpret(whole, x + rounding), of)
