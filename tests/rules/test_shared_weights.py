"""Products that share a weight."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rewrite_rules.identity import CancelInvolution, RemoveIdentity
from rewrite_rules.shared_weights import MergeSharedWeightProducts
from tests.rules.harness import applies, assert_equivalent, model, refuses, rewritten
from xrlflow.ir import Graph, Value
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, Op, RewriteState, Rule

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


def test_an_empty_batch() -> None:
    """ONNX Runtime splits nothing into no number of parts."""
    lines = [f"x{t} = Gather<axis=0>(x, i{t})\n y{t} = MatMul(x{t}, w)" for t in range(3)]
    proto = model(
        f"agraph (float[3,N,5] x) => (float[N,6] y0, float[N,6] y1, float[N,6] y2) {{ {chr(10).join(lines)} }}",
        w=weight(5, 6),
        **{f"i{t}": np.array(t) for t in range(3)},
    )
    after, _ = rewritten(RULE, proto)
    for batch in (0, 1, 4):
        assert_equivalent(proto, after, {"x": weight(3, batch, 5)})


def test_steps_of_a_batch_of_nothing() -> None:
    """They are not reshaped: a 0 in a Reshape's shape would copy another dimension."""
    lines = [f"x{t} = Gather<axis=1>(x, i{t})\n y{t} = MatMul(x{t}, w)" for t in range(2)]
    proto = model(
        f"agraph (float[0,2,5] x) => (float[0,6] y0, float[0,6] y1) {{ {chr(10).join(lines)} }}",
        w=weight(5, 6),
        **{f"i{t}": np.array(t) for t in range(2)},
    )
    _, graph = rewritten(RULE, proto)
    assert "Reshape" not in {n.op for n in graph.nodes()}


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
    applies(RULE, proto, ops=["Relu", "MatMul", "Split"])


@pytest.mark.parametrize("step", ["Gather<axis=1>(x, i{})", "Squeeze(s{}, one)"])
def test_steps_of_an_unknown_batch(step: str) -> None:
    lines = [
        f"s{t} = Slice(x, f{t}, f{t + 1}, one)\n x{t} = {step.format(t)}\n y{t} = MatMul(x{t}, w)"
        for t in range(3)
    ]
    proto = model(
        f"agraph (float[N,3,5] x) => (float[N,6] y0, float[N,6] y1, float[N,6] y2) {{ {chr(10).join(lines)} }}",
        w=weight(5, 6),
        one=np.array([1]),
        **{f"i{t}": np.array(t) for t in range(3)},
        **{f"f{t}": np.array([t]) for t in range(4)},
    )
    graph = applies(RULE, proto)
    ops = sorted(n.op for n in graph.nodes() if not n.const)
    assert [o for o in ops if o != "Slice"] == ["Expand", "MatMul", "Reshape", "Shape", "Split", "Transpose"]


@pytest.mark.parametrize(
    ("cuts", "more"),
    [
        (((0, 1), (1, 3), (3, 4)), []),
        (((1, 2), (2, 4)), ["Slice"]),
        (((0, 1), (2, 4)), ["Slice", "Slice", "Concat"]),
    ],
)
def test_slices_that_keep_their_axis(cuts: tuple[tuple[int, int], ...], more: list[str]) -> None:
    """Without a gap between them they are one slice; all of x is x itself; otherwise they are put together."""
    lines = [f"x{i} = Slice(x, a{i}, b{i}, one)\n y{i} = MatMul(x{i}, w)" for i in range(len(cuts))]
    outputs = ", ".join(f"float[2,{b - a},6] y{i}" for i, (a, b) in enumerate(cuts))
    proto = model(
        f"agraph (float[2,4,5] x) => ({outputs}) {{ {chr(10).join(lines)} }}",
        w=weight(5, 6),
        one=np.array([1]),
        **{f"a{i}": np.array([a]) for i, (a, _) in enumerate(cuts)},
        **{f"b{i}": np.array([b]) for i, (_, b) in enumerate(cuts)},
    )
    applies(RULE, proto, ops=["MatMul", "Split", *more])


def test_two_weights_put_the_same_rows_together() -> None:
    """The steps of a cell with several weights: one Concat serves all."""
    lines = [f"a{t} = MatMul(x{t}, v)\n b{t} = MatMul(x{t}, w)" for t in range(3)]
    inputs = ", ".join(f"float[1,5] x{t}" for t in range(3))
    outputs = ", ".join(f"float[1,6] a{t}, float[1,7] b{t}" for t in range(3))
    proto = model(
        f"agraph ({inputs}) => ({outputs}) {{ {chr(10).join(lines)} }}", v=weight(5, 6), w=weight(5, 7)
    )
    state = RewriteState.start(load(proto).graph, Library([RULE]))
    while state.candidates:
        state = state.apply(state.candidates[0])
    assert sorted(n.op for n in state.graph.nodes()) == ["Concat", "MatMul", "MatMul", "Split", "Split"]


