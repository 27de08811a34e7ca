"""The fields of the proofs: arithmetic modulo a prime, and degrees."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from xrlflow.ir import Attrs
from xrlflow.ops.evaluate import evaluate_node
from xrlflow.ops.field import Field, NotEvaluable
from xrlflow.prover.degrees import Degrees, chance, pack, unpack
from xrlflow.prover.prime import PRIMES, PrimeField, ZeroDenominator

P = PRIMES[0]


@pytest.mark.parametrize("prime", PRIMES)
def test_primes(prime: int) -> None:
    assert all(prime % d for d in range(2, math.isqrt(prime) + 1))
    assert 512 * prime * prime <= 2**53


def test_arithmetic_is_that_of_integers_modulo_the_prime() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    a, b = field.draw(rng, (3, 700)), field.draw(rng, (700, 5))
    x, y = (v.astype(np.int64).astype(object) for v in (a, b))
    np.testing.assert_array_equal(field.matmul(a, b), (x @ y) % P)  # more than 512 terms
    np.testing.assert_array_equal(field.add(a, a), (x + x) % P)
    np.testing.assert_array_equal(field.sub(a[:, :5], b[:3]), (x[:, :5] - y[:3]) % P)
    np.testing.assert_array_equal(field.mul(a[:, :5], b[:3]), (x[:, :5] * y[:3]) % P)
    np.testing.assert_array_equal(field.neg(a), -x % P)
    np.testing.assert_array_equal(field.sum(a, (1,)), x.sum(axis=1) % P)
    np.testing.assert_array_equal(field.prod(a[:, :9], (1,)), x[:, :9].prod(axis=1) % P)
    np.testing.assert_array_equal(field.mul(field.div(a[:, :5], b[:3]), b[:3]), a[:, :5])


def test_numbers_are_rational() -> None:
    field = PrimeField(P, 1)
    assert field.constant(Fraction(2, 3)) * 3 % P == 2
    lifted = field.lift(np.array([0.5, -3.0, 0.1], np.float32))
    assert lifted[0] * 2 % P == 1
    assert lifted[1] == P - 3
    assert lifted[2] == field.constant(float(np.float32(0.1)))
    with pytest.raises(NotEvaluable):
        field.lift(np.array([np.inf]))
    with pytest.raises(ZeroDenominator):
        field.div(np.ones(2), np.array([1.0, 0.0]))


def test_integers_stay_integers() -> None:
    field = PrimeField(P, 1)
    big = np.array([P + 5], np.int64)
    assert field.add(big, big).tolist() == [2 * P + 10]
    assert field.maximum(big, 3).tolist() == [P + 5]


def test_integers_that_meet_elements_are_elements() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    a, whole = field.draw(rng, (2, 2)), np.array([[-1, 2], [3, -4]], np.int32)
    lifted = field.lift(whole)
    for compute in (field.add, field.sub, field.mul, field.matmul, field.div):
        np.testing.assert_array_equal(compute(a, whole), compute(a, lifted))
        np.testing.assert_array_equal(compute(whole, a), compute(lifted, a))


def test_functions_know_their_arguments_only() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    a, b, c = (field.draw(rng, (50,)) for _ in range(3))
    np.testing.assert_array_equal(field.unary("exp", a), field.unary("exp", a.copy()))
    assert (field.unary("exp", a) != field.unary("relu", a)).all()
    assert (field.unary("elu", a, 1.0) != field.unary("elu", a, 2.0)).all()
    assert (field.unary("exp", a) != PrimeField(P, 2).unary("exp", a)).all()
    np.testing.assert_array_equal(field.maximum(a, b), field.maximum(b, a))
    np.testing.assert_array_equal(field.maximum(a, a), a)
    np.testing.assert_array_equal(field.maximum(a, np.float64(field.lowest)), a)
    assert (field.maximum(a, b) != field.minimum(a, b)).all()
    table = np.stack((a, b, c))
    np.testing.assert_array_equal(field.max(table, (0,)), field.max(table[::-1], (0,)))
    np.testing.assert_array_equal(field.max(table[:2], (0,)), field.maximum(a, b))


def test_small_powers_are_products() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    a = field.draw(rng, (20,))
    np.testing.assert_array_equal(field.binary("pow", a, field.constant(2)), field.mul(a, a))
    np.testing.assert_array_equal(field.binary("pow", a, field.constant(-1)), field.inverse(a))
    np.testing.assert_array_equal(
        field.binary("pow", a, field.constant(Fraction(1, 2))), field.unary("sqrt", a)
    )
    assert (field.binary("pow", a, field.constant(7)) != field.mul(a, a)).all()


def test_degrees_of_rational_functions() -> None:
    d = Degrees()
    x = d.variable((2, 3))
    assert unpack(d.mul(x, x))[0].max() == 2
    assert unpack(d.add(d.mul(x, x), x))[0].max() == 2
    quotient = d.div(d.mul(x, x), x)  # not reduced: 2 over 1
    assert [int(c.max()) for c in unpack(quotient)] == [2, 1, 0]
    assert [int(c.max()) for c in unpack(d.add(quotient, quotient))] == [3, 2, 0]
    product = d.matmul(quotient, d.variable((3, 4)))
    assert [int(c.max()) for c in unpack(product)] == [3 + 2, 3, 0]
    applied = d.unary("exp", quotient)
    assert [int(c.max()) for c in unpack(applied)] == [1, 0, 1]
    assert d.applications == 6
    assert [int(c.max()) for c in unpack(d.sum(applied, (1,)))] == [1, 0, 3]


def test_the_chance_that_a_false_rule_passes() -> None:
    d = Degrees()
    x = d.variable((2,))
    cube = d.mul(d.mul(x, x), x)
    assert chance([cube], [x], d, P) == pytest.approx(2 * 3 / P)
    applied = d.unary("exp", cube)
    # One pair of applications, its arguments of degree 3, and a difference of degree 1.
    assert chance([applied], [applied], d, P) > chance([cube], [cube], d, P)
    d.add(pack(1 << 20, 0, 0), 0.0)
    assert chance([x], [x], d, P) == 1.0  # the counts overflowed


# --- quantised numbers ---


def _run(field: Field, op: str, *inputs: Any, **attrs: Any) -> np.ndarray:
    return evaluate_node(op, Attrs(attrs), inputs, 1, field)[0]


def test_a_quantised_tensor_is_an_unknown_function_of_what_is_rounded() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    x, s, zero = field.draw(rng, (50,)), field.draw(rng, ()), np.array(3, np.uint8)
    q = _run(field, "QuantizeLinear", x, s, zero)
    double = [field.mul(a, field.constant(2)) for a in (x, s)]
    np.testing.assert_array_equal(_run(field, "QuantizeLinear", *double, zero), q)
    others = [
        _run(field, "QuantizeLinear", double[0], s, zero),
        _run(field, "QuantizeLinear", x, s, np.array(4, np.uint8)),
        _run(field, "QuantizeLinear", x, s, np.array(3, np.int8)),
        _run(field, "QuantizeLinear", x, s),
    ]
    for other in others:
        assert (other != q).all()
    np.testing.assert_array_equal(
        _run(field, "QuantizeLinear", x, s), _run(field, "QuantizeLinear", x, s, np.array(0, np.uint8))
    )


def test_operators_of_bytes_round_what_the_same_operators_of_floats_compute() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    q, r = field.draw(rng, (2, 3, 5)), field.draw(rng, (2, 3, 5))
    s, t, u = (field.draw(rng, ()) for _ in range(3))
    z, v, n = np.array(3, np.uint8), np.array(-7, np.int8), np.array(9, np.uint8)
    w, bias = rng.integers(-128, 128, (4, 3, 2)).astype(np.int8), np.int32([5, -700, 3, 0])
    x, y = _run(field, "DequantizeLinear", q, s, z), _run(field, "DequantizeLinear", r, t, z)
    weights = _run(field, "DequantizeLinear", w, t, v)
    fine = _run(field, "DequantizeLinear", bias, field.mul(s, t))
    pairs = {
        "QLinearConv": ((q, s, z, w, t, v, u, n, bias), _run(field, "Conv", x, weights, fine)),
        "com.microsoft::QLinearAdd": ((q, s, z, r, t, z, u, n), field.add(x, y)),
        "com.microsoft::QLinearMul": ((q, s, z, r, t, z, u, n), field.mul(x, y)),
        "com.microsoft::QLinearConcat": ((u, n, q, s, z, r, t, z), np.concatenate((x, y))),
        "com.microsoft::QLinearLeakyRelu": ((q, s, z, u, n), _run(field, "LeakyRelu", x)),
        "com.microsoft::QLinearGlobalAveragePool": ((q, s, z, u, n), field.mean(x, (2,), True)),
        "QLinearMatMul": (
            (q[0], s, z, r[0].T, t, z, u, n),
            _run(field, "MatMul", x[0], y[0].T),
        ),
        "com.microsoft::QGemm": (
            (q[0], s, z, r[0].T, t, z, bias[:3], u, n),
            field.add(_run(field, "MatMul", x[0], y[0].T), fine[:3]),
        ),
    }
    for op, (inputs, floats) in pairs.items():
        attrs = {"alpha": 1.0} if op.endswith("QGemm") else {}
        expected = _run(field, "QuantizeLinear", floats, u, n)
        np.testing.assert_array_equal(_run(field, op, *inputs, **attrs), expected, err_msg=op)


def test_sums_of_products_of_elements_are_those_of_their_numbers() -> None:
    field, rng = PrimeField(P, 1), np.random.default_rng(0)
    q, r = field.draw(rng, (4, 3)), field.draw(rng, (3, 5))
    z, v, one = np.array(3, np.uint8), np.array(200, np.uint8), np.ones(())
    product = _run(
        field, "MatMul", *(_run(field, "DequantizeLinear", a, one, b) for a, b in ((q, z), (r, v)))
    )
    np.testing.assert_array_equal(_run(field, "MatMulInteger", q, r, z, v), product)
    whole = _run(field, "MatMulInteger", np.uint8([[1, 255]]), np.uint8([[0], [255]]), z, v)
    assert (whole.dtype, whole.tolist()) == (np.int32, [[-2 * -200 + 252 * 55]])


def test_degrees_of_quantised_numbers() -> None:
    degrees = Degrees()
    x, s = degrees.variable((2,)), degrees.variable(())
    q = _run(degrees, "QuantizeLinear", x, s, np.array(3, np.uint8))
    y = _run(degrees, "DequantizeLinear", q, s, np.array(3, np.uint8))
    assert [unpack(a)[0].max() for a in (q, y)] == [1, 2]
    assert unpack(y)[2].max() >= 1
