"""Rules that are wrong for some values, types or sizes only: the proof has to find those, however they are spelt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.runtime import recent
from xrlflow.ir import FLOATS, INTEGERS, DType, Node
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule, Captures, Op, Reader, Region, RegionRule, Rule, Val, require

pytestmark = pytest.mark.proof

# Numbers, values


class _Through(Rule):
    """cast(cast(x, to way), back) -> x  for these types of x."""

    proof = "numeric"
    way: ClassVar[DType]
    types: ClassVar[frozenset[DType]]

    def source(self, op: Op, x: Any) -> Any:
        return op.Cast(op.Cast(x, to=int(self.way)), to="back")

    def where(self, m: Captures, x: Val) -> None:
        require(x.dtype in self.types and m.back == x.dtype, "it is another cast")

    def target(self, op: Op, x: Val) -> Any:
        return x


def _casts(name: str, types: frozenset[DType], way: DType) -> AnyRule:
    examples = tuple(
        f"agraph ({t.name.lower()}[N,3] x) => ({t.name.lower()}[N,3] y) "
        f"{{ a = Cast<to = {int(way)}>(x) y = Cast<to = {int(t)}>(a) }}"
        for t in sorted(types)
    )
    members = {"__doc__": _Through.__doc__, "types": types, "way": way, "examples": examples}
    made: AnyRule = type(name, (_Through,), members)()
    return made


CASTS = [
    _casts("LongThroughInt", frozenset({DType.INT64}), DType.INT32),
    _casts("LongThroughByte", frozenset({DType.INT64}), DType.UINT8),
    _casts("IntThroughFloat", frozenset({DType.INT32}), DType.FLOAT),
    _casts("LongThroughDouble", frozenset({DType.INT64}), DType.DOUBLE),
    _casts("IntThroughBool", frozenset({DType.INT32}), DType.BOOL),
    _casts("FloatThroughHalf", frozenset({DType.FLOAT}), DType.FLOAT16),
    _casts("FloatThroughBrain", frozenset({DType.FLOAT}), DType.BFLOAT16),
    _casts("DoubleThroughFloat", frozenset({DType.DOUBLE}), DType.FLOAT),
    _casts("HalfThroughBrain", frozenset({DType.FLOAT16}), DType.BFLOAT16),
    _casts("FloatThroughInt", frozenset({DType.FLOAT}), DType.INT32),
    _casts("UnsignedThroughShort", frozenset({DType.UINT16}), DType.INT8),
    _casts("AnyThroughLong", FLOATS | INTEGERS, DType.INT64),
]


class FloorThroughInt(Rule):
    """cast(cast(floor(x), to int32), to float) -> floor(x): what does not fit becomes another number."""

    proof = "numeric"
    dtypes = frozenset({DType.FLOAT})
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Cast(op.Cast(op.Floor(x), to=6), to=1)

    def target(self, op: Op, x: Val) -> Any:
        return op.Floor(x)


class MultiplyAndDivide(Rule):
    """(x * c) / c -> x  for integers: the product may wrap around."""

    dtypes = INTEGERS
    shapes = "x[...] c[]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Div(op.Mul(x, c), c)

    def where(self, m: Captures, x: Val, c: Val) -> None:
        require(c.scalar != 0, "it divides by zero")

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return x


class DivideAndMultiply(Rule):
    """(x / c) * c -> x  for integers: the quotient is rounded."""

    dtypes = INTEGERS
    shapes = "x[...] c[]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Mul(op.Div(x, c), c)

    def where(self, m: Captures, x: Val, c: Val) -> None:
        require(c.scalar != 0, "it divides by zero")

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return x


class DoubleAndHalve(Rule):
    """(x + x) / 2 -> x  for integers of 32 bits."""

    dtypes = frozenset({DType.INT32})
    shapes = "x[...]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Div(op.Add(x, x), 2.0)

    def target(self, op: Op, x: Val) -> Any:
        return x


class SwapDistance(Rule):
    """|a - b| -> |b - a|: not of unsigned integers."""

    proof = "numeric"
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        return op.Abs(op.Sub(a, b))

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Abs(op.Sub(b, a))


class CompareByDifference(Rule):
    """a - b < 0 -> a < b: the difference may wrap around."""

    proof = "numeric"
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        return op.Less(op.Sub(a, b), 0.0)

    def where(self, m: Captures, a: Val, b: Val) -> None:
        require(a.dtype in INTEGERS, "infinities have no difference")

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Less(a, b)


class PositiveAbs(Rule):
    """relu(|x|) -> |x|  for signed integers: of the least one there is no opposite."""

    proof = "numeric"
    dtypes = frozenset({DType.INT32, DType.INT8})
    shapes = "x[...]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Relu(op.Abs(x))

    def target(self, op: Op, x: Val) -> Any:
        return op.Abs(x)


class DropByteClip(Rule):
    """min(x, 255) -> x."""

    proof = "numeric"
    dtypes = frozenset({DType.INT32, DType.INT64, DType.UINT32})
    shapes = "x[...]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Min(x, 255.0)

    def target(self, op: Op, x: Val) -> Any:
        return x


class BelowByte(Rule):
    """x < 256 -> x == x  for integers of 16 bits."""

    proof = "numeric"
    shapes = "x[...]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Less(x, 256.0)

    def where(self, m: Captures, x: Val) -> None:
        require(x.dtype in (DType.UINT16, DType.INT16, DType.INT32), "other numbers")

    def target(self, op: Op, x: Val) -> Any:
        return op.Equal(x, x)


class ModOfMod(Rule):
    """(x + c) mod c -> x mod c: the sum may wrap around, and c need not divide the range."""

    proof = "numeric"
    dtypes = INTEGERS
    shapes = "x[...] c[]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Mod(op.Add(x, c), c)

    def where(self, m: Captures, x: Val, c: Val) -> None:
        require(c.scalar != 0, "it divides by zero")

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Mod(x, c)


class SumOfSquares(Rule):
    """reducesum(x * x) -> reducesumsquare(x): of integers the runtime's reductions do not wrap around."""

    dtypes = frozenset({DType.INT32, DType.INT64})
    shapes = "x[a,b]"

    def source(self, op: Op, x: Any) -> Any:
        return op.ReduceSum(op.Mul(x, x))

    def target(self, op: Op, x: Val) -> Any:
        return op.ReduceSumSquare(x)


