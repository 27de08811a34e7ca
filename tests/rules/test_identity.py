"""What does nothing is removed, and only that."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rewrite_rules.identity import (
    CancelInvolution,
    FoldDimension,
    FoldDimensions,
    MergeCasts,
    MergeCommonSubexpressions,
    RemoveDropout,
    RemoveEmptyParts,
    RemoveFalseOr,
    RemoveIdentity,
    RemoveNoopCast,
    RemoveNoopPad,
    RemoveNoopReshape,
    RemoveNoopSlice,
    RemoveRepeated,
    RemoveSingleton,
    RemoveTrueAnd,
    RemoveUnitDiv,
    RemoveUnitMul,
    RemoveUnitPow,
    RemoveZeroAdd,
    RemoveZeroSub,
)
from tests.rules.harness import applies, model, refuses
from xrlflow.ir import Graph, Value
from xrlflow.onnxio import load
from xrlflow.ops.schema import COMMUTATIVE
from xrlflow.rewrite import Library, RewriteState


@pytest.mark.parametrize(
    ("rule", "op", "neutral"), [(RemoveTrueAnd, "And", True), (RemoveFalseOr, "Or", False)]
)
def test_a_condition_that_decides_nothing(rule, op, neutral):
    source = f"agraph (bool[N,4] x) => (bool[N,4] y) {{ a = {op}(c, x) y = Not(a) }}"
    applies(rule(), model(source, c=np.array(neutral)), ops=["Not"])
    refuses(rule(), model(source, c=np.array(not neutral)), "everywhere")
    refuses(rule(), model(source, c=np.array([True, False, True, True])), "everywhere")
    wide = source.replace("x) => (bool[N,4] y)", "x) => (bool[A,B,4] y)")
    refuses(rule(), model(wide, c=np.full((2, 1, 1), neutral)), "broadcast")


@pytest.mark.parametrize("shape", ["float[2,3]", "float[]", "int64[N]", "float[N,0]"])
def test_identity(shape):
    applies(
        RemoveIdentity(),
        model(f"agraph ({shape} x) => ({shape} y) {{ a = Identity(x) y = Neg(a) }}"),
        ops=["Neg"],
    )


def test_identity_between_an_input_and_an_output():
    applies(RemoveIdentity(), model("agraph (float[3] x) => (float[3] y) { y = Identity(x) }"))


def test_dropout():
    applies(
        RemoveDropout(),
        model("agraph (float[N,3] x) => (float[N,3] y) { a = Dropout(x) y = Relu(a) }"),
        ops=["Relu"],
    )
    off = "agraph (float[3] x) => (float[3] y) { a, mask = Dropout(x, r, t) y = Relu(a) }"
    applies(RemoveDropout(), model(off, r=np.float32(0.3), t=np.array(False)), ops=["Relu"])
    refuses(RemoveDropout(), model(off, r=np.float32(0.3), t=np.array(True)), "training")
    # Somebody reads the mask.
    refuses(RemoveDropout(), model("agraph (float[3] x) => (float[3] y, bool[3] m) { y, m = Dropout(x) }"))


def test_casts():
    applies(
        RemoveNoopCast(),
        model("agraph (float[3] x) => (float[3] y) { a = Cast<to=1>(x) y = Relu(a) }"),
        ops=["Relu"],
    )
    refuses(RemoveNoopCast(), model("agraph (float[3] x) => (double[3] y) { y = Cast<to=11>(x) }"), "type")
    there_and_back = (
        "agraph ({0}[3] x) => ({0}[3] y) {{ a = Cast<to={1}>(x) b = Cast<to={2}>(a) y = Abs(b) }}"
    )
    applies(MergeCasts(), model(there_and_back.format("float", 11, 1)), ops=["Abs"])
    applies(MergeCasts(), model(there_and_back.format("int32", 7, 6)), ops=["Abs"])
    refuses(MergeCasts(), model(there_and_back.format("float", 10, 1)), "may lose")
    refuses(MergeCasts(), model(there_and_back.format("int64", 1, 7)), "may lose")
    applies(
        MergeCasts(),
        model("agraph (bool[3] x) => (float[3] y) { a = Cast<to=7>(x) y = Cast<to=1>(a) }"),
        ops=["Cast"],
    )
    # A boolean as text is "True", a number "1".
    refuses(
        MergeCasts(),
        model("agraph (bool[3] x) => (string[3] y) { a = Cast<to=7>(x) y = Cast<to=8>(a) }"),
        "overflow",
    )
    refuses(
        MergeCasts(),
        model("agraph (float[3] x) => (int8[3] y) { a = Cast<to=11>(x) y = Cast<to=3>(a) }"),
        "overflow",
    )


NEUTRAL = [
    (RemoveZeroAdd(), "Add", 0),
    (RemoveZeroSub(), "Sub", 0),
    (RemoveUnitMul(), "Mul", 1),
    (RemoveUnitDiv(), "Div", 1),
    (RemoveUnitPow(), "Pow", 1),
]


@pytest.mark.parametrize(("rule", "op", "number"), NEUTRAL, ids=lambda v: getattr(v, "name", None))
def test_neutral(rule, op, number):
    source = "agraph ({0}[{1}] x) => ({0}[{1}] y) {{ a = {2}(x, c) y = Abs(a) }}"
    for name, dtype in (("float", np.float32), ("int64", np.int64), ("double", np.float64)):
        for shape in ((), (1,), (3,), (2, 3), (1, 1)):
            proto = model(source.format(name, "2,3", op), c=np.full(shape, number, dtype))
            if (name, op) == ("int64", "Pow"):  # which the runtime computes as doubles
                refuses(rule, proto, "no kernel")
            else:
                applies(rule, proto, ops=["Abs"])
    # It adds a dimension, or may.
    c = np.full((1, 1, 1), number, np.float32)
    refuses(
        rule,
        model(f"agraph (float[2,3] x) => (float[1,2,3] y) {{ a = {op}(x, c) y = Abs(a) }}", c=c),
        "may broadcast",
    )
    c = np.full((3,), number, np.float32)
    refuses(rule, model(source.format("float", "N,M", op), c=c), "may broadcast")
    refuses(
        rule,
        model(f"agraph (float[1] x) => (float[3] y) {{ a = {op}(x, c) y = Abs(a) }}", c=c),
        "may broadcast",
    )
    c = np.array([number, number, number + 1], np.float32)
    refuses(rule, model(source.format("float", "2,3", op), c=c), "everywhere")
    applies(rule, model(source.format("float", "N,M", op), c=np.float32(number)), ops=["Abs"])


def test_neutral_keeps_the_order_of_operands():
    refuses(
        RemoveZeroSub(),
        model("agraph (float[3] x) => (float[3] y) { y = Sub(c, x) }", c=np.zeros(3, np.float32)),
    )
    applies(
        RemoveUnitMul(),
        model("agraph (float[3] x) => (float[3] y) { a = Mul(c, x) y = Abs(a) }", c=np.ones(3, np.float32)),
        ops=["Abs"],
    )


@pytest.mark.parametrize("op", ["Relu", "Abs", "Ceil", "Floor", "Round", "Sign"])
def test_repeated(op):
    source = f"agraph (float[N,3] x) => (float[N,3] y) {{ a = {op}(x) y = {op}(a) }}"
    applies(RemoveRepeated(), model(source), ops=[op])


def test_repeated_that_is_read_elsewhere():
    applies(
        RemoveRepeated(),
        model("agraph (float[3] x) => (float[3] y, float[3] z) { z = Relu(x) a = Relu(z) y = Neg(a) }"),
        ops=["Neg", "Relu"],
    )
    refuses(RemoveRepeated(), model("agraph (float[3] x) => (float[3] y) { a = Relu(x) y = Abs(a) }"))


def test_involution():
    applies(
        CancelInvolution(),
        model("agraph (bool[3] x) => (bool[3] y) { a = Not(x) b = Not(a) y = Not(b) }"),
        ops=["Not"],
    )
    refuses(CancelInvolution(), model("agraph (float[3] x) => (float[3] y) { a = Neg(x) y = Abs(a) }"))


def test_pad():
    source = 'agraph (float[N,3] x) => (float[N,{n}] y) {{ a = Pad<mode="{mode}">(x, p) y = Relu(a) }}'
    zero = np.zeros(4, np.int64)
    for mode in ("constant", "reflect", "edge"):
        applies(RemoveNoopPad(), model(source.format(n=3, mode=mode), p=zero), ops=["Relu"])
    refuses(RemoveNoopPad(), model(source.format(n=4, mode="edge"), p=np.array([0, 0, 0, 1])), "it pads")
    with_axes = "agraph (float[N,3] x) => (float[N,3] y) { a = Pad(x, p, v, i) y = Relu(a) }"
    given = {"p": np.zeros(2, np.int64), "v": np.float32(1), "i": np.array([1])}
    applies(RemoveNoopPad(), model(with_axes, **given), ops=["Relu"])


def test_slice():
    source = "agraph (float[N,3] x) => (float[N,{n}] y) {{ a = Slice(x, s, e, i) y = Relu(a) }}"

    def sliced(s, e, i, n=3):
        return model(source.format(n=n), s=np.array(s), e=np.array(e), i=np.array(i))

    applies(RemoveNoopSlice(), sliced([0], [3], [1]), ops=["Relu"])
    applies(RemoveNoopSlice(), sliced([-3], [99], [-1]), ops=["Relu"])
    applies(RemoveNoopSlice(), sliced([0, 0], [2**63 - 1, 3], [0, 1]), ops=["Relu"])
    refuses(RemoveNoopSlice(), sliced([0], [5], [0]), "an end")
    refuses(RemoveNoopSlice(), sliced([1], [3], [1], 2), "a beginning")
    refuses(RemoveNoopSlice(), sliced([-5], [2**31], [0]), "a beginning")
    refuses(RemoveNoopSlice(), sliced([0], [-1], [1], 2), "an end")
    stepped = "agraph (float[N,3] x) => (float[N,2] y) { y = Slice(x, s, e, i, t) }"
    given = {"s": np.array([0]), "e": np.array([3]), "i": np.array([1]), "t": np.array([2])}
    refuses(RemoveNoopSlice(), model(stepped, **given), "step")


@pytest.mark.parametrize(
    ("node", "shape", "given"),
    [
        ("Reshape(x, s)", "float[N,3]", {"s": [0, 3]}),
        ("Reshape(x, s)", "float[2,3]", {"s": [-1, 3]}),
        ("Reshape(x, s)", "float[2,3]", {"s": [2, 3]}),
        ("Expand(x, s)", "float[N,3]", {"s": [1, 1]}),
        ("Expand(x, s)", "float[2,3]", {"s": [3]}),
        ("Tile(x, s)", "float[N,3]", {"s": [1, 1]}),
        ("Flatten(x)", "float[2,3]", {}),
        ("Squeeze(x)", "float[2,3]", {}),
    ],
)
def test_reshape(node, shape, given):
    source = f"agraph ({shape} x) => ({shape} y) {{ a = {node} y = Relu(a) }}"
    applies(RemoveNoopReshape(), model(source, **{k: np.array(v) for k, v in given.items()}), ops=["Relu"])


def test_reshape_that_does_something():
    source = "agraph (float[N,M] x) => (float[M,N] y) { y = Reshape(x, s) }"
    refuses(RemoveNoopReshape(), model(source, s=np.array([3, -1])), "changes, or is not known")
    source = "agraph (float[N,1] x) => (float[N,3] y) { y = Expand(x, s) }"
    refuses(RemoveNoopReshape(), model(source, s=np.array([1, 3])), "changes, or is not known")
    source = "agraph (float[1,3] x, int64[2] s) => (float[a,b] y) { y = Expand(x, s) }"
    refuses(RemoveNoopReshape(), model(source), "changes, or is not known")


@pytest.mark.parametrize("node", ["Concat<axis=1>(x)", "Sum(x)", "Max(x)", "Min(x)", "Mean(x)"])
def test_singleton(node):
    source = f"agraph (float[N,3] x) => (float[N,3] y) {{ a = {node} y = Relu(a) }}"
    applies(RemoveSingleton(), model(source), ops=["Relu"])


def test_singleton_of_two():
    refuses(RemoveSingleton(), model("agraph (float[3] x) => (float[6] y) { y = Concat<axis=0>(x, x) }"))


def test_empty_parts():
    source = "agraph (float[N,3] x, float[N,K] z) => (float[N,L] y) { y = Concat<axis=-1>(x, e, z, x) }"
    applies(
        RemoveEmptyParts(),
        model(source.replace("N", "2").replace("K", "4").replace("L", "10"), e=np.zeros((2, 0), np.float32)),
        ops=["Concat"],
    )
    refuses(RemoveEmptyParts(), model(source, e=np.zeros((2, 1), np.float32)))


def test_common_subexpressions():
    source = (
        "agraph (float[N,3] x) => (float[N,4] y) "
        "{ a = MatMul(x, w) b = MatMul(x, w) c = Relu(a) d = Neg(b) y = Add(c, d) }"
    )
    w = np.ones((3, 4), np.float32)
    applies(MergeCommonSubexpressions(), model(source, w=w), ops=["Add", "MatMul", "Neg", "Relu"])
    # Several outputs.
    source = (
        "agraph (float[N,4] x) => (float[N,2] y) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) c, d = Split<axis=1, num_outputs=2>(x) y = Add(a, d) }"
    )
    applies(MergeCommonSubexpressions(), model(source), ops=["Add", "Split"])
    # Both are outputs of the graph.
    source = "agraph (float[3] x) => (float[3] y, float[3] z) { y = Relu(x) z = Relu(x) }"
    applies(MergeCommonSubexpressions(), model(source), ops=["Relu"])


def test_common_subexpressions_that_differ():
    for source in (
        "agraph (float[3] x) => (float[3] y) { a = Relu(x) b = Neg(x) y = Add(a, b) }",
        "agraph (float[3] x, float[3] z) => (float[3] y) { a = Sub(x, z) b = Sub(z, x) y = Add(a, b) }",
        "agraph (float[3] x) => (float[3] y) "
        "{ a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Add(a, b) }",
        "agraph (float[3] x) => (float[3] y) "
        "{ a = RandomNormalLike(x) b = RandomNormalLike(x) y = Add(a, b) }",
    ):
        refuses(MergeCommonSubexpressions(), model(source))


def repeated(graph: Graph) -> set[tuple[Value, Value]]:
    """By definition: each node that computes what others do, and the one of them with the least id."""
    alike: dict[tuple[object, ...], list[Value]] = {}
    for node in graph.nodes():
        if node.op == "Identity":  # it goes by itself
            continue
        inputs = sorted(node.inputs) if node.op in COMMUTATIVE else node.inputs
        alike.setdefault((node.op, node.attrs, len(node.outputs), *inputs), []).append(node.id)
    return {(value, min(ids)) for ids in alike.values() for value in ids if value != min(ids)}


RULE = MergeCommonSubexpressions()

SIMPLER = (RemoveIdentity(), CancelInvolution(), RemoveRepeated())


def sums(rng: random.Random) -> str:
    """A graph of many sums of the same in either order, with what can be removed in between."""
    lines, values = [], ["x", "z"]
    for number in range(60):
        v, a, b = f"v{number}", rng.choice(values[-4:]), rng.choice(values[-4:-1] or values)
        kind = rng.choice(("Identity", "Neg", "LeakyRelu<alpha=0.5>", "Sub", "Split", *["Add"] * 5))
        if kind == "Split":
            lines += [f"{v}w = Concat<axis=0>({a}, {b})", f"{v}, {v}b = Split<num_outputs=2>({v}w)"]
        else:
            lines.append(f"{v} = {kind}({a}, {b})" if kind in ("Add", "Sub") else f"{v} = {kind}({a})")
        values.append(v)
    outputs = ", ".join(f"float[2] {value}" for value in values[-12:])
    return f"agraph (float[2] x, float[2] z) => ({outputs}) {{ {chr(10).join(lines)} }}"


def test_common_subexpressions_are_those_of_the_definition():
    """At each step of walks on which nodes come to read the same. (What is the same to the letter is one already.)"""
    met = 0
    for seed in range(10):
        rng = random.Random(seed)
        state = RewriteState.start(load(model(sums(rng))).graph, Library([*SIMPLER, RULE]))
        while state.candidates:
            found = {(m.nodes[0].id, m.nodes[1].id) for m in state.candidates if m.rule is RULE}
            assert found == repeated(state.graph)
            met += len(found)
            others = [m for m in state.candidates if m.rule is not RULE]
            chosen = others if others and rng.random() < 0.9 else state.candidates
            state = state.apply(rng.choice(sorted(chosen, key=lambda m: m.key)))
        assert repeated(state.graph) == set()
    assert met > 50


def test_dimensions():
    source = (
        "agraph (float[N,3,4] x) => (int64[{n}] y) "
        "{{ s = Shape(x) d = {node} e = Shape<start=0, end=1>(x) y = Concat<axis=0>(d, e) }}"
    )
    gathered = model(source.format(n=3, node="Gather(s, i)"), i=np.array([-1, 1]))
    applies(FoldDimension(), gathered, ops=["Concat", "Shape"])
    refuses(FoldDimension(), model(source.format(n=2, node="Gather(s, i)"), i=np.array([0])), "not a known")
    given = {"b": np.array([1]), "e2": np.array([99])}
    applies(
        FoldDimensions(), model(source.format(n=3, node="Slice(s, b, e2)"), **given), ops=["Concat", "Shape"]
    )
    given = {"b": np.array([0]), "e2": np.array([2])}
    refuses(FoldDimensions(), model(source.format(n=3, node="Slice(s, b, e2)"), **given), "not a known")


def test_what_became_constant():
    source = (
        "agraph (float[N,3] x) => (float[N,3] y) "
        "{ s = Shape(x) d = Gather(s, i) e = Mul(d, i) f = Cast<to=1>(e) y = Add(x, f) }"
    )
    state = RewriteState.start(load(model(source, i=np.array(1))).graph, Library([FoldDimension()]))
    names = []
    while state.candidates:
        names.append(state.candidates[0].rule.name)
        state = state.apply(state.candidates[0])
    assert names == ["FoldDimension"]  # its readers are folded with it
    assert [n.op for n in state.graph.nodes()] == ["Add"]
    (add,) = state.graph.nodes()
    const = state.graph.const(add.inputs[1])
    assert const is not None
    assert const.numpy().tolist() == 3.0
