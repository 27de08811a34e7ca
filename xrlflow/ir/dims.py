"""Dimensions as formulas: exact arithmetic in a normal form, and comparisons that hold for all sizes.

A formula is a polynomial with integer coefficients over atoms: symbols (the inputs' dimensions), floor divisions,
minima, and calls (functions of dimensions with unknown properties, like rounding in floating point). In a `TensorType`
a formula is text: a symbol's own name ("batch"), or its normal form after a "=" ("=(samples + 159)//160"). Dimensions
with equal texts are equal; `equal` and `at_least` compare those with different texts.

Every symbol stands for any size from 0 to LARGEST. A comparison is true only if it holds for all sizes at which both
sides have a value (a division by 0 has none, because the operator that divides fails). Linear formulas with divisions
and minima by numbers are decided exactly (Presburger arithmetic, by isl; S. Verdoolaege, 2010); products of symbols are
treated as further symbols. A comparison that cannot be decided counts as false.

MOST_ATOMS and MOST_LEVELS limit the length of formulas, and the work of each decision is limited, too. Otherwise each
node of a model could double both.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Dim = int | str | None
"""A dimension of a type: a number, a symbol, a formula of symbols, or None if it is unknown."""

LARGEST = 2**31 - 1
"""The largest size of one dimension. An end of at least this means "to the end" in ONNX."""

MOST_ATOMS = 400
"""The most atoms and terms of a formula, including those inside atoms."""

MOST_LEVELS = 24
"""The deepest nesting of atoms."""

_MOST_BITS = 256
"""The most bits of a coefficient."""


class FormulaTooLarge(ArithmeticError):
    """A formula exceeds the limits of its length or nesting."""


_MARK = "="
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = frozenset({"min", "sym", "call"})


@dataclass(frozen=True)
class Symbol:
    """The size of an input's dimension, or a size that depends on data."""

    name: str
    count = 1
    levels = 1

    @cached_property
    def text(self) -> str:
        plain = _PLAIN.match(self.name) and self.name not in _RESERVED and not keyword.iskeyword(self.name)
        return self.name if plain else f"sym({self.name!r})"


@dataclass(frozen=True)
class Floor:
    """The largest integer that is at most `over` / `by`."""

    over: Formula
    by: Formula

    @cached_property
    def text(self) -> str:
        return f"{_wrapped(self.over)}//{_wrapped(self.by)}"

    @cached_property
    def count(self) -> int:
        return 1 + self.over.count + self.by.count

    @cached_property
    def levels(self) -> int:
        return 1 + max(self.over.levels, self.by.levels)


@dataclass(frozen=True)
class Minimum:
    """The minimum of several formulas."""

    parts: tuple[Formula, ...]

    @cached_property
    def text(self) -> str:
        return f"min({', '.join(p.text for p in self.parts)})"

    @cached_property
    def count(self) -> int:
        return 1 + sum(p.count for p in self.parts)

    @cached_property
    def levels(self) -> int:
        return 1 + max(p.levels for p in self.parts)


