"""Rules that are wrong beyond what a narrow type holds: counts, places and sizes that no small graph has."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from tests.prover.test_wrong_rules import rejected
from xrlflow.ir import DType
from xrlflow.prover import prove
from xrlflow.prover.cases import applied
from xrlflow.prover.mutants import MutatingBuilder, Mutation
from xrlflow.prover.mutation_testing import _likeness
from xrlflow.prover.proof import Proof
from xrlflow.rewrite import AnyRule, Op, Rule, Val

pytestmark = pytest.mark.proof


class _Narrow(Rule):
    """A value of integers goes through a narrower type, `way`."""

    proof = "numeric"
    relies_on = "the integers are small"
    way: ClassVar[DType]

    def through(self, op: Op, whole: Any) -> Any:
        return op.Cast(op.Cast(whole, to=int(self.way)), to=int(DType.INT64))


class _ArgMax(_Narrow):
    """argmax(x) -> cast(cast(argmax(x), to way), to int64)."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.ArgMax(x, attrs="attrs")

    def target(self, op: Op, m: Any, x: Val) -> Any:
        return self.through(op, op.ArgMax(x, attrs=m.attrs))


class _ArgMin(_Narrow):
    """cast(cast(argmin(x), to way), to int64) -> argmin(x)."""

    shapes = "x[a,b]:float"

    def source(self, op: Op, x: Any) -> Any:
        return self.through(op, op.ArgMin(x, axis="axis"))

    def target(self, op: Op, m: Any, x: Val) -> Any:
        return op.ArgMin(x, axis=m.axis)


class _TopK(_Narrow):
    """The indices of topk(x) -> the same, cast to way and back."""

    shapes = "x[a,n]:float k[1]:int:const"

    def source(self, op: Op, x: Any, k: Any) -> Any:
        return op.TopK(x, k, outputs=2)[1]

    def target(self, op: Op, x: Val, k: Val) -> Any:
        return self.through(op, op.TopK(x, k, outputs=2)[1])


class _Shape(_Narrow):
    """shape(x) -> cast(cast(shape(x), to way), to int64)."""

    examples = ("agraph (float[N,3] x) => (int64[2] y) { y = Shape(x) }",)

    def source(self, op: Op, x: Any) -> Any:
        return op.Shape(x)

    def target(self, op: Op, x: Val) -> Any:
        return self.through(op, op.Shape(x))


class _Rows(_Narrow):
    """reshape(x, shape(y)) -> reshape(x, cast(cast(shape(y), to way), to int64))."""

    examples = ("agraph (float[M,K] x, float[M,K] z) => (float[M,K] y) { s = Shape(z) y = Reshape(x, s) }",)

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Reshape(x, op.Shape(y))

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Reshape(x, self.through(op, op.Shape(y)))


class _Index(_Narrow):
    """gather(x, i) -> gather(x, cast(i, to way and back))."""

    shapes = "x[n]:float i[m]:int"
    examples = ("agraph (float[N] x, int64[M] i) => (y) { y = Gather(x, i) }",)

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.Gather(x, i)

    def target(self, op: Op, x: Val, i: Val) -> Any:
        return op.Gather(x, self.through(op, i))


class _Count(_Narrow):
    """How many elements of a mask are true, counted in int64 -> counted in way."""

    shapes = "x[a,n]:bool"

    def source(self, op: Op, x: Any) -> Any:
        return op.ReduceSum(op.Cast(x, to=int(DType.INT64)), keepdims="keepdims")

    def target(self, op: Op, m: Any, x: Val) -> Any:
        count = op.ReduceSum(op.Cast(x, to=int(self.way)), keepdims=m.keepdims)
        return op.Cast(count, to=int(DType.INT64))


class _Positives(_Narrow):
    """How many elements are positive, as float32: counted in int32 -> counted in way."""

    shapes = "x[n]:float"

    def source(self, op: Op, x: Any) -> Any:
        mask = op.Greater(x, 0.0)
        return op.Cast(op.ReduceSum(op.Cast(mask, to=int(DType.INT32))), to=int(DType.FLOAT))

    def target(self, op: Op, x: Val) -> Any:
        mask = op.Cast(op.Greater(x, 0.0), to=int(self.way))
        return op.Cast(op.ReduceSum(mask), to=int(DType.FLOAT))


def _of(base: type[_Narrow], *ways: DType) -> list[AnyRule]:
    """A rule for each narrow type. Its operators have kernels for floats alone."""
    return [
        type(f"{base.__name__[1:]}Through{w.name.title()}", (base,), {"__doc__": base.__doc__, "way": w})()
        for w in ways
    ]


WRONG = [
    *_of(_ArgMax, DType.INT8, DType.UINT8, DType.FLOAT16, DType.BFLOAT16, DType.INT16),
    *_of(_ArgMin, DType.INT8, DType.UINT16),
    *_of(_TopK, DType.INT8, DType.INT16),
    *_of(_Shape, DType.INT8, DType.INT16, DType.UINT16, DType.FLOAT16, DType.FLOAT),
    *_of(_Rows, DType.INT16, DType.FLOAT16),
    *_of(_Index, DType.INT8, DType.FLOAT16),
    *_of(_Count, DType.FLOAT16, DType.FLOAT),
    *_of(_Positives, DType.FLOAT16),
]


@pytest.mark.parametrize("rule", WRONG, ids=lambda r: r.name)
def test_a_narrow_type_does_not_hold_every_count_or_place(rule: AnyRule) -> None:
    rejected(rule)


def test_what_differs_for_large_numbers_alone_is_not_called_equivalent() -> None:
    """A Cast to int8 is one to uint8, of the numbers 0 to 3."""
    (rule,) = _of(_ArgMax, DType.UINT8)
    proof = Proof(rule, 0)
    case = next(c for p in proof.source.problems() for c in proof.matches(p)[0])
    builder = MutatingBuilder(case.before, Mutation(1, "Cast", "attribute", ("to", 0)))
    applied(case.problem, case.match, builder)
    assert builder.reached
    assert _likeness(builder, case, np.random.default_rng(0)) == ""


@pytest.mark.parametrize(
    "rule", [*_of(_Shape, DType.DOUBLE), *_of(_Count, DType.DOUBLE)], ids=lambda r: r.name
)
def test_a_wide_type_holds_them(rule: AnyRule) -> None:
    found = prove(rule)
    assert found.proven, found.failures
