"""Whole graphs: control flow, constants, what is held; and operators over a field other than the reals."""

from __future__ import annotations

import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from xrlflow import onnxio
from xrlflow.ir import ABSENT, NO_ATTRS, Attrs, Graph, Leaves, Node, TensorType, Value
from xrlflow.ir.types import DType
from xrlflow.ops.evaluate import NotEvaluable, evaluate_graph, evaluate_node
from xrlflow.ops.field import COMPARISONS, Array, Field

HEADER = '<ir_version: 8, opset_import: ["" : 21]>\n'


def run(text: str, *feeds: Any) -> list[Array]:
    """Parse a model in ONNX's text form and evaluate it."""
    graph = onnxio.load(onnx.parser.parse_model(HEADER + text)).graph
    return evaluate_graph(graph, dict(zip(graph.inputs, map(np.asarray, feeds), strict=True)))


def test_if_reads_captured_values_of_both_branches() -> None:
    text = """
    g (bool c, float[2] x, float[2] z) => (float[2] y) {
        w = Add(x, z)
        y = If (c) <
            then_branch = t () => (float[2] a) { u = Mul(w, x)
                                                 a = Sub(u, z) },
            else_branch = e () => (float[2] b) { b = Sub(z, w) }
        >
    }"""
    x, z = np.array([1.0, 2.0], np.float32), np.array([10.0, 20.0], np.float32)
    np.testing.assert_array_equal(run(text, True, x, z)[0], [1.0, 24.0])
    np.testing.assert_array_equal(run(text, False, x, z)[0], [-1.0, -2.0])


LOOP = """
g (int64 n, float[2] x, float[2] k) => (float[2] last, float[t, 2] all) {
    last, all = Loop (n, , x) <
        body = b (int64 i, bool going, float[2] v) => (bool on, float[2] w, float[2] seen) {
            w = Mul(v, k)
            seen = Identity(v)
            limit = Constant<value = int64 {2}> ()
            on = Less(i, limit)
        }
    >
}"""


def test_loop_carries_collects_and_stops() -> None:
    x, k = np.array([1.0, 2.0], np.float32), np.array([2.0, 3.0], np.float32)
    last, seen = run(LOOP, 2, x, k)
    np.testing.assert_array_equal(last, [4.0, 18.0])
    np.testing.assert_array_equal(seen, [[1.0, 2.0], [2.0, 6.0]])
    last, seen = run(LOOP, 100, x, k)  # the condition turns false after i = 2
    assert seen.shape == (3, 2)
    np.testing.assert_array_equal(last, [8.0, 54.0])


def test_loop_of_no_trips_collects_nothing_of_the_declared_shape() -> None:
    last, seen = run(LOOP, 0, np.ones(2, np.float32), np.ones(2, np.float32))
    np.testing.assert_array_equal(last, [1.0, 1.0])
    assert seen.shape == (0, 2)


def test_scan_over_an_axis_and_backwards() -> None:
    text = """
    g (float[2] s, float[2, 3] x) => (float[2] last, float[2, 3] sums) {
        last, sums = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
                           scan_output_axes = [1], scan_output_directions = [0],
            body = b (float[2] a, float[2] e) => (float[2] c, float[2] d) {
                c = Add(a, e)
                d = Identity(c)
            }
        > (s, x)
    }"""
    last, sums = run(text, np.zeros(2, np.float32), np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    np.testing.assert_array_equal(last, [6, 15])
    np.testing.assert_array_equal(sums, [[3, 5, 6], [6, 11, 15]])


def test_floats_are_float64_throughout() -> None:
    text = """
    g (float[1] x, float[1] small) => (float[1] y) {
        s = Add(x, small)
        h = Cast<to = 10> (s)
        f = Cast<to = 1> (h)
        y = Sub(f, x)
    }"""
    (y,) = run(text, np.array([1.0], np.float32), np.array([1e-11], np.float32))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, [1e-11], rtol=1e-4)