@dataclass(frozen=True, eq=False)
class Call:
    """A function of formulas and other calls, of which only the name is known: equal names and arguments give equal
    numbers.

    Calls with the same text are equal: 0.0 and -0.0 differ, NaN and NaN do not.
    """

    name: str
    arguments: tuple[Formula | Call | float, ...]

    @cached_property
    def text(self) -> str:
        arguments = ", ".join(_real(a) if isinstance(a, float) else a.text for a in self.arguments)
        return f"call({self.name!r}, {arguments})"

    @cached_property
    def count(self) -> int:
        return 1 + sum(1 if isinstance(a, float) else a.count for a in self.arguments)

    @cached_property
    def levels(self) -> int:
        return 1 + max((a.levels for a in self.arguments if not isinstance(a, float)), default=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _real(value: float) -> str:
    """A floating-point number as text that can be read back. Infinities and NaN, which are no literals in Python,
    become strings.
    """
    return repr(value) if math.isfinite(value) else repr(str(value))


Atom = Symbol | Floor | Minimum | Call
Monomial = tuple[Atom, ...]
"""A product of atoms, in the order of their texts; empty: 1."""


@dataclass(frozen=True)
class Formula:
    """The sum of `terms`: products of atoms with nonzero integer coefficients, in the order of their texts.

    Arithmetic raises FormulaTooLarge if a result exceeds MOST_ATOMS or MOST_LEVELS.
    """

    terms: tuple[tuple[Monomial, int], ...]

    @cached_property
    def text(self) -> str:
        out = ""
        for monomial, factor in sorted(self.terms, key=lambda t: not t[0]):
            parts = [a.text if isinstance(a, Symbol | Minimum | Call) else f"({a.text})" for a in monomial]
            if abs(factor) != 1 or not parts:
                parts.insert(0, str(abs(factor)))
            sign = ("-" if factor < 0 else "") if not out else (" - " if factor < 0 else " + ")
            out += sign + "*".join(parts)
        return out or "0"

    @cached_property
    def count(self) -> int:
        """The number of terms and atoms, including those inside atoms."""
        return sum(1 + sum(atom.count for atom in monomial) for monomial, _ in self.terms)

    @cached_property
    def levels(self) -> int:
        """The deepest nesting of atoms."""
        return max((atom.levels for monomial, _ in self.terms for atom in monomial), default=0)

    @cached_property
    def number(self) -> int | None:
        """The number that the formula equals, or None if it has symbols."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @cached_property
    def constant(self) -> int:
        """The formula's constant term."""
        return next((factor for monomial, factor in self.terms if not monomial), 0)

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Formula | int) -> Formula:
        return _sum((*self.terms, *_formula(other).terms))

    def __sub__(self, other: Formula | int) -> Formula:
        return self + _formula(other) * -1

    def __mul__(self, other: Formula | int) -> Formula:
        if len(self.terms) * len(_formula(other).terms) > MOST_ATOMS:
            raise FormulaTooLarge
        return _sum((_product(a, b), m * n) for a, m in self.terms for b, n in _formula(other).terms)

    def __neg__(self) -> Formula:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: int) -> Formula:
        return _formula(other) - self

    def __repr__(self) -> str:
        return self.text


def number(value: int) -> Formula:
    """A number as a formula."""
    return Formula((((), value),) if value else ())


def symbol(name: str) -> Formula:
    """A symbol as a formula."""
    return _atom(Symbol(name))


def call(name: str, *arguments: Formula | Call | float) -> Formula:
    """A formula for an integer that is known only as a function, by name, of its arguments."""
    return _atom(make_call(name, *arguments))


def make_call(name: str, *arguments: Formula | Call | float) -> Call:
    """A number, perhaps not an integer, that is known only as a function, by name, of its arguments. Raises
    FormulaTooLarge.
    """
    result = Call(name, tuple(_bare(a) if isinstance(a, Formula) else a for a in arguments))
    _within_limits(result)
    return result


def _bare(formula: Formula) -> Formula | Call:
    """The call, if the formula consists of just one call; else the formula. So equal arguments have one text."""
    if len(formula.terms) == 1 and formula.terms[0][1] == 1 and len(formula.terms[0][0]) == 1:
        only = formula.terms[0][0][0]
        return only if isinstance(only, Call) else formula
    return formula


ZERO, ONE = number(0), number(1)


def _atom(atom: Atom) -> Formula:
    _within_limits(atom)
    return Formula((((atom,), 1),))


def _within_limits(part: Formula | Atom) -> None:
    if part.levels > MOST_LEVELS or part.count > MOST_ATOMS:
        raise FormulaTooLarge


def _formula(value: Formula | int) -> Formula:
    return value if isinstance(value, Formula) else number(value)


def _wrapped(formula: Formula) -> str:
    simple = len(formula.terms) <= 1 and (formula.number or 0) >= 0
    simple = simple and (formula.number is not None or formula.text == formula.terms[0][0][0].text)
    if simple and formula.number is None:
        simple = not isinstance(formula.terms[0][0][0], Floor)
    return formula.text if simple else f"({formula.text})"


def _product(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=lambda atom: atom.text)) if a and b else a or b


