"""The prover accepts what is right, and rejects what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xrlflow.ir import DType, Node
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule, Captures, Op, Reader, Region, RegionRule, Rule, Val, require


class Distribute(Rule):
    """x @ w + y @ w -> (x + y) @ w."""

    shapes = "x[a,k] y[a,k] w[k,n]:const"

    def source(self, op: Op, x: Any, y: Any, w: Any) -> Any:
        return op.Add(op.MatMul(x, w), op.MatMul(y, w))

    def target(self, op: Op, x: Val, y: Val, w: Val) -> Any:
        return op.MatMul(op.Add(x, y), w)


class Reduce(Rule):
    """transpose(transpose(x)) -> x  when the permutations cancel."""

    shapes = "x[a,b,c]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(op.Transpose(x, perm="p"), perm="q")

    def where(self, m: Captures, x: Val) -> None:
        p, q = m.p or (2, 1, 0), m.q or (2, 1, 0)
        require([p[i] for i in q] == [0, 1, 2], "they do not cancel")

    def target(self, op: Op, x: Val) -> Any:
        return x


class SwapReluAndNeg(RegionRule):
    """abs(neg(x)) -> abs(x)."""

    proof = "numeric"
    anchors = ("Abs",)
    examples = ("agraph (float[N,3] x) => (float[N,3] y) { a = Neg(x) y = Abs(a) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        if inner is None or inner.op != "Neg":
            return None
        return Region(node.outputs, inner.inputs, (node, inner))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Abs(x)


@pytest.mark.parametrize("rule", [Distribute(), Reduce(), SwapReluAndNeg()], ids=lambda r: r.name)
def test_right_rules_are_proven(rule: AnyRule) -> None:
    found = prove(rule)
    assert found.proven, found.failures
    assert found.admitted >= 8
    assert found.runtime_cases
    assert found.mutants_rejected == found.mutants, found.survivors
    if rule.proof == "field":
        assert found.bound < 1e-12
        assert found.mutants


def test_the_same_seed_gives_the_same_certificate() -> None:
    one, two = (prove(Distribute(), 3).to_json() for _ in range(2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


class MixedUp(Distribute):
    """x @ w + y @ w -> (x + x) @ w."""

    def target(self, op: Op, x: Val, y: Val, w: Val) -> Any:
        return op.MatMul(op.Add(x, x), w)


class NoCondition(Reduce):
    """transpose(transpose(x)) -> x."""

    def where(self, m: Captures, x: Val) -> None:
        pass


class RootOfSquare(Rule):
    """sqrt(x * x) -> x: wrong below zero."""

    proof = "numeric"
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Sqrt(op.Mul(x, x))

    def target(self, op: Op, x: Val) -> Any:
        return x


class Vanish(Rule):
    """x * 0 -> 0: wrong for infinities and NaN."""

    dtypes = frozenset({DType.FLOAT})
    shapes = "x[a,b]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, 0.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Expand(np.zeros(1, np.float32), list(x.sizes))


class ForgetAxis(Rule):
    """softmax(transpose(x)) -> transpose(softmax(x)): the axis moves."""

    shapes = "x[a,b,c]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Softmax(op.Transpose(x, perm="p"), axis="axis")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Transpose(op.Softmax(x, axis=m.axis), perm=m.p)


class AlmostGelu(Rule):
    """gelu(x) -> x * sigmoid(1.702 x): an approximation."""

    proof = "numeric"
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Gelu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, op.Sigmoid(op.Mul(x, 1.702)))


class WrongSpelling(RegionRule):
    """relu(neg(x)) -> neg(relu(x))."""

    proof = "numeric"
    anchors = ("Relu",)
    examples = ("agraph (float[N,3] x) => (float[N,3] y) { a = Neg(x) y = Relu(a) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        if inner is None or inner.op != "Neg":
            return None
        return Region(node.outputs, inner.inputs, (node, inner))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Neg(op.Relu(x))


class Unmatched(Rule):
    """neg(x) -> neg(x), never admitted."""

    shapes = "x[a]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(x)

    def where(self, m: Captures, x: Val) -> None:
        require(False, "never")

    def target(self, op: Op, x: Val) -> Any:
        return op.Sub(0.0, x)


WRONG = [
    (MixedUp(), "differs"),
    (NoCondition(), ""),
    (RootOfSquare(), "off by"),
    (Vanish(), "an input holds"),
    (ForgetAxis(), "differs"),
    (AlmostGelu(), "off by"),
    (WrongSpelling(), "off by"),
    (Unmatched(), "only 0 cases"),
]


@pytest.mark.parametrize(("rule", "reason"), WRONG, ids=lambda v: getattr(v, "name", ""))
def test_wrong_rules_are_rejected(rule: AnyRule, reason: str) -> None:
    found = prove(rule)
    assert not found.proven
    assert reason in found.failures[0]
