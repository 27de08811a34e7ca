"""Lazy constants: what is written, what it takes, and that it is rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from xrlflow.ir import Attrs, DType, Graph, Leaves, Node, TensorType, Value, digest, mix, output_key
from xrlflow.onnxio.tensors import ConstPool, array_const
from xrlflow.ops import weights
from xrlflow.ops.infer import infer
from xrlflow.ops.tensors import dtype_of

RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 128)).astype(np.float32)


class Builder:
    """A graph of one input x (float[4,64]), constants and nodes."""

    def __init__(self) -> None:
        self.leaves = Leaves()
        self.pool = ConstPool()
        self.nodes: list[Node] = []
        self.types: dict[Value, TensorType] = {}
        self.x = mix(digest("x"))
        self.leaves.types[self.x] = TensorType(DType.FLOAT, (4, 64))

    def const(self, array: Any) -> Value:
        array = np.asarray(array)
        return self.pool.add(array_const(array, dtype_of(array.dtype)), self.leaves)

    def node(self, op: str, *inputs: Value, outputs: int = 1, **attrs: Any) -> Any:
        types = [self.types.get(v) or self.leaves.types[v] for v in inputs]
        data = [self.leaves.consts.get(v) for v in inputs]
        given = Attrs(attrs)
        found = infer(op, given, types, data, outputs)
        key = mix(digest(op), given.digest, *inputs)
        outs = tuple(output_key(key, i) for i in range(outputs))
        self.nodes.append(Node(op, inputs, outs, found, given))
        self.types.update(zip(outs, found))
        return outs[0] if outputs == 1 else outs

    def graph(self, *outputs: Value) -> Graph:
        return Graph.make(self.nodes, (self.x,), outputs, self.leaves)


def materialised(graph: Graph) -> tuple[Sequence[str], dict[Value, np.ndarray]]:
    plan, computed = weights.materialise(graph)
    return [n.op for n in plan.nodes], {v: c.numpy() for v, c in computed.items()}


def test_an_expression_is_rounded_once() -> None:
    """In float32, adding 1 to 1e-9 loses it; the difference of the sums shows that here it is not lost."""
    b = Builder()
    tiny = b.const(np.full((64, 128), 1e-9, np.float32))
    one = b.const(np.ones((64, 128), np.float32))
    weight = b.node("Sub", b.node("Add", tiny, one), one)
    graph = b.graph(b.node("MatMul", b.x, weight))
    ops, computed = materialised(graph)
    assert ops == ["MatMul"]
    assert computed[weight].dtype == np.float32
    np.testing.assert_allclose(computed[weight], 1e-9, rtol=1e-5)


def test_a_cast_rounds_where_it_stands() -> None:
    b = Builder()
    half = b.node("Cast", b.const(W), to=int(DType.FLOAT16))
    weight = b.node("Cast", half, to=int(DType.FLOAT))
    _, computed = materialised(b.graph(b.node("MatMul", b.x, weight)))
    np.testing.assert_array_equal(computed[weight], W.astype(np.float16).astype(np.float32))


def test_integers_are_exact() -> None:
    b = Builder()
    big = 2**53 + 1 + np.arange(2048, dtype=np.int64)
    doubled = b.node("Mul", b.const(big), b.const(np.int64(3)))
    _, computed = materialised(b.graph(doubled))
    np.testing.assert_array_equal(computed[doubled], big * 3)


@pytest.mark.parametrize("slab", [1 << 40, 2000])
def test_slabs_give_the_same(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """x @ (((w0 @ w1) * rows) + columns | w): by rows, with an operand that is cut and some that are not."""
    monkeypatch.setattr(weights, "_SLAB", slab)
    b = Builder()
    first, second = RNG.normal(size=(2, 64, 64)).astype(np.float32)
    rows, columns = RNG.normal(size=(64, 1)).astype(np.float32), RNG.normal(size=64).astype(np.float32)
    product = b.node("MatMul", b.const(first), b.const(second))
    scaled = b.node("Mul", product, b.node("Sqrt", b.node("Abs", b.const(rows))))
    shifted = b.node("Add", scaled, b.const(columns))
    weight = b.node("Concat", shifted, b.const(W), axis=1)
    _, computed = materialised(b.graph(b.node("MatMul", b.x, weight)))
    wide = (first.astype(np.float64) @ second) * np.sqrt(np.abs(rows.astype(np.float64))) + columns
    expected = np.concatenate([wide.astype(np.float32), W], axis=1)
    np.testing.assert_allclose(computed[weight], expected, rtol=1e-6, atol=1e-7)


def test_slabs_are_used_for_large_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    evaluate = weights._evaluate
    monkeypatch.setattr(weights, "_SLAB", 2000)
    monkeypatch.setattr(
        weights, "_evaluate", lambda *args: (r := evaluate(*args), seen.append(r[0].shape[0]))[0]
    )
    b = Builder()
    weight = b.node("Mul", b.const(W), b.const(np.float32(2)))
    _, computed = materialised(b.graph(b.node("MatMul", b.x, weight)))
    np.testing.assert_array_equal(computed[weight], 2 * W)
    assert len(seen) > 10
    assert sum(seen) == 64


def test_all_outputs_of_a_split_are_computed_at_once() -> None:
    b = Builder()
    left, right = b.node("Split", b.const(W), b.const(np.int64([100, 28])), outputs=2, axis=1)
    graph = b.graph(b.node("MatMul", b.x, left), b.node("MatMul", b.x, right))
    _, computed = materialised(graph)
    np.testing.assert_array_equal(computed[left], W[:, :100])
    np.testing.assert_array_equal(computed[right], W[:, 100:])


def test_what_would_bloat_the_file_stays_a_node() -> None:
    """A table that a small constant is expanded to, and all that is computed from it alone."""
    b = Builder()
    table = b.node("Expand", b.const(np.float32([0.5])), b.const(np.int64([64, 128])))
    graph = b.graph(b.node("MatMul", b.x, b.node("Neg", table)))
    plan = weights.plan(graph)
    assert [n.op for n in plan.nodes] == ["Expand", "Neg", "MatMul"]
    assert weights.stored_bytes(graph, plan) == 4 + 16
    mixed = b.graph(b.node("MatMul", b.x, b.node("Mul", table, b.const(W))))
    assert [n.op for n in weights.plan(mixed).nodes] == ["MatMul"]
    assert weights.stored_bytes(mixed, weights.plan(mixed)) == W.nbytes


def test_an_unread_weight_is_not_stored() -> None:
    b = Builder()
    b.const(RNG.normal(size=(64, 64)).astype(np.float32))
    weight = b.node("Transpose", b.const(np.ascontiguousarray(W.T)))
    graph = b.graph(b.node("MatMul", b.x, weight))
    assert weights.plan(graph).constants == (weight,)


def test_what_cannot_be_evaluated_is_left_to_the_runtime() -> None:
    """And so is what depends on it, while the rest is computed."""
    b = Builder()
    weight = b.node("Neg", b.const(W))
    odd = Node(
        "Unheard",
        (weight, weight),
        (output_key(9, 9),),
        (TensorType(DType.FLOAT, (64, 128), True),),
    )
    b.nodes.append(odd)
    b.types[odd.id] = odd.types[0]
    after = b.node("Exp", odd.id)
    graph = b.graph(b.node("MatMul", b.x, after))
    plan, computed = weights.materialise(graph)
    assert [n.op for n in plan.nodes] == ["Unheard", "Exp", "MatMul"]
    assert list(computed) == [weight]


def test_evaluate_gives_the_declared_types() -> None:
    types = [TensorType(DType.FLOAT16, (3,), True)]
    (out,) = weights.evaluate("Add", Attrs(), [np.float16([1, 2, 3]), np.float16([0.5])], types)
    assert out.dtype == np.float16
    np.testing.assert_array_equal(out, np.float16([1.5, 2.5, 3.5]))


def test_what_is_stored_anyway_is_not_stored_again_in_another_form() -> None:
    """A table that is multiplied with as it stands and transposed, or twice as large and three times."""
    table = RNG.normal(size=(128, 64)).astype(np.float32)
    b = Builder()
    wide = b.node("MatMul", b.x, b.node("Transpose", b.const(table)))
    alone = b.graph(wide)
    assert materialised(alone)[0] == ["MatMul"]
    both = b.graph(b.node("MatMul", wide, b.const(table)))
    assert materialised(both)[0] == ["Transpose", "MatMul", "MatMul"]
    assert weights.stored_bytes(both, weights.plan(both)) == table.nbytes
    b = Builder()
    scaled = [b.node("Mul", b.const(W), b.const(np.float32(k))) for k in (2, 3)]
    graph = b.graph(*(b.node("MatMul", b.x, w) for w in scaled))
    assert weights.stored_bytes(graph, weights.plan(graph)) < 1.01 * W.nbytes


def test_a_reference_that_ignores_an_input_is_not_asked() -> None:
    """ONNX's reference implementation of LSTM, GRU and RNN ignores sequence_lens."""
    ones = np.ones((1, 4, 1), np.float32)
    types = [TensorType(DType.FLOAT, (2, 1, 1, 1), True)]
    attrs = Attrs({"hidden_size": 1, "activations": ("Softmax",) * 1})  # which we do not evaluate
    step = [np.ones((2, 1, 1), np.float32), ones[:, :1], ones[:, :1], None]
    with pytest.raises(weights.NotEvaluable, match="sequence_lens"):
        weights.evaluate("RNN", attrs, [*step, np.int32([1])], types)