def _sum(terms: Iterable[tuple[Monomial, int]]) -> Formula:
    total: dict[Monomial, int] = {}
    for monomial, factor in terms:
        total[monomial] = total.get(monomial, 0) + factor
    nonzero = [(m, f) for m, f in total.items() if f]
    if any(f.bit_length() > _MOST_BITS for _, f in nonzero):
        raise FormulaTooLarge
    if len(nonzero) > 1:
        nonzero.sort(key=lambda term: [atom.text for atom in term[0]])
    result = Formula(tuple(nonzero))
    _within_limits(result)
    return result


# Division, minima


def floor_div(over: Formula | int, by: Formula | int) -> Formula:
    """The largest integer that is at most `over` / `by`. It has no value where `by` is 0.

    Raises ZeroDivisionError if `by` is the number 0.
    """
    over, by = _formula(over), _formula(by)
    divisor = by.number
    if divisor == 0:
        raise ZeroDivisionError(f"{over} is divided by 0")
    if divisor is not None:
        return _divided(over, divisor) if divisor > 0 else _divided(-over, -divisor)
    over, by = _cancelled(over, by)
    if by.number is not None:
        return floor_div(over, by)
    if not over.terms:
        return ZERO
    quotient = _ratio(over, by)
    return quotient if quotient is not None else _atom(Floor(over, by))


def ceil_div(over: Formula | int, by: Formula | int) -> Formula:
    """The least integer that is at least `over` / `by`. Raises ZeroDivisionError if `by` is the number 0."""
    return -floor_div(-_formula(over), by)


def modulo(over: Formula | int, by: Formula | int) -> Formula:
    """The remainder of `floor_div`. It has the sign of `by`. Raises ZeroDivisionError if `by` is the number 0."""
    return _formula(over) - floor_div(over, by) * by