def _chain(length: int) -> Graph:
    type_ = TensorType(DType.FLOAT, (4,))
    nodes = [Node("Exp", (Value(i + 1),), (Value(i + 2),), (type_,)) for i in range(length)]
    leaves = Leaves(types={Value(1): type_})
    return Graph.make(nodes, (Value(1),), (Value(length + 1),), leaves)


def test_intermediates_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Array]] = []
    most = 0

    def watched(op: str, attrs: Attrs, inputs: Any, n: int, field: Field) -> tuple[Array, ...]:
        nonlocal most
        out = evaluate_node(op, attrs, inputs, n, field)
        made.append(weakref.ref(out[0]))
        most = max(most, sum(ref() is not None for ref in made))
        return out

    monkeypatch.setattr("xrlflow.ops.evaluate.evaluate_node", watched)
    (y,) = evaluate_graph(_chain(20), {Value(1): np.full(4, -1.0)})
    assert y.shape == (4,)
    assert most <= 2


def test_an_input_that_is_not_fed_is_named() -> None:
    graph = _chain(1)
    graph.leaves.names[Value(1)] = "pixels"
    with pytest.raises(KeyError, match="pixels"):
        evaluate_graph(graph, {})


def test_random_and_unknown_operators_have_no_meaning() -> None:
    for op in ("RandomNormal", "Bernoulli", "some.domain::Thing", "SequenceInsert"):
        with pytest.raises(NotEvaluable):
            evaluate_node(op, NO_ATTRS, [np.ones(3)], 1)


def test_absent_inputs() -> None:
    type_ = TensorType(DType.FLOAT, (3,))
    top = Value(7)
    clip = Node("Clip", (Value(1), ABSENT, top), (Value(2),), (type_,))
    leaves = Leaves(types={Value(1): type_, top: TensorType(DType.FLOAT, ())})
    graph = Graph.make([clip], (Value(1), top), (Value(2),), leaves)
    (y,) = evaluate_graph(graph, {Value(1): np.array([-5.0, 0.5, 3.0]), top: np.array(1.0)})
    np.testing.assert_array_equal(y, [-5.0, 0.5, 1.0])


# --- another field: the integers modulo a prime, functions keyed by name ---


