"""Products that share a weight."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.shared_weights import MergeSharedWeightProducts
from tests.rules.harness import applies, model, refuses

RNG = np.random.default_rng(0)
RULE = MergeSharedWeightProducts()


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1, 3)])
def test_steps_of_a_sequence(batch: int, order: tuple[int, ...]) -> None:
    """x_t taken by Gather along the middle axis, as an exported cell takes its steps."""
    lines = [f"x{t} = Gather<axis=1>(x, i{t})\n y{t} = Gemm<transB=1>(x{t}, w, b)" for t in order]
    outputs = ", ".join(f"float[{batch},6] y{t}" for t in order)
    proto = model(
        f"agraph (float[{batch},4,5] x) => ({outputs}) {{ {chr(10).join(lines)} }}",
        w=weight(6, 5),
        b=weight(6),
        **{f"i{t}": np.array(t) for t in order},
    )
    graph = applies(RULE, proto)
    ops = [n.op for n in graph.nodes() if not n.const]
    assert ops.count("Gemm") == 1
    assert "Concat" not in ops
    assert len(ops) <= 5


def test_inputs_of_the_graph() -> None:
    proto = model(
        "agraph (float[2,5] x, float[3,5] z) => (float[2,6] a, float[3,6] b) { a = MatMul(x, w)\n b = MatMul(z, w) }",
        w=weight(5, 6),
    )
    applies(RULE, proto, ops=["Concat", "MatMul", "Split"])


def test_batched_inputs() -> None:
    proto = model(
        "agraph (float[2,4,5] x, float[1,4,5] z) => (float[2,4,6] a, float[1,4,6] b) {"
        " a = MatMul(x, w)\n b = MatMul(z, w) }",
        w=weight(5, 6),
    )
    applies(RULE, proto, ops=["Concat", "MatMul", "Split"])


def test_slices_of_one_value() -> None:
    proto = model(
        "agraph (float[4,5] x) => (float[2,6] a, float[2,6] b) {"
        " s = Relu(x)\n p, q = Split<num_outputs=2>(s)\n a = MatMul(p, w)\n b = MatMul(q, w) }",
        w=weight(5, 6),
    )
    applies(RULE, proto, ops=["Relu", "Split", "Concat", "MatMul", "Split"])


def test_a_recurrence_is_left_alone() -> None:
    proto = model(
        "agraph (float[2,5] x) => (float[2,5] b) { a = MatMul(x, w)\n h = Tanh(a)\n b = MatMul(h, w) }",
        w=weight(5, 5),
    )
    refuses(RULE, proto)


def test_indices_that_depend_on_a_product() -> None:
    """y = x[argmax(x @ w)] @ w: the second product cannot be made before the first."""
    proto = model(
        "agraph (float[5,5] x) => (float[5,5] a, float[5,5] b) {"
        " a = MatMul(x, w)\n i = ArgMax<axis=1, keepdims=0>(a)\n g = Gather(x, i)\n b = MatMul(g, w) }",
        w=weight(5, 5),
    )
    refuses(RULE, proto, "may depend")


def test_a_bias_per_row() -> None:
    proto = model(
        "agraph (float[2,5] x, float[2,5] z) => (float[2,6] a, float[2,6] b) {"
        " a = Gemm(x, w, c)\n b = Gemm(z, w, c) }",
        w=weight(5, 6),
        c=weight(2, 6),
    )
    refuses(RULE, proto, "differs from row to row")


def test_an_unknown_batch() -> None:
    proto = model(
        "agraph (float[N,5] x, float[M,5] z) => (float[N,6] a, float[M,6] b) { a = MatMul(x, w)\n b = MatMul(z, w) }",
        w=weight(5, 6),
    )
    refuses(RULE, proto, "not a known number")
