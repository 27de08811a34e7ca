"""What follows from an edit: constants are found, types become more precise, downstream of what was replaced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rewrite_rules.control import InlineConstantIf
from rewrite_rules.identity import FoldDimension, RemoveIdentity, RemoveNoopSlice
from rewrite_rules.transpose import CancelTransposes
from tests.rules.harness import applies, model
from xrlflow.ir import ArrayHandle, Attrs, Const, DType, TensorType, Value, mix
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState, evaluate_small
from xrlflow.rewrite.propagate import fold_small


def test_constness_goes_down_a_chain() -> None:
    """The branch that is chosen has a known shape: what is computed from it is evaluated."""
    proto = model(
        "agraph (float[2,3] x, float[N] y) => (float[N] z) { q = Constant<value = bool {1}>()"
        " d = If (q) <then_branch = g () => (float[A,B] p) { p = Neg(x) },"
        " else_branch = h () => (float[C] r) { r = Identity(y) }>"
        " s = Shape(d) i = Constant<value_int = 1>() a = Gather(s, i) n = Neg(a) m = Mul(n, n) c = Cast<to = 1>(m)"
        " z = Add(y, c) }"
    )
    graph = applies(InlineConstantIf(), proto, ops=["Add"])
    add = next(graph.nodes())
    constant = graph.const(add.inputs[1])
    assert constant is not None
    assert constant.numpy().tolist() == 9.0


def test_types_become_more_precise_as_far_as_they_do() -> None:
    proto = model(
        "agraph (float[2,3] x, bool u) => (float[N,M] z) { q = Constant<value = bool {1}>()"
        " d = If (q) <then_branch = g () => (float[A,B] p) { p = Neg(x) },"
        " else_branch = h () => (float[C] r) { zero = Constant<value_ints = [-1]>() r = Reshape(x, zero) }>"
        " e = Relu(d) f = Transpose<perm = [1, 0]>(e) z = Exp(f) }"
    )
    graph = applies(InlineConstantIf(), proto)
    assert graph.type(graph.outputs[0]).shape == (3, 2)
    assert graph.fingerprint == graph.rebuilt_fingerprint()


def test_an_edit_that_teaches_nothing_is_left_alone() -> None:
    proto = model(
        "agraph (float[2,3] x) => (float[2,3] y) { a = Identity(x) b = Transpose(a) c = Transpose(b) y = Relu(c) }"
    )
    state = RewriteState.start(load(proto).graph, Library([RemoveIdentity(), CancelTransposes()]))
    for match in state.candidates:
        edit = state.edit(match)
        assert {n.op for n in edit.removed} <= {"Identity", "Transpose"}
        assert not edit.added


def test_what_fails_after_an_edit_is_shown_to_no_rule() -> None:
    """The branch that is chosen has two dimensions, and no third that could be sliced."""
    proto = model(
        "agraph (float[2,3] x) => (float z) { q = Constant<value = bool {1}>()"
        " d = If (q) <then_branch = g () => (float[A,B] p) { p = Neg(x) },"
        " else_branch = h () => (float[C,D,E] r) { zero = Constant<value_ints = [0]>() r = Unsqueeze(x, zero) }>"
        " s = Constant<value_ints = [0]>() e = Constant<value_ints = [9223372036854775807]>()"
        " a = Constant<value_ints = [2]>() z = Slice(d, s, e, a) }"
    )
    state = RewriteState.start(load(proto).graph, Library([InlineConstantIf(), RemoveNoopSlice()]))
    (match,) = [m for m in state.candidates if m.rule.name == "InlineConstantIf"]
    after = state.apply(match)
    assert {n.op for n in after.graph.nodes()} == {"Neg", "ai.onnx@0::Slice"}


def test_folding_commutes() -> None:
    """Two dimensions, found in either order, give one state."""
    proto = model(
        "agraph (float[N,3,5] x, float[4] y) => (float[4] z) { s = Shape(x) i = Constant<value_int = 1>()"
        " j = Constant<value_int = 2>() a = Gather(s, i) b = Gather(s, j) m = Mul(a, b) c = Cast<to = 1>(m)"
        " z = Add(y, c) }"
    )
    state = RewriteState.start(load(proto).graph, Library([FoldDimension()]))
    first, second = sorted(state.candidates, key=lambda m: m.key)
    ends = []
    for one, other in ((first, second), (second, first)):
        middle = state.apply(one)
        found = middle.find(other.key)
        assert found is not None
        ends.append(middle.apply(found))
    assert ends[0].fingerprint == ends[1].fingerprint
    assert [n.op for n in ends[0].graph.nodes()] == ["Add"]


def test_constants_of_constants_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is told apart by operator, attributes, inputs and types; so is what cannot be evaluated."""
    evaluated: list[str] = []
    leaves = load(model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")).graph.leaves
    row = leaves.intern(np.array([[1.0, 2.0, 4.0]], np.float32), DType.FLOAT)
    other = leaves.intern(np.array([[1.0, 1.0, 1.0]], np.float32), DType.FLOAT)
    large = leaves.add_const(
        mix(1), Const(TensorType(DType.FLOAT, (2000,), True), ArrayHandle(np.ones(2000, np.float32)))
    )
    flat, wide = TensorType(DType.FLOAT, (1, 3), True), TensorType(DType.DOUBLE, (1, 3), True)

    def counted(op: str, *given: Any) -> Any:
        evaluated.append(op)
        return evaluate_small(op, *given)

    monkeypatch.setattr("xrlflow.rewrite.propagate.evaluate_small", counted)

    def fold(op: str, inputs: tuple[Value, ...], type: TensorType, **attrs: int) -> list[Any] | None:
        found = fold_small(leaves, op, Attrs(attrs), inputs, (type,))
        return None if found is None else [leaves.consts[found[0]].numpy().tolist(), leaves.types[found[0]]]

    for _ in range(2):
        assert fold("Add", (row, row), flat) == [[[2.0, 4.0, 8.0]], flat]
        assert fold("Add", (row, other), flat) == [[[2.0, 3.0, 5.0]], flat]
        assert fold("Sub", (row, row), flat) == [[[0.0, 0.0, 0.0]], flat]
        assert fold("Softmax", (other,), TensorType(DType.FLOAT, (1, 3), True), axis=0) == [[[1.0] * 3], flat]
        assert fold("Cast", (row,), flat, to=1) == [[[1.0, 2.0, 4.0]], flat]
        assert fold("Cast", (row,), wide, to=11) == [[[1.0, 2.0, 4.0]], wide]
        assert fold("Neg", (large,), TensorType(DType.FLOAT, (2000,), True)) is None
        assert fold("Neg", (mix(2),), flat) is None  # no constant
    assert evaluated == ["Add", "Add", "Sub", "Softmax", "Cast", "Cast", "Neg"]
    third = fold("Softmax", (other,), flat, axis=1)
    assert third is not None
    assert third[0] != [[1.0] * 3]