class Modular(Field):
    """Residues as float64. Small and slow: it shows that operators ask nothing else of their field."""

    real = False
    p = 10007

    def _mod(self, a: Any) -> Array:
        array = np.asarray(a)
        return np.mod(array, self.p) if array.dtype.kind == "f" else array

    def lift(self, array: Array) -> Array:
        return np.mod(array.astype(np.float64), self.p)

    def constant(self, value: Any) -> float:
        exact = Fraction(value)
        return float(exact.numerator * pow(exact.denominator, -1, self.p) % self.p)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        raise NotEvaluable("truncate")

    def add(self, a: Any, b: Any) -> Array:
        return self._mod(np.add(a, b))

    def sub(self, a: Any, b: Any) -> Array:
        return self._mod(np.subtract(a, b))

    def mul(self, a: Any, b: Any) -> Array:
        return self._mod(np.multiply(a, b))

    def div(self, a: Any, b: Any) -> Array:
        inverse = np.vectorize(lambda v: float(pow(int(v), -1, self.p)))
        return self.mul(a, inverse(b))

    def neg(self, a: Any) -> Array:
        return self._mod(np.negative(a))

    def matmul(self, a: Array, b: Array) -> Array:
        return self._mod(np.matmul(a, b))

    def sum(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return self._mod(np.sum(a, axis=axes, keepdims=keepdims))

    def prod(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        raise NotEvaluable("prod")

    def cumsum(self, a: Array, axis: int) -> Array:
        return self._mod(np.cumsum(a, axis=axis))

    def unary(self, name: str, a: Any, *parameters: Any) -> Array:
        key = sum(map(ord, name)) + sum(int(self.constant(q)) for q in parameters)
        return self._mod(self._mod(self._mod(np.asarray(a) + key) ** 2) * np.asarray(a) + 31 * key + 1)

    def binary(self, name: str, a: Any, b: Any) -> Array:
        return self.unary(name, self.add(self.mul(a, 17.0), b))

    def maximum(self, a: Any, b: Any) -> Array:
        return np.maximum(a, b)

    def minimum(self, a: Any, b: Any) -> Array:
        return np.minimum(a, b)

    def max(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return np.max(a, axis=axes, keepdims=keepdims)

    def min(self, a: Array, axes: tuple[int, ...] | None, keepdims: bool = False) -> Array:
        return np.min(a, axis=axes, keepdims=keepdims)

    @property
    def lowest(self) -> float:
        return -1.0

    def compare(self, name: str, a: Any, b: Any) -> Array:
        if name != "equal" and np.asarray(a).dtype.kind == "f":
            raise NotEvaluable(name)
        return np.asarray(COMPARISONS[name](a, b))

    def stabiliser(self, a: Array, axes: tuple[int, ...] | None) -> Any:
        return 0.0

    def scatter(self, name: str, a: Array, index: Any, updates: Array) -> None:
        raise NotEvaluable("scatter")


FIELD = Modular()


def draw(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(1, FIELD.p, shape).astype(np.float64)


def node(op: str, *inputs: Array | None, **attrs: Any) -> Array:
    return evaluate_node(op, Attrs(attrs), inputs, 1, FIELD)[0]


def test_field_products_merge_exactly() -> None:
    x, a, b = draw(2, 3, 4), draw(4, 5), draw(4, 6)
    merged = node("MatMul", x, node("Concat", a, b, axis=-1))
    apart = node("Concat", node("MatMul", x, a), node("MatMul", x, b), axis=-1)
    np.testing.assert_array_equal(merged, apart)
    np.testing.assert_array_equal(node("Einsum", x, a, equation="bij,jk->bik"), node("MatMul", x, a))
    np.testing.assert_array_equal(node("Softmax", merged), node("Softmax", apart))


def test_field_convolution_absorbs_batch_normalisation_exactly() -> None:
    x, w = draw(2, 4, 6, 6), draw(6, 2, 3, 3)
    scale, bias, mean, variance = draw(6), draw(1, 6)[0], draw(2, 6)[0], draw(3, 6)[0]
    attrs = {"group": 2, "pads": (1, 1, 1, 1), "strides": (2, 2)}
    right = node("BatchNormalization", node("Conv", x, w, **attrs), scale, bias, mean, variance)
    epsilon = FIELD.constant(float(np.float32(1e-5)))
    factor = node("Div", scale, node("Sqrt", node("Add", variance, np.array(epsilon))))
    folded = node("Mul", w, factor.reshape(6, 1, 1, 1))
    shift = node("Sub", bias, node("Mul", mean, factor))
    np.testing.assert_array_equal(node("Conv", x, folded, shift, **attrs), right)
    assert (right == np.rint(right)).all()


def test_field_refuses_order_rounding_and_interpolation() -> None:
    x = draw(1, 1, 4, 4)
    for op, inputs in (("Less", (x, x)), ("ArgMax", (x,)), ("Resize", (x, None, np.full(4, 2.0)))):
        with pytest.raises(NotEvaluable):
            node(op, *inputs)
    with pytest.raises(NotEvaluable):
        node("Cast", x, to=int(DType.INT64))
    np.testing.assert_array_equal(node("Less", np.array([1]), np.array([2])), [True])  # integers are ordinary


def test_field_pools_pad_with_the_reserved_symbol() -> None:
    x = np.zeros((1, 1, 2, 2))
    pooled = node("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    np.testing.assert_array_equal(pooled, np.zeros((1, 1, 2, 2)))


def test_what_numpy_takes_for_something_else_is_refused() -> None:
    """NumPy takes any negative size for -1, and none of -1 elements."""
    x, one = np.ones(4), np.array([-1], np.int64)
    with pytest.raises(ValueError, match="Reshape"):
        evaluate_node("Reshape", NO_ATTRS, [x, np.array([1, -4], np.int64)], 1)
    with pytest.raises(ValueError, match="TopK"):
        evaluate_node("TopK", NO_ATTRS, [x, one], 2)
    assert evaluate_node("Reshape", NO_ATTRS, [x, one], 1)[0].shape == (4,)