def _divided(over: Formula, by: int) -> Formula:
    """Floor division of a formula by a positive number."""
    # floor((q d + r) / d) = q + floor(r / d), for each coefficient. Of the remainders r of symbols the least in
    # magnitude are chosen.
    quotients: list[tuple[Monomial, int]] = []
    remainders: list[tuple[Monomial, int]] = []
    for monomial, factor in over.terms:
        remainder = factor % by
        if monomial and 2 * remainder > by:
            remainder -= by
        quotients.append((monomial, (factor - remainder) // by))
        remainders.append((monomial, remainder))
    outside, inside = _sum(quotients), _sum(remainders)
    if inside.number is not None:
        return outside + inside.number // by
    first = next(factor for monomial, factor in inside.terms if monomial)
    if first < 0:  # floor(-p / d) = -floor((p + d - 1) / d)
        return outside - _divided(by - 1 - inside, by)
    # With a common factor g: floor((g p + c) / (g d)) = floor((p + floor(c / g)) / d).
    common = math.gcd(by, *(factor for monomial, factor in inside.terms if monomial))
    if common > 1:
        inside = _sum((m, f // common) for m, f in inside.terms)
        return outside + _divided(inside, by // common)
    # floor((floor(p / a) + q) / d) = floor((p + a q) / (a d)).
    for monomial, factor in inside.terms:
        if factor == 1 and len(monomial) == 1 and isinstance(atom := monomial[0], Floor):
            inner = atom.by.number
            if inner is not None and inner > 0:
                return outside + _divided(atom.over + (inside - _atom(atom)) * inner, inner * by)
    return outside + _atom(Floor(inside, number(by)))


def _cancelled(over: Formula, by: Formula) -> tuple[Formula, Formula]:
    """Both formulas, divided by the number and the atoms that all their terms share. (The shared atoms are not 0 where
    the divisor is not.)
    """
    terms = (*over.terms, *by.terms)
    if not over.terms:
        return over, by
    factor = math.gcd(*(f for _, f in terms))
    common = list(terms[0][0])
    for monomial, _ in terms[1:]:
        unmatched = list(monomial)
        shared = []
        for atom in common:
            if atom in unmatched:
                unmatched.remove(atom)
                shared.append(atom)
        common = shared
    if factor == 1 and not common:
        return over, by

    def without(formula: Formula) -> Formula:
        out = []
        for monomial, f in formula.terms:
            atoms = list(monomial)
            for atom in common:
                atoms.remove(atom)
            out.append((tuple(atoms), f // factor))
        return _sum(out)

    return without(over), without(by)


def _ratio(over: Formula, by: Formula) -> Formula | None:
    """The formula whose product with `by` is `over`, if it exists, by polynomial division; else None."""
    order = sorted({atom.text for monomial, _ in (*over.terms, *by.terms) for atom in monomial})

    def degrees(term: tuple[Monomial, int]) -> tuple[int, ...]:
        texts = [atom.text for atom in term[0]]
        return (len(texts), *(texts.count(text) for text in order))

    lead, factor = max(by.terms, key=degrees)
    ratio, remainder = ZERO, over
    while remainder.terms:
        monomial, lead_factor = max(remainder.terms, key=degrees)
        atoms_ = list(monomial)
        if lead_factor % factor or any(lead.count(atom) > monomial.count(atom) for atom in lead):
            return None
        for atom in lead:
            atoms_.remove(atom)
        part = Formula(((tuple(atoms_), lead_factor // factor),))
        ratio, remainder = ratio + part, remainder - part * by
    return ratio


def minimum(*parts: Formula | int) -> Formula:
    """The minimum of several formulas."""
    return _minimum_of(tuple(dict.fromkeys(_formula(p) for p in parts)))


def maximum(*parts: Formula | int) -> Formula:
    """The maximum of several formulas."""
    return -minimum(*(-_formula(p) for p in parts))


@lru_cache(maxsize=65536)
def _minimum_of(parts: tuple[Formula, ...]) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        inner = _only_minimum(part)
        flat.update(dict.fromkeys((part,) if inner is None else inner.parts))
    minimal: list[Formula] = []
    for part in sorted(flat, key=lambda p: p.text):
        if not any(not_less(part, other) for other in minimal):
            minimal = [other for other in minimal if not not_less(other, part)] + [part]
    if len(minimal) == 1:
        return minimal[0]
    # min(a + c, b + c) = min(a, b) + c
    shift = min(p.constant for p in minimal)
    shifted = tuple(sorted((p - shift for p in minimal), key=lambda p: p.text))
    if any(_only_minimum(p) for p in shifted):
        return _minimum_of(shifted) + shift
    return _atom(Minimum(shifted)) + shift


def _only_minimum(formula: Formula) -> Minimum | None:
    """The minimum, if the formula consists of just one minimum; else None."""
    if len(formula.terms) == 1 and formula.terms[0][1] == 1 and len(formula.terms[0][0]) == 1:
        only = formula.terms[0][0][0]
        return only if isinstance(only, Minimum) else None
    return None


# Bounds and values

Bound = int | float
"""An exact integer, or an infinity."""

_INFINITE = math.inf
_FAR = 2**256


def bounds(formula: Formula) -> tuple[Bound, Bound]:
    """A lower and an upper bound of the formula over all sizes; infinite if unknown."""
    low: Bound = 0
    high: Bound = 0
    for monomial, factor in formula.terms:
        least_: Bound = 1
        greatest_: Bound = 1
        for atom in monomial:
            corners = [_times(a, b) for a in (least_, greatest_) for b in _atom_bounds(atom)]
            least_, greatest_ = _near(min(corners), max(corners))
        ends = (_times(least_, factor), _times(greatest_, factor))
        low, high = low + min(ends), high + max(ends)
    return _near(low, high)


def _near(low: Bound, high: Bound) -> tuple[Bound, Bound]:
    """The bounds, made looser if necessary so that a float can hold them."""
    return (
        -_INFINITE if low < -_FAR else min(low, _FAR),
        _INFINITE if high > _FAR else max(high, -_FAR),
    )


def _times(a: Bound, b: Bound) -> Bound:
    return 0 if a == 0 or b == 0 else a * b


@lru_cache(maxsize=65536)
def _atom_bounds(atom: Atom) -> tuple[Bound, Bound]:
    if isinstance(atom, Symbol):
        return 0, LARGEST
    if isinstance(atom, Minimum):
        ends = [bounds(p) for p in atom.parts]
        return min(low for low, _ in ends), min(high for _, high in ends)
    if isinstance(atom, Floor):
        low, high = bounds(atom.over)
        by = atom.by.number
        if by is not None:
            return _floored(low, by), _floored(high, by)
        if low >= 0 and bounds(atom.by)[0] >= 0:
            return 0, high
    return -_INFINITE, _INFINITE


def _floored(value: Bound, by: int) -> Bound:
    return value // by if isinstance(value, int) else value


Evaluate = Callable[[str, Sequence["float"]], "float | None"]
"""The value of a call for these numbers, or None if it is unknown."""


def evaluate(formula: Formula, numbers: Mapping[str, int], calls: Evaluate | None = None) -> int | None:
    """The value of a formula, given numbers for its symbols. None if it has no value, or a number is missing."""
    total = 0
    for monomial, factor in formula.terms:
        term = factor
        for atom in monomial:
            value = _atom_value(atom, numbers, calls)
            if value is None or (isinstance(value, float) and not value.is_integer()):
                return None
            term *= int(value)
        total += term
    return total


def _atom_value(atom: Atom, numbers: Mapping[str, int], calls: Evaluate | None) -> float | None:
    if isinstance(atom, Symbol):
        return numbers.get(atom.name)
    if isinstance(atom, Floor):
        over, by = evaluate(atom.over, numbers, calls), evaluate(atom.by, numbers, calls)
        return None if over is None or not by else over // by
    if isinstance(atom, Minimum):
        parts = [evaluate(p, numbers, calls) for p in atom.parts]
        return None if None in parts else min(p for p in parts if p is not None)
    arguments: list[float] = []
    for argument in atom.arguments:
        value: float | None
        if isinstance(argument, Formula):
            value = evaluate(argument, numbers, calls)
        elif isinstance(argument, Call):
            value = _atom_value(argument, numbers, calls)
        else:
            value = argument
        if value is None:
            return None
        arguments.append(value)
    return None if calls is None else calls(atom.name, arguments)


def symbols(formula: Formula) -> frozenset[str]:
    """The names of the symbols in a formula."""
    return frozenset(a.name for a in atoms(formula) if isinstance(a, Symbol))


def atoms(formula: Formula) -> Iterator[Atom]:
    """All atoms of a formula, including those inside other atoms."""
    for monomial, _ in formula.terms:
        for atom in monomial:
            yield from _with_inner(atom)


def _with_inner(atom: Atom) -> Iterator[Atom]:
    yield atom
    inner: Iterable[Formula | Call | float] = ()
    if isinstance(atom, Floor):
        inner = (atom.over, atom.by)
    elif isinstance(atom, Minimum):
        inner = atom.parts
    elif isinstance(atom, Call):
        inner = atom.arguments
    for part in inner:
        if isinstance(part, Formula):
            yield from atoms(part)
        elif isinstance(part, Call):
            yield from _with_inner(part)


# Decisions


def same(a: Formula, b: Formula) -> bool:
    """Whether two formulas are equal at all sizes at which both have a value."""
    try:
        return a == b or _never((a - b,), "{0} != 0", lambda n: n[0] != 0)
    except FormulaTooLarge:
        return False


def not_less(a: Formula, b: Formula) -> bool:
    """Whether `a` is at least `b`, at all sizes at which both have a value."""
    try:
        difference = a - b
    except FormulaTooLarge:
        return False
    low, high = bounds(difference)
    if low >= 0 or high < 0:
        return low >= 0
    return _never((difference,), "{0} < 0", lambda n: n[0] < 0)


def entails(a: Formula, b: Formula, value: int) -> bool:
    """Whether `b` has the value at all sizes at which `a` has it."""
    if a == b:
        return True
    return _never((a, b), f"{{0}} = {value} and {{1}} != {value}", lambda n: n[0] == value != n[1])


def is_multiple(a: Formula, of: int) -> bool:
    """Whether a formula is a multiple of a number, at all sizes at which the formula has a value."""
    if of == 0:
        return same(a, ZERO)
    try:
        remainder = modulo(a, abs(of))
    except FormulaTooLarge:
        return False
    return not remainder.terms or same(remainder, ZERO)


def fingerprint(of: Formula) -> tuple[int | None, ...]:
    """The values of a formula at a few sizes. They are the same for equal formulas, and differ for most unequal
    ones.
    """
    return tuple(evaluate(of, _SampleSizes(at), _sample_call(at)) for at in range(4))


class _SampleSizes(Mapping[str, int]):
    """A size for each symbol, derived from its name."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __getitem__(self, name: str) -> int:
        return 1 + zlib.crc32(f"{self.at} {name}".encode()) % (50, 5000, 500000, 5)[self.at]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _sample_call(at: int) -> Evaluate:
    return lambda name, arguments: 1 + zlib.crc32(f"{at} {name} {arguments}".encode()) % 997


# Sizes at which most wrong comparisons fail, which is quick to compute. They never prove a comparison.
_POINTS = tuple(
    (a, b) for a in (0, 1, 2, 3, 5, 12, 48, 481, 7919, LARGEST) for b in (0, 1, 11)
)  # fmt: skip


def _never(parts: tuple[Formula, ...], condition: str, holds: Callable[[Sequence[int]], bool]) -> bool:
    """Whether no sizes fulfil a condition on formulas. The condition is given in isl's notation, and as a function of
    the formulas' numbers.
    """
    if not any(isinstance(a, Call) for part in parts for a in atoms(part)):
        names = sorted(frozenset().union(*map(symbols, parts)))
        for base, step in _POINTS:
            at = {name: min(base + step * k, LARGEST) for k, name in enumerate(names)}
            numbers = [evaluate(part, at) for part in parts]
            if None not in numbers and holds([n for n in numbers if n is not None]):
                return False
    return _is_empty(parts, condition)


_MOST_VARIABLES = 24

_OPERATIONS = 10_000
"""The operations of isl for a decision: a few milliseconds. Usual shapes need fewer."""

_MORE_OPERATIONS = 100_000
"""The operations of isl for a hard decision: up to half a second."""

_HARD_DECISIONS = 60
"""The number of hard decisions that are tried for each model."""

_hard_decisions_left = _HARD_DECISIONS


def start_deciding() -> None:
    """Reset the number of hard decisions. Called at the start of each model, so that reading a model takes limited
    time.
    """
    global _hard_decisions_left
    _hard_decisions_left = _HARD_DECISIONS


def _is_empty(parts: tuple[Formula, ...], condition: str) -> bool:
    """Whether no sizes fulfil the condition, decided by isl; False if it cannot be decided within the limits."""
    empty = _decided(parts, condition, _OPERATIONS)
    if empty is None and _hard_decisions_left:
        empty = _decided_at_length(parts, condition)
    return bool(empty)


@lru_cache(maxsize=65536)
def _decided_at_length(parts: tuple[Formula, ...], condition: str) -> bool | None:
    global _hard_decisions_left
    _hard_decisions_left -= 1
    return _decided(parts, condition, _MORE_OPERATIONS)


@lru_cache(maxsize=65536)
def _decided(parts: tuple[Formula, ...], condition: str, operations: int) -> bool | None:
    """Whether no sizes fulfil the condition; None if isl would need more operations."""
    problem = _Problem()
    try:
        terms = [problem.linear(part) for part in parts]
    except _TooLarge:
        return False
    text = problem.text(condition.format(*terms))
    import islpy

    context = islpy.Context()
    context.set_max_operations(operations)
    context.set_on_error(islpy.on_error.CONTINUE)
    try:
        return bool(islpy.Set.read_from_str(context, text).is_empty())
    except islpy.Error:  # isl has reached the limit of operations
        return None


class _TooLarge(Exception):
    """A formula has too many atoms for a decision."""


class _Problem:
    """A set of integers in isl's notation: one variable for each atom and product, with the constraints known for
    it.
    """

    def __init__(self) -> None:
        self.names: dict[Monomial, str] = {}
        self.facts: list[str] = []

    def linear(self, formula: Formula) -> str:
        """The formula as text in isl's notation, linear in these variables."""
        terms = [f"{factor}*{self._variable(m)}" if m else str(factor) for m, factor in formula.terms]
        return "(" + (" + ".join(terms) or "0") + ")"

    def text(self, condition: str) -> str:
        return f"{{ [{', '.join(self.names.values())}] : {' and '.join((*self.facts, condition))} }}"

    def _variable(self, monomial: Monomial) -> str:
        existing = self.names.get(monomial)
        if existing is not None:
            return existing
        if len(self.names) >= _MOST_VARIABLES:
            raise _TooLarge
        name = self.names[monomial] = f"v{len(self.names)}"
        if len(monomial) == 1:
            self._define(name, monomial[0])
        low, high = bounds(Formula(((monomial, 1),)))
        self.facts += [f"{name} >= {low}"] if isinstance(low, int) else []
        self.facts += [f"{name} <= {high}"] if isinstance(high, int) else []
        return name

    def _define(self, name: str, atom: Atom) -> None:
        if isinstance(atom, Floor) and (by := atom.by.number) is not None:
            over = self.linear(atom.over)
            self.facts.append(f"0 <= {over} - {by}*{name} < {by}")
        elif isinstance(atom, Minimum):
            parts = [self.linear(p) for p in atom.parts]
            self.facts += [f"{name} <= {p}" for p in parts]
            self.facts.append("(" + " or ".join(f"{name} = {p}" for p in parts) + ")")


# Dimensions of types


@lru_cache(maxsize=65536)
def formula(dim: int | str) -> Formula:
    """The formula that a dimension stands for."""
    if isinstance(dim, int):
        return number(dim)
    if not dim.startswith(_MARK):
        return symbol(dim)
    try:
        return _parsed(ast.parse(dim[len(_MARK) :], mode="eval").body)
    except FormulaTooLarge:  # a text within the limits whose formula exceeds them stays a symbol
        return symbol(dim)


def dim(of: Formula) -> int | str:
    """A formula as a dimension: a number, a symbol's name, or text."""
    value = of.number
    if value is not None:
        return value
    if len(of.terms) == 1 and of.terms[0][1] == 1 and len(of.terms[0][0]) == 1:
        only = of.terms[0][0][0]
        if isinstance(only, Symbol):
            return only.name
    return _MARK + of.text


def is_computed(dim: Dim) -> bool:
    """Whether a dimension is a formula, not a number or a symbol."""
    return isinstance(dim, str) and dim.startswith(_MARK)


def equal(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are equal at all sizes; False if one of them is unknown."""
    if a is None or b is None:
        return False
    return a == b or same(formula(a), formula(b))


def at_least(a: Dim, b: Dim) -> bool:
    """Whether dimension `a` is at least dimension `b` at all sizes; False if one of them is unknown."""
    return a is not None and b is not None and not_less(formula(a), formula(b))


def _is_filled(of: Formula) -> bool:
    """Whether a formula is obviously at least 1 if all symbols are, since the least values of its terms add up to 1 or
    more.
    """
    if bounds(of)[0] >= 1:
        return True
    if any(factor < 0 for _, factor in of.terms) or bounds(of)[0] < 0:
        return False
    return any(
        all(
            isinstance(atom, Symbol) or (isinstance(atom, Minimum) and all(map(_is_filled, atom.parts)))
            for atom in monomial
        )
        for monomial, _ in of.terms
    )


def filled(a: Dim) -> bool:
    """Whether a dimension is at least 1 if all symbols are; False if it is unknown."""
    if a is None or isinstance(a, int):
        return a is not None and a >= 1
    of = formula(a)
    if not is_computed(a) or _is_filled(of):
        return True
    names = sorted(symbols(of))
    condition = " and ".join(["{0} < 1", *(f"{{{k + 1}}} >= 1" for k in range(len(names)))])
    return _never((of, *map(symbol, names)), condition, lambda n: n[0] < 1 <= min(n[1:], default=1))


def positive(a: Dim, known_positive: Collection[object] = ()) -> bool:
    """Whether a dimension is at least 1 at all sizes at which those in `known_positive` are; False if it is unknown."""
    if a is None or isinstance(a, int):
        return a is not None and a >= 1
    of = formula(a)
    if a in known_positive or bounds(of)[0] >= 1:
        return True
    if not is_computed(a):
        return False
    names = sorted(symbols(of))
    least_ = [int(name in known_positive) for name in names]
    condition = " and ".join(["{0} < 1", *(f"{{{k + 1}}} >= {n}" for k, n in enumerate(least_))])
    return _never(
        (of, *map(symbol, names)), condition, lambda n: n[0] < 1 and all(map(int.__ge__, n[1:], least_))
    )


def divides(divisor: int, a: Dim) -> bool:
    """Whether a dimension is a multiple of a number at all sizes; False if it is unknown."""
    return a is not None and is_multiple(formula(a), divisor)


def value(dim: Dim, numbers: Mapping[str, int], calls: Evaluate | None = None) -> int | None:
    """The size of a dimension, given numbers for its symbols. None if it has no value, or a number is missing."""
    if isinstance(dim, int) or dim is None:
        return dim
    number_ = numbers.get(dim)
    return evaluate(formula(dim), numbers, calls) if number_ is None and is_computed(dim) else number_


def readable(dim: Dim) -> str:
    """A dimension as text for people: "ceil(samples/160)", or "?" if it is unknown."""
    if dim is None:
        return "?"
    if not is_computed(dim):
        return str(dim)
    return _shown(formula(dim))


# The longest formula that helps the reader of a message.
_BRIEF = 32


def brief(dim: Dim) -> str:
    """A dimension as text for a message: as `readable`, or "f(height, width)" for a long formula."""
    text = readable(dim)
    if len(text) <= _BRIEF or dim is None:
        return text
    names = ", ".join(sorted(symbols(formula(dim))))
    return f"f({names})" if len(names) <= _BRIEF else f"f({names[:_BRIEF]}...)"


def _shown(of: Formula) -> str:
    out = ""
    for monomial, factor in sorted(of.terms, key=lambda t: not t[0]):
        parts = [_shown_atom(a) for a in monomial]
        if abs(factor) != 1 or not parts:
            parts.insert(0, str(abs(factor)))
        sign = ("-" if factor < 0 else "") if not out else (" - " if factor < 0 else " + ")
        out += sign + "*".join(parts)
    return out or "0"


def _shown_atom(atom: Atom) -> str:
    if isinstance(atom, Symbol):
        return atom.name
    if isinstance(atom, Minimum):
        return f"min({', '.join(map(_shown, atom.parts))})"
    if isinstance(atom, Call):
        arguments = (repr(a) if isinstance(a, float) else _shown_call(a) for a in atom.arguments)
        return f"{atom.name}({', '.join(arguments)})"
    by = atom.by.number
    over, name = atom.over, "floor"
    if by is not None and over.constant == by - 1:
        over, name = over - (by - 1), "ceil"
    top = _shown(over)
    bottom = _shown(atom.by)
    return (
        f"{name}({top if len(over.terms) == 1 else f'({top})'}/{bottom if by is not None else f'({bottom})'})"
    )


def _shown_call(value: Formula | Call) -> str:
    return _shown(value) if isinstance(value, Formula) else _shown_atom(value)


def _parsed(tree: ast.expr) -> Formula:
    """The formula that a syntax tree stands for. Raises ValueError if it stands for none."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return number(tree.value)
    if isinstance(tree, ast.Name):
        return symbol(tree.id)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_parsed(tree.operand)
    if isinstance(tree, ast.BinOp):
        left, right = _parsed(tree.left), _parsed(tree.right)
        if isinstance(tree.op, ast.Add):
            return left + right
        if isinstance(tree.op, ast.Sub):
            return left - right
        if isinstance(tree.op, ast.Mult):
            return left * right
        if isinstance(tree.op, ast.FloorDiv):
            return floor_div(left, right)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        first = tree.args[0]
        if tree.func.id == "min":
            return minimum(*map(_parsed, tree.args))
        if tree.func.id == "sym" and isinstance(first, ast.Constant) and isinstance(first.value, str):
            return symbol(first.value)
        if tree.func.id == "call":
            return _atom(_parsed_call(tree))
    raise ValueError(f"not a formula of dimensions: {ast.unparse(tree)}")


def _parsed_call(tree: ast.Call) -> Call:
    name = ast.literal_eval(tree.args[0])
    arguments: list[Formula | Call | float] = []
    for argument in tree.args[1:]:
        value = _literal(argument)
        if isinstance(value, float | str):
            arguments.append(float(value))
            continue
        part = _parsed(argument)
        only = part.terms[0][0][0] if isinstance(argument, ast.Call) else None
        arguments.append(only if isinstance(only, Call) else part)
    return Call(name, tuple(arguments))


def _literal(tree: ast.expr) -> object:
    try:
        return ast.literal_eval(tree)
    except ValueError:
        return None
