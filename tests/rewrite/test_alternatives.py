"""Left sides of several forms: `op.either`, `op.any_of`, and functions that are given what they name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.rules.harness import applies, model, refuses
from xrlflow.onnxio import load
from xrlflow.prover import prove
from xrlflow.rewrite import Captures, Library, Op, RewriteState, Rule, RuleError, Val, require
from xrlflow.rewrite.pattern import trace_patterns


class FuseLogistic(Rule):
    """1 / (1 + exp(-x)) -> sigmoid(x)."""

    shapes = "x[...]:float"
    proof = "numeric"
    relies_on = "sigmoid(x) = 1 / (1 + exp(-x))"
    may_remove_nonfinite = True

    def source(self, op: Op, x: Any) -> Any:
        e = op.Add(1.0, op.Exp(op.either(op.Neg(x), op.Mul(x, -1.0))))
        return op.either(op.Div(1.0, e), op.Reciprocal(e))

    def target(self, op: Op, x: Val) -> Any:
        return op.Sigmoid(x)


class NegateOdd(Rule):
    """f(-x) -> -f(x)  for odd f."""

    shapes = "x[...]:float"
    proof = "numeric"
    relies_on = "f(-x) = -f(x)"

    def source(self, op: Op, x: Any) -> Any:
        return op.any_of(("Tanh", "Sin", "Erf"), "f")(op.Neg(x))

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Neg(op[m.f](x))


def unary(body: str) -> Any:
    return model(
        f"agraph (float[N,4] x) => (float[N,4] y) <float one = {{1}}, float minus = {{-1}}> {{ {body} }}"
    )


@pytest.mark.parametrize("negated", ["n = Neg(x)", "n = Mul(x, minus)", "n = Mul(minus, x)"])
@pytest.mark.parametrize("inverted", ["y = Div(one, s)", "y = Reciprocal(s)"])
def test_each_form_of_either_is_matched(negated: str, inverted: str) -> None:
    applies(FuseLogistic(), unary(f"{negated} e = Exp(n) s = Add(e, one) {inverted}"), ops=["Sigmoid"])


def test_what_is_none_of_the_forms_is_not_matched() -> None:
    refuses(FuseLogistic(), unary("n = Mul(x, one) e = Exp(n) s = Add(e, one) y = Reciprocal(s)"))
    refuses(FuseLogistic(), unary("n = Neg(x) e = Exp(n) s = Add(e, one) y = Div(s, one)"))
    refuses(NegateOdd(), unary("n = Neg(x) y = Cos(n)"))


@pytest.mark.parametrize("f", ["Tanh", "Sin", "Erf"])
def test_any_of_says_which_operator_it_is(f: str) -> None:
    applies(NegateOdd(), unary(f"n = Neg(x) y = {f}(n)"), ops=[f, "Neg"])


def test_every_form_is_proven() -> None:
    """A wrong form among right ones is found: each is drawn."""

    class Wrong(FuseLogistic):
        """1 / (1 + exp(-x)) -> sigmoid(x), and of exp(x) too."""

        def source(self, op: Op, x: Any) -> Any:
            e = op.Add(1.0, op.Exp(op.either(op.Neg(x), op.Mul(x, -1.0), op.Mul(x, -1.001))))
            return op.either(op.Div(1.0, e), op.Reciprocal(e))

    assert prove(FuseLogistic()).proven
    assert prove(NegateOdd()).proven
    assert not prove(Wrong()).proven

    class WrongOperator(NegateOdd):
        """f(-x) -> -f(x), and of cos too."""

        def source(self, op: Op, x: Any) -> Any:
            return op.any_of(("Tanh", "Sin", "Erf", "Cos"), "f")(op.Neg(x))

    assert not prove(WrongOperator()).proven


def test_forms_that_come_to_the_same_are_one() -> None:
    class Nested(Rule):
        """either(either(-x, x + 1), x^2), then root."""

        shapes = "x[...]:float"

        def source(self, op: Op, x: Any) -> Any:
            inner = op.either(op.Neg(x), op.Add(x, 1.0))
            return op.Sqrt(op.either(inner, op.Pow(x, 2.0)))

        def target(self, op: Op, x: Val) -> Any:
            return op.Sqrt(x)

    patterns = trace_patterns(Nested())
    assert Counter(n.op for p in patterns for n in p.nodes) == Counter(Sqrt=3, Neg=1, Add=1, Pow=1)
    assert [p.name for p in patterns] == ["Nested (0)", "Nested (1)", "Nested (2)"]
    assert all([n.index for n in p.nodes] == [0, 1] for p in patterns)


class _OfFunctions(Rule):
    """f(g(x)) -> f(g(x)) + 0, in some form."""

    shapes = "x[...]:float"

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Add(op[m.f](op[m.g](x)), 0.0)


_SMOOTH = ("Cos", "Erf", "Exp", "Sin", "Tanh")


def test_operators_that_are_matched_in_one_way_are_one_pattern() -> None:
    class Free(_OfFunctions):
        """f(g(x))."""

        def source(self, op: Op, x: Any) -> Any:
            return op.any_of(_SMOOTH, "f")(op.any_of(("LeakyRelu", "Neg", "Elu"), "g")(x))

    class Sums(_OfFunctions):
        """x + |x|, x - |x|: the operands of a sum may stand the other way round."""

        def source(self, op: Op, x: Any) -> Any:
            return op.any_of(("Add", "Sub"), "f")(x, op.any_of(("Abs", "Relu"), "g")(x))

    assert [[n.ops for n in p.nodes] for p in trace_patterns(Free())] == [
        [("Elu", "LeakyRelu", "Neg"), _SMOOTH]
    ]
    assert [p.nodes[1].ops for p in trace_patterns(Sums())] == [("Add",), ("Sub",)]
    applies(Free(), unary("n = Neg(x) y = Erf(n)"), ops=["Add", "Erf", "Neg"])
    refuses(Free(), unary("n = Abs(x) y = Erf(n)"))
    refuses(Free(), unary("n = Neg(x) y = Log(n)"))


def test_a_condition_is_asked_for_each_operator() -> None:
    """What was refused of one operator is not refused of another with inputs of the same types."""

    class OnlySines(_OfFunctions):
        """sin(g(x)) of all f(g(x))."""

        def source(self, op: Op, x: Any) -> Any:
            return op.any_of(_SMOOTH, "f")(op.any_of(("Abs", "Neg"), "g")(x))

        def where(self, m: Captures) -> None:
            require(m.f == "Sin" and m.g == "Neg", "another function")

    text = "n = Neg(x) a = Abs(x) p = Cos(n) q = Sin(n) r = Sin(a) s = Tanh(n) y = Sum(p, q, r, s)"
    state = RewriteState.start(load(unary(text)).graph, Library([_shared(OnlySines)()]))
    assert [[n.op for n in m.nodes] for m in state.candidates] == [["Neg", "Sin"]]


def test_one_name_is_one_operator() -> None:
    class Same(_OfFunctions):
        """f(x) * f(-x)."""

        def source(self, op: Op, x: Any) -> Any:
            return op.Mul(
                op.any_of(_SMOOTH, "f")(x), op.any_of(_SMOOTH, "f")(op.any_of(("Abs", "Neg"), "g")(x))
            )

        def target(self, op: Op, m: Captures, x: Val) -> Any:
            return op.Add(op.Mul(op[m.f](x), op[m.f](op[m.g](x))), 0.0)

    applies(Same(), unary("n = Neg(x) p = Sin(x) q = Sin(n) y = Mul(p, q)"))
    refuses(Same(), unary("n = Neg(x) p = Sin(x) q = Cos(n) y = Mul(p, q)"))


def _shared(rule: type[Rule]) -> type[Rule]:
    """A rule that does not mind who else reads what is inside."""
    rule.allow_multi_use = True
    return rule


def test_too_many_forms_and_none() -> None:
    class Many(Rule):
        """many -> one."""

        def source(self, op: Op, x: Any) -> Any:
            for _ in range(7):
                x = op.either(op.Neg(x), op.Mul(x, 2.0))
            return x

        def target(self, op: Op, x: Val) -> Any:
            return x

    class Nothing(Many):
        """nothing -> one."""

        def source(self, op: Op, x: Any) -> Any:
            return op.either()

    with pytest.raises(RuleError, match="Many: more than 64 forms"):
        trace_patterns(Many())
    with pytest.raises(RuleError, match="choice of nothing"):
        trace_patterns(Nothing())


def test_functions_are_given_what_they_name() -> None:
    class SelectSecond(Rule):
        """where(c, -x, -y) -> -where(c, x, y)  for y of two rows."""

        shapes = "c[...]:bool x[...]:float y[...]:float"

        def source(self, op: Op, c: Any, x: Any, y: Any) -> Any:
            return op.Where(c, op.Neg(x), op.Neg(y))

        def where(self, y: Val) -> None:
            require(y.shape[:1] == (2,), "y has no two rows")

        def target(self, op: Op, y: Val, x: Val, c: Val) -> Any:
            return op.Neg(op.Where(c, x, y))

    graph = (
        "agraph (bool[{0},4] c, float[{0},4] x, float[{0},4] y) => (float[{0},4] z) "
        "{{ a = Neg(x) b = Neg(y) z = Where(c, a, b) }}"
    )
    applies(SelectSecond(), model(graph.format(2)), ops=["Where", "Neg"])
    refuses(SelectSecond(), model(graph.format(3)), "no two rows")


def test_all_others_are_the_variables_without_a_name() -> None:
    class AddFirst(Rule):
        """sum(sum(x, y, ...), z) -> sum(z, x, y, ...)  for z of three columns."""

        arity = (2, 3)
        may_add_nonfinite = True

        def source(self, op: Op, z: Any, *xs: Any) -> Any:
            return op.Sum(op.Sum(*xs), z)

        def where(self, *others: Val) -> None:
            z, *xs = others
            require(z.shape[-1:] == (3,), "z has no three columns")
            require(len(xs) in (2, 3), "others")

        def target(self, op: Op, z: Val, *others: Val) -> Any:
            return op.Sum(z, *others)

    graph = (
        "agraph (float[N,{0}] x, float[N,{0}] y, float[N,{0}] z) => (float[N,{0}] r) "
        "{{ s = Sum(x, y) r = Sum(s, z) }}"
    )
    applies(AddFirst(), model(graph.format(3)), ops=["Sum"])
    refuses(AddFirst(), model(graph.format(4)), "no three columns")


def test_a_name_that_is_no_variable() -> None:
    class Misspelt(FuseLogistic):
        """1 / (1 + exp(-x)) -> sigmoid(x)."""

        def target(self, op: Op, X: Val) -> Any:
            return op.Sigmoid(X)

    with pytest.raises(RuleError, match="target takes X, which the source does not"):
        Library([Misspelt()])


@pytest.mark.parametrize(
    ("constant", "matches"),
    [
        ("float one = {1}", True),
        ("float[1] one = {1}", True),
        ("float[4] one = {1, 1, 1, 1}", True),
        ("float[1,4] one = {1, 1, 1, 1}", True),
        ("float[4] one = {1, 1, 1, 1.5}", False),  # not everywhere
        ("float[1,1,1] one = {1}", False),  # x would get a dimension
        ("float[3,1] one = {1, 1, 1}", False),  # x has N rows
    ],
)
def test_a_number_is_any_constant_that_is_it_everywhere(constant: str, matches: bool) -> None:
    class AddOne(Rule):
        """|x| + 1 -> 1 + |x|, as a Sum."""

        shapes = "x[...]:float"

        def source(self, op: Op, x: Any) -> Any:
            return op.Add(op.Abs(x), 1.0)

        def target(self, op: Op, x: Val) -> Any:
            return op.Sum(op.Abs(x), 1.0)

    proto = model(
        f"agraph (float[N,4] x) => (float y) <{constant}> {{ a = Abs(x) b = Add(a, one) y = ReduceMax(b) }}"
    )
    if matches:
        applies(AddOne(), proto, ops=["Abs", "Sum", "ReduceMax"])
    else:
        refuses(AddOne(), proto)


@pytest.mark.parametrize(
    ("dtype", "constant", "matches"),
    [
        ("float", "0.1666667", True),
        ("float", "0.16667", False),
        ("double", "0.16666666666666666", True),
        ("double", "0.1666667", False),
        ("float16", "12629", True),  # the bits of 1/6, rounded
        ("float16", "12630", False),
    ],
)
def test_a_number_is_meant_as_its_type_rounds_it(dtype: str, constant: str, matches: bool) -> None:
    class MulSixth(Rule):
        """|x| / 6 -> sum(|x| / 6)."""

        shapes = "x[...]:float"

        def source(self, op: Op, x: Any) -> Any:
            return op.Mul(op.Abs(x), 1 / 6)

        def target(self, op: Op, x: Val) -> Any:
            return op.Sum(op.Mul(op.Abs(x), 1 / 6))

    proto = model(
        f"agraph ({dtype}[N,4] x) => ({dtype}[N,4] y) <{dtype} c = {{{constant}}}> {{ a = Abs(x) y = Mul(a, c) }}"
    )
    state = RewriteState.start(load(proto).graph, Library([MulSixth()]))
    assert bool(state.candidates) == matches


def test_infinity_is_a_number_of_a_source() -> None:
    class DropBound(Rule):
        """min(|x|, inf) -> |x|."""

        shapes = "x[...]:float"

        def source(self, op: Op, x: Any) -> Any:
            return op.Min(op.Abs(x), float("inf"))

        def target(self, op: Op, x: Val) -> Any:
            return op.Abs(x)

    for number, matches in ((np.inf, True), (1e30, False), (-np.inf, False)):
        proto = model(
            "agraph (float[N,4] x) => (float[N,4] y) { a = Abs(x) y = Min(a, c) }", c=np.float32(number)
        )
        assert bool(RewriteState.start(load(proto).graph, Library([DropBound()])).candidates) == matches