def test_one_candidate_for_all_steps() -> None:
    names = [f"x{t}" for t in range(5)]
    proto = model(
        f"agraph ({', '.join(f'float[2,5] {x}' for x in names)}) => ({', '.join(f'float[2,6] y{x}' for x in names)}) "
        f"{{ {' '.join(f'y{x} = MatMul({x}, w)' for x in names)} }}",
        w=weight(5, 6),
    )
    assert len(RewriteState.start(load(proto).graph, Library([RULE])).candidates) == 1


def test_inputs_that_cannot_be_stacked() -> None:
    proto = model(
        "agraph (float[2,5] x, float[3,2,5] z) => (float[2,6] a, float[3,2,6] b) {"
        " a = MatMul(x, w)\n b = MatMul(z, w) }",
        w=weight(5, 6),
    )
    refuses(RULE, proto, "stacked")


def test_inputs_of_one_unknown_length() -> None:
    proto = model(
        "agraph (float[2,N,5] x, float[2,N,5] z) => (float[2,N,6] a, float[2,N,6] b) {"
        " a = MatMul(x, w)\n b = MatMul(z, w) }",
        w=weight(5, 6),
    )
    applies(RULE, proto, ops=["Concat", "MatMul", "Split"])


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


def groups(graph: Graph) -> set[tuple[Value, frozenset[Value]]]:
    """By definition: a weight, and what all parts of one value that are multiplied by it are."""
    inputs: dict[tuple[Value, Value], set[Value]] = {}
    for node in graph.nodes():
        if node.op != "MatMul":
            continue
        origin = node.inputs[0]
        while origin in graph.producers and graph.producers[origin].op == "Identity":
            origin = graph.producers[origin].inputs[0]
        inputs.setdefault((node.inputs[1], origin), set()).add(node.inputs[0])
    return {(w, frozenset(values)) for (w, _), values in inputs.items() if len(values) > 1}


@pytest.mark.parametrize("seed", range(6))
def test_products_are_those_of_the_definition(seed: int) -> None:
    """At each step of a walk on which parts become their origins; of values with few parts, and with many."""
    rng = random.Random(seed)
    lines = ["s = Relu(x)", "t = Neg(x)", "u = Abs(x)"]
    parts = {"s": ["s"], "t": ["t"], "u": ["u"]}
    for number in range(18):
        origin = rng.choice("ssst")
        lines.append(f"p{number} = Identity({rng.choice(parts[origin][:4])})")
        parts[origin].append(f"p{number}")
    every = [value for values in parts.values() for value in values]
    for number in range(8):  # values of their own, until nobody changes their sign twice
        lines += [f"m{number} = Neg({rng.choice(every[:-2])})", f"n{number} = Neg(m{number})"]
        every.append(f"n{number}")
    made = [f"y{number}" for number in range(20)]
    lines += [f"{y} = MatMul({rng.choice(every)}, {rng.choice(('w', 'v'))})" for y in made]
    outputs = ", ".join(f"float[2,4] {y}" for y in made)
    proto = model(
        f"agraph (float[2,5] x) => ({outputs}) {{ {chr(10).join(lines)} }}", w=weight(5, 4), v=weight(5, 4)
    )
    state = RewriteState.start(load(proto).graph, Library([RULE, RemoveIdentity(), CancelInvolution()]))
    met = 0
    while True:
        found = {
            (m.binding.inputs[0], frozenset(n.inputs[0] for n in m.nodes))
            for m in state.candidates
            if m.rule is RULE
        }
        assert found == groups(state.graph)
        met += len(found)
        rest = [m for m in state.candidates if m.rule is not RULE]
        if not rest:
            break
        state = state.apply(rng.choice(sorted(rest, key=lambda m: m.key)))
    assert met > 3


class _NegateTwice(Rule):
    """identity(x) -> -(-x), which is no part of x."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Identity(x)

    def target(self, op: Op, x: Any) -> Any:
        return op.Neg(op.Neg(x))


@pytest.mark.parametrize("source", ["s", "x"])
@pytest.mark.parametrize("weights", range(6))
def test_a_product_that_leaves_its_group(weights: int, source: str) -> None:
    """Then another of the group finds the others, whichever found them before."""
    proto = model(
        "agraph (float[2,5] x) => (float[2,4] a, float[2,4] b, float[2,4] c) {"
        f" s = Relu(x)\n p = Identity({source})\n q = Transpose<perm=[0,1]>({source})\n r = Reshape({source}, shape)\n"
        " a = MatMul(p, w)\n b = MatMul(q, w)\n c = MatMul(r, w) }",
        w=np.full((5, 4), weights, np.float32),
        shape=np.array([2, 5]),
    )
    state = RewriteState.start(load(proto).graph, Library([RULE, _NegateTwice()]))
    assert {len(m.nodes) for m in state.candidates if m.rule is RULE} == {3}
    (other,) = [m for m in state.candidates if m.rule is not RULE]
    after = state.apply(other)
    assert {len(m.nodes) for m in after.candidates if m.rule is RULE} == {2}
