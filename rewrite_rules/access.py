"""Data movement as a map from output positions to input positions, and the cheapest chain of operators for a map.

Reshape, Transpose, Slice, Expand and their like compute nothing: for each position of the output, they say where in the
input its element is. `AccessMap` is that function. A position is written as digits of a mixed radix. Each dimension of
the output is a group of digits, and each digit adds a number to the address:

    address(digits) = offset + sum of digit_k * step_k        (or values_k[digit_k] for irregular steps)

Addresses count the elements of the source without its symbolic dimensions. The symbolic dimensions have digits of their
own, which operators only carry along. Every operator is a small change of the digits: a Reshape groups them in another
way, a Transpose reorders the groups, a Slice multiplies steps and moves the offset, an Expand adds a digit of step 0, a
Concat appends lists of addresses. Several sources lie far apart in the address space, and so does the number that a Pad
fills in.

`plans` is the inverse: it turns a map into operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from itertools import count as integers
from math import gcd, inf, isqrt, prod
from operator import mul

from xrlflow.rewrite import Refused

# The longest dimension that is written out as a list of addresses; also the most indices of a Gather.
LONGEST, MOST_INDICES = 4096, 1024
# The distance between the first addresses of two sources, and the lowest address that stands for the number of a Pad.
_APART, FILL = 1 << 44, 1 << 60


class Unmappable(Refused):
    """Raised for an operator or a result that a map cannot express. The message says why."""


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of an output position: it has `size` values, and each adds `step` more to the address than the one
    before.

    `values` lists irregular numbers to add (the first is 0). A digit with a `name` is a whole symbolic dimension of the
    source: then `step` is the source's axis, and the size counts as 1.
    """

    size: int
    step: int = 0
    values: tuple[int, ...] = ()
    name: str = ""

    @property
    def offsets(self) -> Sequence[int]:
        """The numbers that the digit's values add to the address."""
        if self.name:
            raise Unmappable("a symbolic dimension is taken apart")
        return self.values or [i * self.step for i in range(self.size)]

    @property
    def repeats(self) -> bool:
        """Whether all values of the digit address the same elements."""
        return not self.name and not self.step and not any(self.values)

    @property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest number that the digit adds to the address."""
        ends = self.values or (0, (self.size - 1) * self.step)
        return min(ends), max(ends)

    @property
    def common(self) -> int:
        """The greatest common divisor of the numbers that the digit adds to the address."""
        return gcd(*self.values) if self.values else abs(self.step)

    def split(self, inner: int) -> tuple[Digit, Digit]:
        """The digit as two digits, of which the inner one has `inner` values."""
        if self.name:
            raise Unmappable("a symbolic dimension is taken apart")
        outer = self.size // inner
        if not self.values:
            return Digit(outer, self.step * inner), Digit(inner, self.step)
        high, low = self.values[::inner], self.values[:inner]
        if any(v != high[i // inner] + low[i % inner] for i, v in enumerate(self.values)):
            raise Unmappable("irregular positions are taken apart")
        return _one(high), _one(low)


Dims = tuple[tuple[Digit, ...], ...]


def _one(values: Sequence[int]) -> Digit:
    """A digit that adds these numbers to the address. There are at least two, and the first is 0."""
    step = values[1]
    if all(v == i * step for i, v in enumerate(values)):
        return Digit(len(values), step)
    return Digit(len(values), 0, tuple(values))


def size_of(digits: Sequence[Digit]) -> int:
    """The product of the digits' sizes; symbolic digits count as 1."""
    return prod(d.size for d in digits)


