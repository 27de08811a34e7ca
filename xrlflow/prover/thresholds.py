"""Finds the numbers with which a rule's conditions and code compare. A proof tries sizes and numbers around each.

For example, a Slice up to index 1,000 leaves any smaller dimension whole. Randomly drawn sizes are small, so none shows
that a dimension of 1,001 loses an element. The numbers come from two sources: the rule's code (constants of its
functions, of the functions that they call, of closures, tables and class attributes; `integers_in_code`), and the
comparisons made while the conditions are evaluated (`watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from xrlflow.ir import DType
from xrlflow.ir.dims import LARGEST
from xrlflow.prover.hooks import watched
from xrlflow.rewrite import AnyRule, RegionRule, Rule

# The largest size that random draws usually give.
LARGEST_USUAL_SIZE = 6
# How many limits of a rule are tried at most, the smallest first.
_MOST = 24
# How many comparisons are recorded at most. Without this limit a search through a range might never end.
_MOST_COMPARISONS = 2000
_MOST_DIGITS = 19
_WIDEST = 1 << 63


class TooMany(Exception):
    """There were more than `_MOST_COMPARISONS` comparisons."""


class Watched(int):
    """An integer that records what it is compared with; so do sums, differences, products and quotients made from it.

    `back` maps a number with which such a result is compared to the number with which the original would be compared.
    `notes` counts the comparisons by the latter number.
    """

    notes: dict[int, int]
    back: Callable[[int], int]

    @classmethod
    def of(cls, number: int, notes: dict[int, int], back: Callable[[int], int] = int) -> Watched:
        result = cls(number)
        result.notes, result.back = notes, back
        return result

    def _note(self, other: Any) -> None:
        if isinstance(other, (int, float, np.integer, np.floating)) and abs(number := float(other)) < _WIDEST:
            original = self.back(int(number))
            self.notes[original] = self.notes.get(original, 0) + 1
            if sum(self.notes.values()) > _MOST_COMPARISONS:
                raise TooMany

    def _derived(self, number: Any, back: Callable[[int], int]) -> Any:
        if type(number) is not int:
            return number
        return Watched.of(number, self.notes, lambda n: self.back(back(n)))

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self._note(other)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        self._note(other)
        return bool(int(self) < other)

    def __le__(self, other: Any) -> bool:
        self._note(other)
        return bool(int(self) <= other)

    def __gt__(self, other: Any) -> bool:
        self._note(other)
        return bool(int(self) > other)

    def __ge__(self, other: Any) -> bool:
        self._note(other)
        return bool(int(self) >= other)

    def __add__(self, other: Any) -> Any:
        return self._derived(int(self) + other, lambda n: n - other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._derived(int(self) - other, lambda n: n + other)

    def __rsub__(self, other: Any) -> Any:
        return self._derived(other - int(self), lambda n: other - n)

    def __mul__(self, other: Any) -> Any:
        return self._derived(int(self) * other, lambda n: n // (other or 1))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        return self._derived(int(self) // other, lambda n: n * other)

    def __neg__(self) -> Any:
        return self._derived(-int(self), lambda n: -n)

    def __abs__(self) -> Any:
        return self._derived(abs(int(self)), lambda n: n)

    def __mod__(self, other: Any) -> Any:
        self._note(other)
        return int(self) % other


def show(value: Any, notes: dict[int, int]) -> Any:
    """The value with its integers (also in tuples, and floats without a fraction) replaced by `Watched` ones."""
    if type(value) is int:
        return Watched.of(value, notes)
    if type(value) is float and value.is_integer() and abs(value) < _WIDEST:
        return Watched.of(int(value), notes)
    return tuple(show(v, notes) for v in value) if type(value) is tuple else value


@contextmanager
def watch() -> Iterator[dict[int, int]]:
    """A context that counts the numbers with which conditions compare."""
    notes: dict[int, int] = {}
    with watched(lambda value: show(value, notes)):
        yield notes


def integers_in_code(rule: AnyRule, types: bool = True) -> set[int]:
    """The integers in a rule's code, in the functions of its package that it calls, and in the tables that it reads.

    `types`: whether integers that stand for element types are included.
    """
    collector = _Collector(type(rule).__module__.partition(".")[0], types)
    for kind in type(rule).__mro__:
        if kind in (Rule, RegionRule) or kind in Rule.__mro__ or kind in RegionRule.__mro__:
            continue
        for name, value in vars(kind).items():
            if not name.startswith("__") and name not in ("examples", "near_misses", "shapes", "survivors"):
                collector.collect(value)
    return collector.integers


@dataclass(slots=True)
class _Collector:
    """Collects the integers in values, and in the functions of package `home` to which these values refer."""

    home: str
    types: bool
    integers: set[int] = field(default_factory=set)
    visited: dict[int, Any] = field(default_factory=dict)
    """Visited values by `id`. The reference keeps the value alive, so that its `id` stays unique."""

    def collect(self, value: Any) -> None:
        """Add the integers in a value: a number, a table, or a function and everything to which it refers."""
        if isinstance(value, (bool, bytes)) or value is None or (isinstance(value, DType) and not self.types):
            return
        if isinstance(value, (int, float, np.integer, np.floating)):
            if abs(number := float(value)) < _WIDEST and number.is_integer():
                self.integers.add(int(number))
            return
        if isinstance(value, str):
            if value.isdigit() and len(value) < _MOST_DIGITS:
                self.integers.add(int(value))
            return
        if id(value) in self.visited:
            return
        self.visited[id(value)] = value
        if isinstance(value, Mapping):
            self.collect((*value, *value.values()))
        elif isinstance(value, (tuple, list, set, frozenset)):
            for item in value:
                self.collect(item)
        elif isinstance(value, np.ndarray) and value.size <= _MOST and value.dtype.kind in "iuf":
            self.collect(value.tolist())
        else:
            function = function_of(value)
            if function is not None and function.__module__.partition(".")[0] == self.home:
                self._collect_function(function)

    def _collect_function(self, function: FunctionType) -> None:
        for code in codes(function.__code__):
            self.collect([c for c in code.co_consts if not isinstance(c, CodeType)])
            for name in code.co_names:
                self.collect(function.__globals__.get(name))
        for cell in function.__closure__ or ():
            try:
                self.collect(cell.cell_contents)
            except ValueError:  # the variable of the closure has no value yet
                continue
        self.collect([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])


def function_of(value: Any) -> FunctionType | None:
    """The function behind a method, a property or a cache; None if there is none."""
    for name in ("__func__", "fget", "func", "__wrapped__"):
        value = getattr(value, name, value) if not isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of all functions nested in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes(const)


def limits(numbers: set[int]) -> list[int]:
    """The magnitudes of those numbers that random draws do not reach, in ascending order, at most `_MOST`."""
    return sorted({abs(n) for n in numbers if LARGEST_USUAL_SIZE <= abs(n) <= LARGEST + 1})[:_MOST]


def around(number: int) -> tuple[int, int, int]:
    return number - 1, number, number + 1