class PowerOfOne(Rule):
    """x ^ 1 -> x  of long integers, which the runtime raises as doubles."""

    dtypes = frozenset({DType.INT64})
    shapes = "x[...]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Pow(x, 1.0)

    def target(self, op: Op, x: Val) -> Any:
        return x


class NegateSum(Rule):
    """reducesum(-x) -> -reducesum(x)  of integers, which reductions of the runtime saturate."""

    dtypes = frozenset({DType.INT32})
    shapes = "x[a,b]"

    def source(self, op: Op, x: Any) -> Any:
        return op.ReduceSum(op.Neg(x))

    def target(self, op: Op, x: Val) -> Any:
        return op.Neg(op.ReduceSum(x))


# Sizes and thresholds

_LIMIT = 480_000
_NAMED = {"limit": 1_000}
_MAX = 2**31 - 1


def _reaches(end: int) -> bool:
    return end >= _LIMIT


class _Cut(Rule):
    """slice(x, 0:end) -> x  for an end that is larger than all sizes are thought to be."""

    condition: ClassVar[Callable[[int], bool]]

    def source(self, op: Op, x: Any, start: Any, end: Any, axes: Any) -> Any:
        return op.Slice(x, start, end, axes)

    def where(self, m: Captures, x: Val, start: Val, end: Val, axes: Val) -> None:
        require(start.ints == (0,) and len(end.ints) == 1, "it begins later")
        require(type(self).condition(end.ints[0]), "it ends before")

    def target(self, op: Op, x: Val, start: Val, end: Val, axes: Val) -> Any:
        return x


def _cuts(name: str, condition: Callable[[int], bool]) -> AnyRule:
    made: AnyRule = type(name, (_Cut,), {"__doc__": _Cut.__doc__, "condition": staticmethod(condition)})()
    return made


def _closed(limit: int) -> Callable[[int], bool]:
    return lambda end: not end < limit


