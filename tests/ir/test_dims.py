"""Formulas of dimensions: normal form, text, and decisions, each against brute force on small sizes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrlflow.ir import dims
from xrlflow.ir.dims import Formula, ceil_div, evaluate, floor_div, maximum, minimum, modulo, number, symbol

S, T = symbol("S"), symbol("T")


def test_what_agrees_on_most_sizes_is_not_equal() -> None:
    """ceil(S/6) and floor(S/6)+1 differ at multiples of 6 alone."""
    assert not dims.same(ceil_div(S, 6), floor_div(S, 6) + 1)
    assert not dims.same(minimum(S, 480_000), S)
    assert not dims.same(minimum(S, 1_000_000_000), S)
    assert not dims.same(floor_div(S, 1_000_003), number(0))


def test_a_bound_of_the_largest_size_bounds_nothing() -> None:
    assert minimum(S, dims.LARGEST) == S
    assert minimum(S, 2**63 - 1) == S


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (ceil_div(S, 6), floor_div(S + 5, 6)),
        (ceil_div(ceil_div(S, 2), 3), ceil_div(S, 6)),
        (floor_div(floor_div(S + 1, 2) + 1, 2), ceil_div(S, 4)),
        (S - floor_div(S, 2), ceil_div(S, 2)),
        (modulo(S, 2) + 2 * floor_div(S, 2), S),
        (minimum(S, 3) + maximum(S, 3), S + 3),
        (maximum(S - 1, 0) + minimum(S, 1), S),
        (floor_div(S * T * 4, T * 2), 2 * S),
        (floor_div(S * T, 2) * 2 + modulo(S * T, 2), S * T),
        (maximum(minimum(S, 7), 0), minimum(7, S)),
        (floor_div(S * (T + 1), T + 1), S),
        ((S + 1) * (T - 1), S * T - S + T - 1),
    ],
)
def test_equal_forms_are_equal(a: Formula, b: Formula) -> None:
    assert dims.same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (floor_div(S * T, T + 1), S),
        (floor_div(S, 2) * T, floor_div(S * T, 2)),  # differ where S is odd
        (maximum(S - 1, 0), S - 1),  # at 0
        (floor_div(S * S, 2), floor_div(S, 2) * S),
        (minimum(S, T), S),
    ],
)
def test_unequal_forms_are_not_equal(a: Formula, b: Formula) -> None:
    assert not dims.same(a, b)


def test_order_and_multiples() -> None:
    assert dims.not_less(S, ceil_div(S, 2))
    assert not dims.not_less(floor_div(S, 2), ceil_div(S, 2))
    assert dims.not_less(ceil_div(S, 2) * 2, S)
    assert dims.is_multiple(S * 12, 4)
    assert dims.is_multiple(floor_div(S, 4) * 8, 8)
    assert not dims.is_multiple(S, 2)
    assert dims.is_multiple(S * (S + 1) * 6, 3)
    assert dims.at_least("=S + 1", 1)
    assert not dims.at_least("S", 1)
    assert dims.divides(3, "=3*S")
    assert dims.entails(S, minimum(S, 512), 1)
    assert not dims.entails(minimum(S, 1), S, 1)


def test_what_is_not_known_is_not_decided() -> None:
    assert not dims.equal(None, None)
    assert not dims.at_least(None, 0)
    rounded = dims.call("floor.float", S)
    assert dims.same(rounded + 1, dims.call("floor.float", S) + 1)
    assert not dims.same(rounded, S)
    assert not dims.not_less(rounded, dims.ZERO)


def test_texts_of_types() -> None:
    assert dims.dim(S) == "S"
    assert dims.dim(symbol("input.0")) == "input.0"
    assert dims.dim(number(7)) == 7
    text = dims.dim(ceil_div(symbol("audio samples"), 160) + 1)
    assert text == "=((sym('audio samples') + 159)//160) + 1"
    assert dims.readable(text) == "ceil(audio samples/160) + 1"
    assert dims.value(text, {"audio samples": 161}) == 3
    # A symbol that looks like a formula is a symbol: nobody checks what a file says of it.
    assert not dims.equal("S + 1", dims.dim(S + 1))


def test_division_by_zero_has_no_value() -> None:
    assert evaluate(floor_div(S, T), {"S": 3, "T": 0}) is None
    with pytest.raises(ZeroDivisionError):
        floor_div(S, 0)


def formulas(depth: int = 3) -> st.SearchStrategy[Formula]:
    leaf = st.one_of(st.integers(-4, 9).map(number), st.sampled_from([S, T]))
    if not depth:
        return leaf
    inner = formulas(depth - 1)
    divisors = st.integers(1, 7)
    return st.one_of(
        leaf,
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a * b, inner, st.one_of(st.integers(-3, 3).map(number), inner)),
        st.builds(floor_div, inner, divisors),
        st.builds(ceil_div, inner, divisors),
        st.builds(modulo, inner, divisors),
        st.builds(minimum, inner, inner),
        st.builds(maximum, inner, inner),
    )


SIZES = tuple(product((0, 1, 2, 3, 5, 6, 12, 13), repeat=2))


@settings(max_examples=150, deadline=None)
@given(formulas())
def test_text_is_read_back(formula: Formula) -> None:
    assert dims._parsed(dims.ast.parse(formula.text, mode="eval").body) == formula


@settings(max_examples=150, deadline=None)
@given(formulas(2), formulas(2), st.integers(1, 7))
def test_arithmetic_is_that_of_integers(a: Formula, b: Formula, by: int) -> None:
    """Whatever the normal form does, the value is the one of the operation."""
    results = {
        "add": (a + b, lambda x, y: x + y),
        "mul": (a * b, lambda x, y: x * y),
        "floor": (floor_div(a, by), lambda x, y: x // by),
        "ceil": (ceil_div(a, by), lambda x, y: -(-x // by)),
        "mod": (modulo(a, by), lambda x, y: x % by),
        "min": (minimum(a, b), min),
        "max": (maximum(a, b), max),
        "div": (floor_div(a, b) if b.terms else a, lambda x, y: (x // y if y else None) if b.terms else x),
    }
    for s, t in SIZES:
        at = {"S": s, "T": t}
        x, y = evaluate(a, at), evaluate(b, at)
        assert x is not None
        assert y is not None
        for name, (formula, function) in results.items():
            expected = function(x, y)
            found = evaluate(formula, at)
            assert found == expected or (name == "div" and expected is None), (name, at)
        low, high = dims.bounds(a)
        assert low <= x <= high


@settings(max_examples=100, deadline=None)
@given(formulas(2), formulas(2), st.integers(2, 6))
def test_decisions_hold_on_small_sizes(a: Formula, b: Formula, of: int) -> None:
    same, not_less, multiple = dims.same(a, b), dims.not_less(a, b), dims.is_multiple(a, of)
    entailed = dims.entails(a, b, 1)
    for s, t in SIZES:
        x, y = evaluate(a, {"S": s, "T": t}), evaluate(b, {"S": s, "T": t})
        assert x is not None
        assert y is not None
        assert x == y or not same
        assert x >= y or not not_less
        assert x % of == 0 or not multiple
        assert x != 1 or y == 1 or not entailed


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 12), st.integers(0, 12))
def test_linear_formulas_are_decided_exactly(a: int, b: int, c: int, d: int) -> None:
    """floor((S+b)/a) against floor((S+d)/c): equal if and only if they are on a whole period."""
    one, other = floor_div(S + b, a), floor_div(S + d, c)
    assert dims.same(one, other) == all((s + b) // a == (s + d) // c for s in range(2 * a * c + 1))


@pytest.mark.parametrize(
    "name", ["in", "None", "True", "lambda", "min", "inf", "nan", "1", "a, b", "'", "é", "=N"]
)
def test_any_name_is_a_symbol(name: str) -> None:
    """Words of Python too: "True + 1" would be 2."""
    text = dims.dim(symbol(name) + 1)
    assert dims.formula(text) == symbol(name) + 1
    assert dims.value(text, {name: 6}) == 7


def test_numbers_of_calls_keep_their_sign_and_kind() -> None:
    below, above = (dims.call("div.float", dims.make_call("to.float", S), n) for n in (-0.0, 0.0))
    assert not dims.same(below, above)
    for number_ in (float("nan"), float("inf"), float("-inf"), -0.0, 1e300):
        rounded = dims.call("min.float", S, number_)
        assert dims.symbols(rounded) == {"S"}
        assert dims.formula(dims.dim(rounded)) == rounded


def grown(step: int, formula: Formula) -> Formula:
    """What one more node may make of a formula: twice as large, one level deeper, or with larger numbers."""
    return (
        lambda: formula * formula,
        lambda: formula * 10**15,
        lambda: formula * (formula + T),
        lambda: minimum(floor_div(formula, 2), floor_div(formula + T, 3)),
        lambda: floor_div(maximum(formula, 2), T) + S,
        lambda: dims.call("sqrt.float", formula) + dims.call("floor.float", formula),
        lambda: formula + dims.symbol(f"s{len(formula.terms)}"),
        lambda: floor_div(formula * T, formula + S),
    )[step]()


@pytest.mark.parametrize("step", range(8))
def test_formulas_do_not_grow_without_end(step: int) -> None:
    """The one before the first that is refused is still read back, decided and bounded."""
    last = formula = S + T + 1

    def grow() -> None:
        nonlocal last, formula
        while True:
            last, formula = formula, grown(step, formula)

    with pytest.raises(dims.FormulaTooLarge):
        grow()
    assert last.count <= dims.MOST_ATOMS
    assert last.levels <= dims.MOST_LEVELS
    text = dims.dim(last)
    assert dims.formula(text) == last
    assert dims.same(last, last)
    assert not dims.same(last, last + 1)
    dims.not_less(last, S)
    dims.is_multiple(last, 7)
    low, high = dims.bounds(last * dims.call("unknown") if step < 2 else last)
    assert low <= high
    evaluate(last, {"S": dims.LARGEST, "T": dims.LARGEST})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_dimension_is_filled_if_it_is_1_or_more_where_symbols_are(data: st.DataObject) -> None:
    """Never wrongly so; and for what is linear always where it is."""
    part = st.sampled_from([S, T, S * T, floor_div(S, 2), ceil_div(T, 3), minimum(S, 4), maximum(T - 2, 0)])
    formula = number(data.draw(st.integers(-3, 3)))
    for _ in range(data.draw(st.integers(1, 3))):
        formula = formula + data.draw(part) * data.draw(st.sampled_from([-1, 1, 2]))
    sizes = [{"S": s, "T": t} for s, t in product((*range(1, 9), 1000), repeat=2)]
    if dims.filled(dims.dim(formula)):
        assert all((value := evaluate(formula, at)) is not None and value >= 1 for at in sizes), formula


@pytest.mark.parametrize(
    "formula", [S, S * T, ceil_div(S, 2), S + T, minimum(S, 512), maximum(S - 3, 1), S * T + 3]
)
def test_filled(formula: Formula) -> None:
    assert dims.filled(dims.dim(formula))


@pytest.mark.parametrize("formula", [number(0), floor_div(S, 2), maximum(S - 3, 0), S * T - 1, S - T])
def test_not_filled(formula: Formula) -> None:
    assert not dims.filled(dims.dim(formula))
    assert not dims.filled(None)