def merged(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    """The digits, with neighbouring digits joined if their steps fit, and without digits of size 1."""
    out: list[Digit] = []
    for d in digits:
        if d.size == 1 and not d.name:
            continue
        last = out[-1] if out else None
        if (
            last is not None
            and not (last.name or d.name or last.values or d.values)
            and last.step == d.step * d.size
        ):
            out[-1] = Digit(last.size * d.size, d.step)
        else:
            out.append(d)
    return tuple(out)


def offsets_of(digits: Sequence[Digit]) -> list[int]:
    """The numbers that all combinations of the digits' values add to the address. Refuses more than LONGEST of them."""
    if size_of(digits) > LONGEST:
        raise Unmappable("a dimension is too long")
    out = [0]
    for d in digits:
        out = [a + b for a in out for b in d.offsets]
    return out


def factored(values: Sequence[int]) -> tuple[Digit, ...]:
    """Digits that together add these numbers, relative to the first one. They are regular as far as possible."""
    out: list[Digit] = []
    while len(values) > 1:
        inner = next(b for b in integers(2) if len(values) % b == 0 and _repeats(values, b))
        out.append(_one([v - values[0] for v in values[:inner]]))
        values = values[::inner]
    return merged(out[::-1])


def _repeats(values: Sequence[int], block: int) -> bool:
    """Whether all blocks of this length are equal if each is taken relative to its first number."""
    first = values[0]
    return all(
        values[i + k] - values[i] == values[k] - first
        for i in range(block, len(values), block)
        for k in range(1, block)
    )


def _is_symbol(digit: Digit, symbol: Digit) -> bool:
    return bool(digit.name) and digit.step == symbol.step


class _Stock:
    """A sequence of digits from which digits are removed at either end."""

    def __init__(self, digits: Sequence[Digit]) -> None:
        self.digits = list(digits)

    def take(self, request: int | Sequence[Digit], front: bool) -> tuple[Digit, ...]:
        """Remove digits from the front or the back and return them: digits for `request` elements, or for as many
        elements as the given digits have.
        """
        digits_: list[Digit] = []
        if isinstance(request, int):
            self._elements(request, front, digits_)
        else:
            for d in request if front else reversed(request):
                if not d.name:
                    self._elements(d.size, front, digits_)
                    continue
                if not self.digits or not _is_symbol(self.digits[0 if front else -1], d):
                    raise Unmappable("a symbolic dimension is taken apart")
                digits_.append(self.digits.pop(0 if front else -1))
        return merged(digits_ if front else digits_[::-1])

    def _elements(self, count: int, front: bool, result: list[Digit]) -> None:
        end = 0 if front else -1
        while count > 1:
            if not self.digits:
                raise Unmappable("the number of elements changes")
            d = self.digits[end]
            if d.name:
                raise Unmappable("a symbolic dimension is taken apart")
            if count % d.size == 0:
                result.append(self.digits.pop(end))
                count //= d.size
            elif d.size % count == 0:
                outer, inner = d.split(d.size // count if front else count)
                result.append(outer if front else inner)
                self.digits[end] = inner if front else outer
                count = 1
            else:
                raise Unmappable("a reshape cuts across what was moved")


@dataclass(frozen=True, slots=True)
class AccessMap:
    """For each element of a tensor, where it is in the tensor's sources (see the module's docstring).

    `dims`: the digits of each dimension, outermost first. `filled`: axes of symbolic dimensions that cannot be 0,
    because an operator of the chain would fail.
    """

    dims: Dims
    offset: int = 0
    filled: frozenset[int] = frozenset()

    @staticmethod
    def source(shape: Sequence[int | str], number: int = 0) -> AccessMap:
        """The map of a source itself. `number` distinguishes several sources. Refuses dimensions of 0."""
        dims: list[tuple[Digit, ...]] = []
        step = 1
        for axis in range(len(shape) - 1, -1, -1):
            size = shape[axis]
            if isinstance(size, str):
                dims.append((Digit(1, axis, (), size),))
                continue
            if size < 1:
                raise Unmappable("a dimension is 0")
            dims.append((Digit(size, step),) if size > 1 else ())
            step *= size
        return AccessMap(tuple(dims[::-1]), number * _APART)

    @property
    def volume(self) -> int:
        """The number of elements, with symbolic dimensions counted as 1."""
        return prod(size_of(dim) for dim in self.dims)

    @property
    def digits(self) -> tuple[Digit, ...]:
        return tuple(d for dim in self.dims for d in dim)

    @property
    def reach(self) -> tuple[int, int]:
        """The least and the greatest address."""
        ends = [d.reach for d in self.digits]
        return self.offset + sum(low for low, _ in ends), self.offset + sum(high for _, high in ends)

    @property
    def only_source(self) -> int | None:
        """The number of the source if there is only one; None if there are several, or a Pad fills in numbers."""
        low, high = self.reach
        return low // _APART if low // _APART == high // _APART and high < FILL // 2 else None

    def within(self, source: int) -> AccessMap:
        """The same map with addresses relative to the beginning of a source."""
        return replace(self, offset=self.offset - source * _APART)

    def same_as(self, other: AccessMap) -> bool:
        return self.dims == other.dims and self.offset == other.offset

    def _at(self, axis: int) -> tuple[Digit, ...]:
        if not 0 <= axis < len(self.dims):
            raise Unmappable("an axis is out of range")
        return self.dims[axis]

    def _with(self, axis: int, *dims: tuple[Digit, ...], offset: int = 0) -> AccessMap:
        """The map with `dims` (any number of dimensions) instead of one dimension."""
        return replace(
            self, dims=(*self.dims[:axis], *dims, *self.dims[axis + 1 :]), offset=self.offset + offset
        )

    # The operators. Axes count from the front.

    def reshape(self, shape: Sequence[int]) -> AccessMap:
        """Reshape, with 0 and -1 as in ONNX."""
        request: list[int | Sequence[Digit] | None] = []
        copied: set[int] = set()
        for i, n in enumerate(shape):
            if n == 0:
                dim = self._at(i)
                symbols = {d.step for d in dim if d.name}
                copied |= symbols
                request.append(dim if symbols else size_of(dim))
            elif n < -1:
                raise Unmappable("a dimension is negative")
            else:
                request.append(None if n == -1 else n)
        if request.count(None) > 1:
            raise Unmappable("two dimensions are to be inferred")
        hole = request.index(None) if None in request else len(request)
        stock = _Stock(merged(self.digits))
        head = [stock.take(w, True) for w in request[:hole] if w is not None]
        tail = [stock.take(w, False) for w in request[:hole:-1] if w is not None]
        if hole == len(request):
            if stock.digits:
                raise Unmappable("the number of elements changes")
            return replace(self, dims=tuple(head))
        # If one dimension is inferred and another is 0, a Reshape fails; so the copied dimensions cannot be 0.
        return replace(
            self, dims=(*head, tuple(stock.digits), *tail[::-1]), filled=self.filled | frozenset(copied)
        )

    def transpose(self, perm: Sequence[int]) -> AccessMap:
        if sorted(perm) != list(range(len(self.dims))):
            raise Unmappable("the permutation is of another rank")
        return replace(self, dims=tuple(self.dims[p] for p in perm))

    def squeeze(self, axes: Sequence[int] | None) -> AccessMap:
        """Remove the given dimensions of size 1, or all such dimensions."""
        if axes is None:
            if any(d.name for d in self.digits):
                raise Unmappable("a symbolic dimension may be 1")
            axes = [i for i, dim in enumerate(self.dims) if not dim]
        if any(self._at(a) for a in axes):
            raise Unmappable("a dimension that is dropped is not 1")
        return replace(self, dims=tuple(dim for i, dim in enumerate(self.dims) if i not in axes))

    def unsqueeze(self, axes: Sequence[int]) -> AccessMap:
        rank = len(self.dims) + len(axes)
        dims_ = iter(self.dims)
        return replace(self, dims=tuple(() if i in axes else next(dims_) for i in range(rank)))

    def flatten(self, axis: int) -> AccessMap:
        return self._joined(range(axis), range(axis, len(self.dims)))

    def slice(self, axis: int, start: int, count: int, step: int) -> AccessMap:
        """Take `count` positions from `start` on, with distance `step`. The caller has clamped them to the
        dimension.
        """
        dim = self._at(axis)
        if count < 1:
            raise Unmappable("a dimension is 0")
        if any(d.name for d in dim):
            raise Unmappable("a symbolic dimension is cut")
        if not all(0 <= i < size_of(dim) for i in (start, start + step * (count - 1))):
            raise Unmappable("a slice is out of range")
        if len(dim) == 1 and not dim[0].values:
            (d,) = dim
            return self._with(axis, merged([Digit(count, d.step * step)]), offset=start * d.step)
        values = offsets_of(dim)
        return self._gathered(axis, [values[start + i * step] for i in range(count)])

    def _gathered(self, axis: int, values: Sequence[int]) -> AccessMap:
        return self._with(axis, factored(values), offset=values[0])

    def gather(self, axis: int, indices: Sequence[int], shape: Sequence[int]) -> AccessMap:
        """Take the positions `indices` along an axis. `shape` replaces the axis (empty: the axis is removed)."""
        dim = self._at(axis)
        if any(d.name for d in dim):
            raise Unmappable("a symbolic dimension is cut")
        size = size_of(dim)
        if not indices or not all(-size <= i < size for i in indices):
            raise Unmappable("an index is out of range, or there is none")
        if len(indices) > LONGEST:
            raise Unmappable("a dimension is too long")
        positions = [i % size for i in indices]
        if len(dim) == 1 and not dim[0].values:
            values = [i * dim[0].step for i in positions]
        else:
            every = offsets_of(dim)
            values = [every[i] for i in positions]
        line = AccessMap((factored(values),)).reshape(shape)
        return self._with(axis, *line.dims, offset=values[0])

    def expand(self, shape: Sequence[int]) -> AccessMap:
        """Broadcast against a shape without symbols."""
        missing = max(len(shape) - len(self.dims), 0)
        dims = [()] * missing + list(self.dims)
        numbers = [1] * (len(dims) - len(shape)) + list(shape)
        out: list[tuple[Digit, ...]] = []
        for dim, n in zip(dims, numbers):
            if n < 1:
                raise Unmappable("a dimension is 0")
            if not dim and n > 1:
                dim = (Digit(n),)
            elif n > 1 and (size_of(dim) != n or any(d.name for d in dim)):
                raise Unmappable("a dimension cannot be broadcast, or is symbolic")
            out.append(dim)
        return replace(self, dims=tuple(out))

    def tile(self, repeats: Sequence[int]) -> AccessMap:
        if len(repeats) != len(self.dims) or any(r < 1 for r in repeats):
            raise Unmappable("a dimension is 0")
        return replace(self, dims=tuple(merged([Digit(r), *dim]) for r, dim in zip(repeats, self.dims)))

    def pad(self, before: Sequence[int], after: Sequence[int]) -> AccessMap:
        """Pad with a number. Negative pads remove elements."""
        if not len(before) == len(after) == len(self.dims):
            raise Unmappable("the pads are of another rank")
        out = self
        for axis, (b, a) in enumerate(zip(before, after)):
            if not b and not a:
                continue
            dim = out.dims[axis]
            if b < 0 or a < 0:
                out = out.slice(axis, max(-b, 0), size_of(dim) - max(-b, 0) - max(-a, 0), 1)
            front, back = max(b, 0), max(a, 0)
            if front or back:
                if front + size_of(out.dims[axis]) + back > LONGEST:  # checked before a long list is made
                    raise Unmappable("a dimension is too long")
                values = [FILL] * front + offsets_of(out.dims[axis]) + [FILL] * back
                out = out._gathered(axis, values)
        return out

    def _cut(self, axis: int, *sizes: int) -> AccessMap:
        """Split one dimension into several."""
        return self._with(axis, *AccessMap((self._at(axis),)).reshape(sizes).dims)

    def _joined(self, *groups: Sequence[int]) -> AccessMap:
        """Reorder dimensions, and join each group into one."""
        return replace(self, dims=tuple(merged([d for i in g for d in self.dims[i]]) for g in groups))

    def depth_to_space(self, block: int, column_row_depth: bool) -> AccessMap:
        if len(self.dims) != 4:
            raise Unmappable("it has not 4 dimensions")
        if column_row_depth:  # n, c, r, s, h, w
            return self._cut(1, -1, block, block)._joined((0,), (1,), (4, 2), (5, 3))
        return self._cut(1, block, block, -1)._joined((0,), (3,), (4, 1), (5, 2))  # n, r, s, c, h, w

    def space_to_depth(self, block: int) -> AccessMap:
        if len(self.dims) != 4:
            raise Unmappable("it has not 4 dimensions")
        apart = self._cut(3, -1, block)._cut(2, -1, block)  # n, c, h, r, w, s
        return apart._joined((0,), (3, 5, 1), (2,), (4,))

    @staticmethod
    def concat(parts: Sequence[AccessMap], axis: int) -> AccessMap:
        first = parts[0]
        first._at(axis)
        expected = _comparable(first.dims, axis)
        if any(_comparable(p.dims, axis) != expected for p in parts[1:]):
            raise Unmappable("the parts are moved in different ways")
        if sum(size_of(p.dims[axis]) for p in parts) > LONGEST:
            raise Unmappable("a dimension is too long")
        values = [p.offset - first.offset + v for p in parts for v in offsets_of(p.dims[axis])]
        filled = frozenset[int]().union(*(p.filled for p in parts))
        return replace(first, filled=filled)._gathered(axis, values)


def _comparable(dims: Dims, axis: int) -> Dims:
    """The dimensions other than `axis`, written so that equal results mean that the parts of a Concat fit together.

    If their sizes differed, the Concat would fail; so symbols with different names count as equal.
    """
    return tuple(
        tuple(replace(d, name="?") if d.name and sum(bool(e.name) for e in dim) == 1 else d for d in dim)
        for i, dim in enumerate(dims)
        if i != axis
    )


# From maps to chains of operators


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of a chain, with its numbers.

    The numbers by operator: Reshape: shape. Transpose: permutation. Slice: starts, ends, axes, and steps unless all are
    1. Gather: axis, indices (Pick: one index, and the axis is dropped). Squeeze, Unsqueeze: axes. Expand: shape.
    DepthToSpace: block, 1 for CRD. SpaceToDepth: block. Pad: pads, axes.
    """

    op: str
    numbers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a chain of operators: elements read and written, number of operators, and number of views among
    them.
    """

    elements: int = 0
    operators: int = 0
    views: int = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.elements + other.elements, self.operators + other.operators, self.views + other.views
        )

    def total(self, scale: int = 1) -> int:
        """The cost in elements. `scale` multiplies the elements, since symbolic dimensions count as 1.

        A call of an operator takes as long as moving some ten thousand numbers.
        """
        return scale * self.elements + 12_000 * self.operators + 3_000 * self.views


_VIEW = Price(0, 0, 1)


def price(op: str, elements_read: int, elements_written: int, shuffles: bool = False) -> Price:
    """The cost of an operator that reads and writes so many elements. `shuffles`: it separates elements that were
    neighbours.
    """
    if op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
        return _VIEW
    if op in ("Slice", "Gather", "Pick", "Split", "Concat"):
        elements_read = elements_written
    # A Gather reads its indices, too, so it costs as much as Reshape, Transpose and Reshape together.
    return Price((elements_read + elements_written) * (3 if shuffles else 1), 1, 2 if op == "Gather" else 0)


def shuffles(perm: Sequence[int], unit: Callable[[int], bool]) -> bool:
    """Whether a Transpose moves the innermost dimension. Dimensions for which `unit` holds are ignored."""
    order = [p for p in perm if not unit(p)]
    return bool(order) and order[-1] != max(order)


# A dimension: the product of its digits' sizes without symbols, and the sorted source axes of its symbols.
Extent = tuple[int, tuple[int, ...]]
UNIT: Extent = (1, ())


def extent_of(digits: Sequence[Digit]) -> Extent:
    return size_of(digits), tuple(sorted(d.step for d in digits if d.name))


def scattered(behind: Sequence[Extent]) -> bool:
    """Whether a Gather copies only few elements for each index. `behind` are the dimensions after its axis."""
    return not any(symbols for _, symbols in behind) and prod(n for n, _ in behind) < 32


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain of operators that computes a tensor from one source."""

    steps: tuple[Step, ...]
    price: Price


# A function that says whether a cost is below the limit for a chain.
Below = Callable[[Price], bool]


class _Chain:
    """A chain of operators under construction, with the shape that it has reached."""

    def __init__(self, shape: Sequence[Extent], filled: frozenset[int]) -> None:
        self.shape = tuple(shape)
        self.filled = filled
        self.steps: list[Step] = []
        self.shapes: list[tuple[Extent, ...]] = []  # the shape before each step
        self.price = Price()

    def copy(self) -> _Chain:
        out = _Chain(self.shape, self.filled)
        out.steps, out.shapes, out.price = self.steps[:], self.shapes[:], self.price
        return out

    def _add(self, op: str, shape: Sequence[Extent], *numbers: Sequence[int], torn: bool = False) -> None:
        elements_read, elements_written = prod(n for n, _ in self.shape), prod(n for n, _ in shape)
        self.price += price(op, elements_read, elements_written, torn)
        self.steps.append(Step(op, tuple(tuple(n) for n in numbers)))
        self.shapes.append(self.shape)
        self.shape = tuple(shape)

    def reshape(self, shape: Sequence[Extent]) -> None:
        while self.steps and self.steps[-1].op in ("Reshape", "Squeeze", "Unsqueeze"):
            self.steps.pop()
            self.shape = self.shapes.pop()
            self.price = Price(self.price.elements, self.price.operators, self.price.views - 1)
        if tuple(shape) == self.shape:
            return
        try:
            self._add("Reshape", shape, self._numbers(shape))
        except Unmappable:  # a Reshape cannot name symbols, but dimensions of 1 can be added and removed
            self._change_units(shape)

    def _numbers(self, shape: Sequence[Extent]) -> list[int]:
        """The target shape that a Reshape needs for this shape: 0 copies a dimension, -1 infers one."""
        numbers: list[int] = []
        copied: set[int] = set()
        for i, (size, symbols) in enumerate(shape):
            if not symbols:
                numbers.append(size)
            elif i < len(self.shape) and self.shape[i] == (size, symbols):
                numbers.append(0)
                copied.update(symbols)
            else:
                numbers.append(-1)
        if numbers.count(-1) > 1:
            raise Unmappable("two dimensions would have to be inferred")
        if -1 in numbers and not copied <= self.filled:
            raise Unmappable("a dimension that is not known may be 0")
        return numbers

    def _change_units(self, shape: Sequence[Extent]) -> None:
        """Squeeze and Unsqueeze to a shape that differs only in dimensions of 1."""
        old, new = self.shape, tuple(shape)
        dropped: list[int] = []
        added: list[int] = []
        i = j = 0
        while old[i:] or new[j:]:
            if old[i : i + 1] == new[j : j + 1]:
                i, j = i + 1, j + 1
            elif old[i : i + 1] == (UNIT,):
                dropped.append(i)
                i += 1
            elif new[j : j + 1] == (UNIT,):
                added.append(j)
                j += 1
            else:
                raise Unmappable("a dimension that is not known would have to be inferred")
        if dropped:
            self._add("Squeeze", [e for k, e in enumerate(old) if k not in dropped], dropped)
        if added:
            self._add("Unsqueeze", new, added)

    def transpose(self, perm: Sequence[int]) -> None:
        if tuple(perm) != tuple(range(len(perm))):
            torn = shuffles(perm, lambda p: self.shape[p] == UNIT)
            self._add("Transpose", [self.shape[p] for p in perm], perm, torn=torn)

    def slice(self, cuts: Sequence[tuple[int, int, int, int]]) -> None:
        """Slice several axes. `cuts` are tuples of axis, start, count and step."""
        if not cuts:
            return
        shape = list(self.shape)
        ends: list[int] = []
        for axis, start, count, step in cuts:
            last = start + step * (count - 1)
            ends.append(last + 1 if step > 0 else last - 1 if last > 0 else -(shape[axis][0] + 1))
            shape[axis] = (count, ())
        axes, starts, _, steps = zip(*cuts)
        self._add("Slice", shape, starts, ends, axes, *([steps] if set(steps) != {1} else []))

    def gather(self, axis: int, indices: Sequence[int]) -> None:
        if len(indices) > MOST_INDICES:
            raise Unmappable("there are too many indices")
        shape = list(self.shape)
        shape[axis] = (len(indices), ())
        torn = scattered(shape[axis + 1 :])
        self._add("Gather", shape, (axis,), indices, torn=torn)

    def expand(self, shape: Sequence[Extent], numbers: Sequence[int]) -> None:
        self._add("Expand", shape, numbers)

    def plan(self) -> Plan:
        return Plan(tuple(self.steps), self.price)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension as which a chain reads the source; one position further is `unit` addresses further.

    A symbolic dimension has a name; its `unit` is its axis in the source.
    """

    size: int
    unit: int
    name: str = ""

    @property
    def extent(self) -> Extent:
        return (1, (self.unit,)) if self.name else (self.size, ())


def _own(shape: Sequence[int | str]) -> list[_Axis]:
    numbers = [d if isinstance(d, int) else 1 for d in shape]
    units = [*accumulate(numbers[:0:-1], mul, initial=1)][::-1]
    return [_Axis(1, i, d) if isinstance(d, str) else _Axis(d, units[i]) for i, d in enumerate(shape)]


def _fused(axes: Sequence[_Axis]) -> list[_Axis]:
    """The dimensions, with neighbours joined where their addresses allow it."""
    out: list[_Axis] = []
    for axis in axes:
        if out and not out[-1].name and not axis.name:
            out[-1] = _Axis(out[-1].size * axis.size, axis.unit)
        else:
            out.append(axis)
    return out


def _refined(axes: Sequence[_Axis], cuts: Sequence[int]) -> list[_Axis]:
    """The dimensions, each divided into several where `cuts` addresses divide it evenly."""
    out: list[_Axis] = []
    for axis in axes:
        if axis.name:
            out.append(axis)
            continue
        end = axis.unit * axis.size
        bounds = [axis.unit]
        for cut in cuts:
            if bounds[-1] < cut < end and cut % bounds[-1] == 0 and end % cut == 0:
                bounds.append(cut)
        bounds.append(end)
        out += [_Axis(b // a, a) for a, b in pairwise(bounds)][::-1]
    return out


def _views(shape: Sequence[int | str], m: AccessMap) -> Iterator[list[_Axis]]:
    """The dimensions as which the source can be read: its own, or joined ones; also each of these divided where the
    map's digits end.
    """
    own = _own(shape)
    ends = {c for d in m.digits if not d.name for c in (d.common, d.common * d.size)}
    cuts = sorted(ends)
    views: list[list[_Axis]] = []
    for view in (own, _fused(own), _refined(own, cuts), _refined(_fused(own), cuts)):
        if view not in views:
            views.append(view)
            yield view


@dataclass(frozen=True, slots=True)
class Core:
    """How elements are moved before a final Pad: all come from one input (`source`), at addresses that count from the
    beginning of that input.

    `pad`: the Pad that must follow.
    """

    source: int
    map: AccessMap
    pad: Step | None = None
    price: Price = Price()


def core_of(m: AccessMap) -> Core | None:
    """A map as a core and a Pad; None if there are several sources, or if padding is not only at the ends of
    dimensions.
    """
    before: list[int] = []
    after: list[int] = []
    axes: list[int] = []
    inner = m
    if m.reach[1] >= FILL // 2:
        for axis, dim in enumerate(m.dims):
            reach = [d.reach for d in dim]
            low, high = sum(a for a, _ in reach), sum(b for _, b in reach)
            if high - low < FILL // 2:
                continue
            if any(d.name for d in dim) or size_of(dim) > LONGEST:
                return None
            values = offsets_of(dim)
            real = [i for i, v in enumerate(values) if v - low < FILL // 2]
            if real[-1] - real[0] + 1 != len(real):
                return None
            axes.append(axis)
            before.append(real[0])
            after.append(len(values) - 1 - real[-1])
            inner = inner._gathered(axis, [values[i] for i in real])
    source = inner.only_source
    if source is None:
        return None
    if not axes:
        return Core(source, m.within(source))
    pad = Step("Pad", ((*before, *after), tuple(axes)))
    return Core(source, inner.within(source), pad, price("Pad", inner.volume, m.volume))


def plans(
    shape: Sequence[int | str], core: Core, blocks: bool, below: Below = lambda _: True
) -> Iterator[Plan]:
    """Chains that compute a map from a source of this shape. `blocks`: whether DepthToSpace and SpaceToDepth may be
    used.

    A chain is abandoned as soon as the cost of its first operators is not `below` the limit.
    """

    def padded(plan: Plan) -> Plan:
        return plan if core.pad is None else Plan((*plan.steps, core.pad), plan.price + core.price)

    if blocks:
        yield from map(padded, _blocks(shape, core.map, below))
    yield from map(padded, _chains(shape, core.map, below))


def _chains(shape: Sequence[int | str], m: AccessMap, below: Below) -> Iterator[Plan]:
    for view in _views(shape, m):
        try:
            for chain in _attempts(shape, view, m, below):
                yield _shortened(shape, chain)
        except Unmappable:
            continue


def best(shape: tuple[int | str, ...], core: Core, blocks: bool, scale: int = 1, limit: float = inf) -> Plan:
    """The cheapest chain whose cost is below `limit`. Raises Unmappable if there is none."""
    plan = _best(shape, core, blocks, scale, limit)
    if plan is None:
        raise Unmappable("no chain of operators has this map, or not for less")
    return plan


@lru_cache(maxsize=4096)  # equal layers of a network ask for the same chain
def _best(shape: tuple[int | str, ...], core: Core, blocks: bool, scale: int, limit: float) -> Plan | None:
    lower_bound = (core.price + cheapest(shape, core.map)).total(scale)
    cheapest_plan: Plan | None = None
    lowest = limit

    def below(p: Price) -> bool:
        return p.total(scale) < lowest

    if lower_bound < limit:
        for plan in plans(shape, core, blocks, below):
            if below(plan.price):
                cheapest_plan, lowest = plan, plan.price.total(scale)
            if lowest == lower_bound:
                break
    return cheapest_plan


def cheapest(shape: Sequence[int | str], m: AccessMap) -> Price:
    """A lower bound of the cost of every chain that has this map.

    The bound is 0 if the elements keep their order. It counts two operators if a symbolic dimension moves and elements
    are left out or repeated, else one.
    """
    source = AccessMap.source(shape)
    if not m.offset and merged(m.digits) == merged(source.digits):
        return Price()
    repeated = any(d.repeats for d in m.digits)
    bound = Price(m.volume if repeated else 2 * m.volume, 1)
    if (repeated or m.volume != source.volume) and _reordered(shape, m):
        bound += Price(0, 1)
    return bound


def _reordered(shape: Sequence[int | str], m: AccessMap) -> bool:
    """Whether a digit stands on the other side of a symbolic dimension than in the source."""
    axes = _own(shape)
    latest, latest_symbol = 0, 0
    for d in m.digits:
        if d.repeats:
            continue
        if d.name:
            if latest > d.step:
                return True
            latest, latest_symbol = d.step, d.step
            continue
        # The source's axis to which the digit's smallest steps belong.
        axis = next(i for i, a in enumerate(axes) if not a.name and a.unit <= d.common)
        if axis < latest_symbol:
            return True
        latest = max(latest, axis)
    return False


def _divided(m: AccessMap, axes: Sequence[_Axis]) -> AccessMap:
    """The same map, with its digits divided where a dimension of the source ends."""
    units = sorted({a.unit for a in axes if not a.name}, reverse=True)

    def parts(d: Digit) -> Iterator[Digit]:
        for unit in units:
            step = abs(d.step)
            if step < unit < step * d.size and unit % step == 0 and step * d.size % unit == 0:
                outer, d = d.split(unit // step)
                yield outer
        yield d

    return replace(m, dims=tuple(tuple(p for d in dim for p in parts(d)) for dim in m.dims))


def _attempts(
    shape: Sequence[int | str], axes: Sequence[_Axis], m: AccessMap, below: Below
) -> Iterator[_Chain]:
    """Chains that read the source as `axes`, first cut these, then transpose and repeat what they have cut out."""
    m = _divided(m, axes)
    digits = m.digits
    digits_of: list[list[int]] = [[] for _ in axes]
    for k, d in enumerate(digits):
        if d.repeats:
            continue
        for j, axis in enumerate(axes):
            if d.name:
                belongs = bool(axis.name) and axis.unit == d.step
            else:
                belongs = not axis.name and d.common % axis.unit == 0
            if belongs:
                digits_of[j].append(k)
                break
        else:
            return
    cuts: list[tuple[int, int, int, int]] = []
    picks: list[tuple[int, list[int]]] = []
    for j, axis in enumerate(axes):
        if axis.name:
            continue
        start = m.offset // axis.unit % axis.size
        run = merged([digits[k] for k in sorted(digits_of[j], key=lambda k: -digits[k].common)])
        if len(run) > 1 or (run and run[0].values):
            if size_of(run) > MOST_INDICES:
                return
            indices = [start + v // axis.unit for v in offsets_of([digits[k] for k in digits_of[j]])]
            if not all(0 <= i < axis.size for i in indices):
                return
            picks.append((j, indices))
            continue
        digits_of[j].sort(key=lambda k: -digits[k].common)
        count, step = (run[0].size, run[0].step // axis.unit) if run else (1, 1)
        if not 0 <= start + step * (count - 1) < axis.size:
            return
        if (start, count, step) != (0, axis.size, 1):
            cuts.append((j, start, count, step))
    own = [a.extent for a in _own(shape)]
    viewed = [a.extent for a in axes]
    order = [k for ks in digits_of for k in ks]
    ascending = sorted(order)
    remaining = Price(operators=bool(cuts) + len(picks), views=int(own != viewed))
    if order != ascending:
        volume = size_of([digits[k] for k in order])
        remaining += price("Transpose", volume, volume, order[-1] != ascending[-1])
    if not below(remaining):
        return
    chain = _Chain(own, m.filled)
    chain.reshape(viewed)
    chain.slice(cuts)
    for j, indices in picks:
        chain.gather(j, indices)
    if all(len(ks) <= 1 for ks in digits_of) and len(ascending) == len(digits):
        yield from _by_axes(chain, m, {k: j for j, ks in enumerate(digits_of) for k in ks})
    else:
        yield from _by_digits(chain, m, order)


def _numbered(m: AccessMap) -> list[list[int]]:
    """The indices of the map's digits, one list for each dimension."""
    ends = [0, *accumulate(len(dim) for dim in m.dims)]
    return [list(range(a, b)) for a, b in pairwise(ends)]


def _by_axes(chain: _Chain, m: AccessMap, home: dict[int, int]) -> Iterator[_Chain]:
    """The last operators of a chain that moves whole dimensions. `home` maps each digit to its dimension."""
    out = [extent_of(dim) for dim in m.dims]
    order = [home[k] for ks in _numbered(m) for k in ks]
    units = [j for j in range(len(chain.shape)) if j not in order]
    if order == sorted(order):
        chain.reshape(out)
        yield chain
        return
    if all(len(dim) <= 1 for dim in m.dims) and len(chain.shape) == len(out):
        exact = chain.copy()
        spare = iter(units)
        exact.transpose([home[ks[0]] if ks else next(spare) for ks in _numbered(m)])
        yield exact
    chain.transpose([*units, *order])
    chain.reshape(out)
    yield chain


def _by_digits(chain: _Chain, m: AccessMap, order: Sequence[int]) -> Iterator[_Chain]:
    """The last operators of a chain that first splits dimensions into digits. `order` is the digits' order in the
    source.
    """
    digits, numbered = m.digits, _numbered(m)
    target = [k for ks in numbered for k in ks if not digits[k].repeats]
    repeats = len(target) < len(digits)
    if list(order) != target:
        index_of = {k: i for i, k in enumerate(order)}
        exact = not repeats and all(len(ks) <= 1 for ks in numbered)
        groups: list[list[int]] = []
        for k in target:
            if not exact and groups and index_of[groups[-1][-1]] + 1 == index_of[k]:
                groups[-1].append(k)
            else:
                groups.append([k])
        stored = sorted(groups, key=lambda g: index_of[g[0]])
        after = numbered if exact else groups
        before = stored + [[] for g in after if not g]
        chain.reshape([extent_of([digits[k] for k in g]) for g in before])
        spare = iter(range(len(stored), len(before)))
        where = {g[0]: i for i, g in enumerate(before) if g}
        chain.transpose([where[g[0]] if g else next(spare) for g in after])
    if repeats:
        pieces: list[tuple[bool, list[Digit]]] = []
        for ks in numbered:
            own: list[tuple[bool, list[Digit]]] = []
            for d in (digits[k] for k in ks):
                if own and not d.repeats and not own[-1][0]:
                    own[-1][1].append(d)
                else:
                    own.append((d.repeats, [d]))
            pieces += own or [(False, [])]
        chain.reshape([UNIT if again else extent_of(ds) for again, ds in pieces])
        chain.expand(
            [extent_of(ds) for _, ds in pieces], [size_of(ds) if again else 1 for again, ds in pieces]
        )
    chain.reshape([extent_of(dim) for dim in m.dims])
    yield chain


def _shortened(shape: Sequence[int | str], chain: _Chain) -> Plan:
    """The plan of a chain. A Slice of one position and a Reshape that drops its axis become a single Gather."""
    if len(chain.steps) == 2 and chain.steps[0].op == "Slice" and chain.steps[1].op in ("Reshape", "Squeeze"):
        starts, _, axes, *_ = chain.steps[0].numbers
        extents = [a.extent for a in _own(shape)]
        if len(axes) == 1 and chain.shape == (*extents[: axes[0]], *extents[axes[0] + 1 :]):
            elements = prod(n for n, _ in chain.shape)
            return Plan((Step("Pick", (axes, starts)),), price("Pick", elements, elements))
    return chain.plan()


def _blocks(shape: Sequence[int | str], m: AccessMap, below: Below) -> Iterator[Plan]:
    """Plans with DepthToSpace or SpaceToDepth, if the map can be written so. After SpaceToDepth channels may be
    reordered.
    """
    if len(shape) != 4 or len(m.dims) != 4 or not isinstance(shape[1], int):
        return
    channels, out_channels = size_of(m.dims[1]), shape[1]
    source = AccessMap.source(shape)
    if source.volume != m.volume or channels == out_channels:
        return
    many, few = max(channels, out_channels), min(channels, out_channels)
    block = isqrt(many // few)
    if block * block * few != many:
        return
    try:
        if many > channels:
            for crd in (False, True):
                if source.depth_to_space(block, crd).same_as(m):
                    yield Plan(
                        (Step("DepthToSpace", ((block, int(crd)),)),),
                        price("DepthToSpace", m.volume, m.volume),
                    )
            return
        unblocked = source.space_to_depth(block)
        first = Plan((Step("SpaceToDepth", ((block,),)),), price("SpaceToDepth", m.volume, m.volume))
        if unblocked.same_as(m):
            yield first
            return
        blocked = [dim[0].name if dim and dim[0].name else size_of(dim) for dim in unblocked.dims]
        for plan in _chains(blocked, _after(m, unblocked), below):
            yield Plan((*first.steps, *plan.steps), first.price + plan.price)
    except Unmappable:
        return


def _after(m: AccessMap, first: AccessMap) -> AccessMap:
    """The map from the result of `first` to the result of `m`. `first` moves each element once, and no symbolic
    dimension.
    """
    digits = first.digits
    # For each digit of the source: its step in the source, its size, its step in the result of `first`.
    radix = sorted(
        ((d.step, d.size, size_of(digits[i + 1 :])) for i, d in enumerate(digits) if not d.name), reverse=True
    )
    return replace(
        m,
        dims=tuple(
            merged([t for d in dim for t in ([d] if d.name else _translated(d, radix))]) for dim in m.dims
        ),
    )


def _translated(d: Digit, radix: Sequence[tuple[int, int, int]]) -> list[Digit]:
    """A digit over the source, as digits over a tensor that has the source's digits at new steps. `radix` has their
    (step, size, new step).
    """
    out: list[Digit] = []
    for step, size, new in radix:
        end = step * size
        if d.size == 1:
            break
        if d.step * d.size <= step or d.step < 1 or d.values:
            continue
        # The part of d that lies within this digit of the source.
        low = max(d.step, step)
        if low % step or low % d.step or (d.step * d.size) % low:
            raise Unmappable("the digits do not fit into each other")
        count = d.step * d.size // low
        if low * count > end:
            raise Unmappable("the digits do not fit into each other")
        out.append(Digit(count, low // step * new))
        d = Digit(low // d.step, d.step)
    if d.size != 1:
        raise Unmappable("the digits do not fit into each other")
    return out


# Several sources


def pieces(m: AccessMap, maximum: int = 8) -> tuple[int, list[tuple[int, int, int]]] | None:
    """A dimension along which the sources are concatenated: its axis, and (start, count, source) of each piece.

    None if there is no such dimension, or there are more than `maximum` pieces.
    """
    low, high = m.reach
    if high >= FILL // 2:
        return None
    for axis, dim in enumerate(m.dims):
        if any(d.name for d in dim) or not dim:
            continue
        values = offsets_of(dim)
        lowest = min(values)
        span = (high - low) - (max(values) - lowest)  # of the addresses for one value of this dimension
        if (low + span) // _APART != low // _APART:
            continue
        sources = [(low + v - lowest) // _APART for v in values]
        starts = [i for i, s in enumerate(sources) if i == 0 or s != sources[i - 1]]
        if 1 < len(starts) <= maximum:
            return axis, [(a, b - a, sources[a]) for a, b in pairwise([*starts, len(values)])]
    return None


@dataclass(frozen=True, slots=True)
class Joined:
    """A Concat along an axis, whose parts are computed by one chain each. `steps` follow the Concat."""

    axis: int
    parts: tuple[tuple[int, Plan], ...]
    steps: tuple[Step, ...]
    price: Price


def best_joined(
    shapes: Sequence[tuple[int | str, ...]], m: AccessMap, blocks: bool, scale: int = 1
) -> Joined:
    """The cheapest computation of a map of several sources with one chain for each. Raises Unmappable if there is
    none.
    """
    candidates: list[Joined] = []
    apart = AccessMap(tuple((d,) for d in m.digits), m.offset, m.filled)
    for layout in (m, apart):
        try:
            candidates.append(_joined(shapes, layout, m, blocks, scale))
        except Unmappable:
            continue
    if not candidates:
        raise Unmappable("the sources do not stand one behind the other")
    return min(candidates, key=lambda j: j.price.total(scale))


def _joined(
    shapes: Sequence[tuple[int | str, ...]], layout: AccessMap, m: AccessMap, blocks: bool, scale: int
) -> Joined:
    """The chains for the pieces of `layout`, a map that differs from `m` only by a Reshape."""
    cut = pieces(layout)
    if cut is None:
        raise Unmappable("the sources do not stand one behind the other")
    axis, runs = cut
    cores = [
        Core(source, layout.slice(axis, start, count, 1).within(source)) for start, count, source in runs
    ]
    parts = tuple((core.source, best(shapes[core.source], core, blocks, scale)) for core in cores)
    price_of_all = sum((plan.price for _, plan in parts), price("Concat", m.volume, m.volume))
    chain = _Chain([extent_of(dim) for dim in layout.dims], m.filled)
    chain.reshape([extent_of(dim) for dim in m.dims])
    return Joined(axis, parts, tuple(chain.steps), price_of_all + chain.price)