CUTS = [
    _cuts("EndOfThousand", lambda end: end >= 1000),
    _cuts("EndOfGlobal", _reaches),
    _cuts("EndOfTable", lambda end: end >= _NAMED["limit"]),
    _cuts("EndOfClosure", _closed(5_000)),
    _cuts("EndBelowMax", lambda end: end > _MAX - 7),
    _cuts("EndBelowMaxOfType", lambda end: end > np.iinfo(np.int32).max - 11),
    _cuts("EndExactly", lambda end: end == int("1" + "0" * 3)),
    _cuts("EndByDifference", lambda end: end - 37 > 262),
    _cuts("EndByText", lambda end: len(f"{end}") > 3),
    _cuts("EndByRange", lambda end: end in range(900, 1100)),
    _cuts("EndByDivision", lambda end: end // 100 >= 7),
]


class SmallPad(Rule):
    """relu(x) -> x * (x > 0) as if no dimension had more than 100 elements."""

    shapes = "x[a]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Relu(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Relu(op.Slice(x, [0], [100], [0]))


class FewRows(Rule):
    """transpose(x) -> x  of at least 64 columns (wrongly)."""

    shapes = "x[a,b]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Transpose(x)

    def where(self, m: Captures, x: Val) -> None:
        a, b = x.sizes
        require(a == 1 or b == 1 or a > 63, "it moves something")

    def target(self, op: Op, x: Val) -> Any:
        return op.Reshape(x, [x.size(1), x.size(0)])


class ManyAxes(Rule):
    """softmax(x) -> softmax along the last axis, for tensors of rank 7."""

    proof = "numeric"
    shapes = "x"

    def source(self, op: Op, x: Any) -> Any:
        return op.Softmax(x, axis="axis")

    def where(self, m: Captures, x: Val) -> None:
        require(m.axis in (None, -1, x.rank - 1) or x.rank > 6, "it is another axis")

    def target(self, op: Op, x: Val) -> Any:
        return op.Softmax(x, axis=-1)


class KeepsTheFirst(RegionRule):
    """slice(relu(x), 0:300) -> relu(x)."""

    anchors = ("Slice",)
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,3] x) => (y) <int64[1] b = {0}, int64[1] e = {300}, int64[1] a = {0}> "
        "{ r = Relu(x) y = Slice(r, b, e, a) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        begin, end = (reader.val(v).ints for v in node.inputs[1:3])
        if inner is None or inner.op != "Relu" or len(node.inputs) != 4:
            return None
        require(begin == (0,) and end[0] >= 300, "it cuts")
        return Region(node.outputs, inner.inputs, (node, inner))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Relu(x)


class FewChoices(Rule):
    """topk(x, k) -> topk(x, 50) for a larger k."""

    proof = "numeric"
    shapes = "x[n] k[1]:int:const"

    def source(self, op: Op, x: Any, k: Any) -> Any:
        return op.TopK(x, k, outputs=2)

    def where(self, m: Captures, x: Val, k: Val) -> None:
        require(k.ints[0] >= 50, "fewer are wanted")

    def target(self, op: Op, x: Val, k: Val) -> Any:
        return op.TopK(x, [50], outputs=2)


class ForgetOneByte(Rule):
    """where(quantise(x, s) == 243, -x, x) -> x: wrong where x is quantised to 243. In a field, that hardly ever is."""

    shapes = "x[...]:float s[]:const"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] o) <float s = {0.1}, uint8 k = {243}> "
        "{ q = QuantizeLinear(x, s) e = Equal(q, k) n = Neg(x) o = Where(e, n, x) }",
    )

    def source(self, op: Op, x: Any, s: Any) -> Any:
        return op.Where(op.Equal(op.QuantizeLinear(x, s), 243.0), op.Neg(x), x)

    def target(self, op: Op, x: Val, s: Val) -> Any:
        return op.Identity(x)


VALUES = [
    FloorThroughInt(),
    ForgetOneByte(),
    MultiplyAndDivide(),
    DivideAndMultiply(),
    DoubleAndHalve(),
    SwapDistance(),
    CompareByDifference(),
    PositiveAbs(),
    DropByteClip(),
    BelowByte(),
    ModOfMod(),
    SumOfSquares(),
    PowerOfOne(),
    NegateSum(),
]
SIZES = [SmallPad(), FewRows(), ManyAxes(), KeepsTheFirst(), FewChoices()]


def _name(rule: AnyRule) -> str:
    return rule.name


def rejected(rule: AnyRule) -> str:
    """Why a rule is not proven: a case in which it is wrong, not that there are too few."""
    found = prove(rule)
    assert not found.proven
    assert "cases in" not in found.failures[0], found.failures[0]
    assert "never" not in found.failures[0], found.failures[0]
    return found.failures[0]


@pytest.mark.quick
@pytest.mark.parametrize("rule", CASTS, ids=_name)
def test_a_narrow_type_on_the_way_loses_something(rule: AnyRule) -> None:
    rejected(rule)


@recent
@pytest.mark.parametrize("rule", VALUES, ids=_name)
def test_integers_wrap_around(rule: AnyRule) -> None:
    rejected(rule)


@pytest.mark.parametrize("rule", [*CUTS, *SIZES], ids=_name)
def test_a_number_in_a_condition_is_no_limit_of_sizes(rule: AnyRule) -> None:
    rejected(rule)
