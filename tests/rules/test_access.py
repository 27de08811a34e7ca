"""Access maps against NumPy: what operators do to them, and the operators that are made from them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewrite_rules.access import (
    FILL,
    LONGEST,
    AccessMap,
    Core,
    Digit,
    Price,
    Step,
    Unmappable,
    _translated,
    best,
    best_joined,
    cheapest,
    core_of,
    factored,
    offsets_of,
    pieces,
    plans,
)

SYMBOLS = {"N": 2, "M": 3}
OTHERS = {"N": 5, "M": 1}
PROFILE = settings(
    max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

Shape = tuple[int | str, ...]


def bound(shape: Shape, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[d] if isinstance(d, str) else d for d in shape)


def elements(shape: Shape, sizes: dict[str, int]) -> np.ndarray:
    """A source, each element of which is its own place."""
    full = bound(shape, sizes)
    return np.arange(prod(full)).reshape(full)


def read(m: AccessMap, shape: Shape, sizes: dict[str, int]) -> np.ndarray:
    """What a map of one source says the places are; -1 for what a Pad puts in."""
    digits = m.digits
    lengths = [sizes[d.name] if d.name else d.size for d in digits]
    address = np.full(lengths, m.offset, object)
    symbols = {}
    for i, (d, n) in enumerate(zip(digits, lengths)):
        along = [n if k == i else 1 for k in range(len(digits))]
        if d.name:
            symbols[d.step] = np.broadcast_to(np.arange(n).reshape(along), lengths)
        else:
            address = address + np.array(d.offsets, object).reshape(along)
    put_in = address >= FILL // 2
    address = np.where(put_in, 0, address).astype(np.int64)
    numbers = [d for d in shape if isinstance(d, int)]
    places = iter(np.unravel_index(address, numbers or (1,)))
    index = [symbols[i] if isinstance(d, str) else next(places) for i, d in enumerate(shape)]
    flat = np.ravel_multi_index(index, bound(shape, sizes)) if shape else address
    flat = np.where(put_in, -1, flat)
    return flat.reshape([prod(sizes[d.name] if d.name else d.size for d in dim) for dim in m.dims])


def reshaped(x: np.ndarray, numbers: tuple[int, ...]) -> np.ndarray:
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(numbers)])


def sliced(x: np.ndarray, axis: int, start: int, count: int, step: int) -> np.ndarray:
    return np.take(x, [start + i * step for i in range(count)], axis)


def to_depth(x: np.ndarray, b: int) -> np.ndarray:
    n, c, h, w = x.shape
    apart = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return apart.reshape(n, c * b * b, h // b, w // b)


def to_space(x: np.ndarray, b: int, crd: int) -> np.ndarray:
    n, c, h, w = x.shape
    k = c // (b * b)
    if crd:
        parts = x.reshape(n, k, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    else:
        parts = x.reshape(n, b, b, k, h, w).transpose(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, k, h * b, w * b)


def execute(x: np.ndarray, steps: tuple[Step, ...]) -> np.ndarray:
    """A plan in NumPy."""
    for step in steps:
        a = step.numbers
        if step.op == "Reshape":
            x = reshaped(x, a[0])
        elif step.op == "Squeeze":
            x = x.squeeze(a[0])
        elif step.op == "Unsqueeze":
            x = np.expand_dims(x, a[0])
        elif step.op == "Transpose":
            x = x.transpose(a[0])
        elif step.op == "Slice":
            index: list[Any] = [slice(None)] * x.ndim
            for start, end, axis, *by in zip(*a):
                stop = end + x.shape[axis] if end < 0 else end
                index[axis] = slice(start, None if stop < 0 else stop, by[0] if by else 1)
            x = x[tuple(index)]
        elif step.op == "Gather":
            x = np.take(x, a[1], a[0][0])
        elif step.op == "Pick":
            x = np.take(x, a[1][0], a[0][0])
        elif step.op == "Expand":
            x = np.broadcast_to(x, np.broadcast_shapes(x.shape, a[0]))
        elif step.op == "DepthToSpace":
            x = to_space(x, *a[0])
        elif step.op == "SpaceToDepth":
            x = to_depth(x, a[0][0])
        else:
            pads, axes = a
            widths = [(0, 0)] * x.ndim
            for i, axis in enumerate(axes):
                widths[axis] = (pads[i], pads[i + len(axes)])
            x = np.pad(x, widths, constant_values=-1)
    return x


class Moved:
    """A map and what NumPy says, for two bindings of the symbols, after the same operators."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.map = AccessMap.source(shape)
        self.arrays = [elements(shape, s) for s in (SYMBOLS, OTHERS)]

    def apply(self, map: Any, array: Any) -> bool:
        """Do something to both; False, and nothing is done, if the map cannot or NumPy does not."""
        try:
            arrays = [array(a) for a in self.arrays]
            self.map = map(self.map)
        except (Unmappable, ValueError, IndexError):
            return False
        self.arrays = arrays
        return True

    def check(self) -> None:
        for array, sizes in zip(self.arrays, (SYMBOLS, OTHERS)):
            np.testing.assert_array_equal(read(self.map, self.shape, sizes), array)

    def check_plans(self) -> int:
        found = 0
        core = core_of(self.map)
        for plan in plans(self.shape, core, True) if core is not None else ():
            found += 1
            assert plan.price.total() >= (core.price + cheapest(self.shape, core.map)).total()
            ops = [s.op for s in plan.steps]
            views = sum(op in ("Reshape", "Squeeze", "Unsqueeze") for op in ops)
            assert plan.price.operators == len(ops) - views
            assert plan.price.views == views + 2 * ops.count("Gather")
            for array, sizes in zip(self.arrays, (SYMBOLS, OTHERS)):
                np.testing.assert_array_equal(execute(elements(self.shape, sizes), plan.steps), array)
        return found


@st.composite
def factorings(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Numbers with that product."""
    out: list[int] = []
    while total > 1 and len(out) < 5:
        n = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        out.append(n)
        total //= n
    return (*out, total)


def move(draw: st.DrawFn, state: Moved) -> None:
    """One random operator."""
    a = state.arrays[0]
    rank = a.ndim
    op = draw(
        st.sampled_from(
            (
                "reshape",
                "reshape",
                "transpose",
                "transpose",
                "slice",
                "slice",
                "gather",
                "expand",
                "tile",
                "pad",
            )
            + ("squeeze", "unsqueeze", "flatten", "concat", "depth", "space", "symbols")
        )
    )
    axis = draw(st.integers(0, max(rank - 1, 0)))
    size = a.shape[axis] if rank else 0
    if op == "reshape" and not any(isinstance(d, str) for d in state.shape):
        numbers = draw(factorings(a.size))
        state.apply(lambda m: m.reshape(numbers), lambda x: x.reshape(numbers))
    elif op in ("reshape", "symbols"):
        options = st.sampled_from([0, -1, 1, 2, 3, 4, 6, 8, 12])
        numbers = tuple(draw(st.lists(options, min_size=1, max_size=5)))
        if numbers.count(-1) < 2:
            state.apply(lambda m: m.reshape(numbers), lambda x: reshaped(x, numbers))
    elif op == "transpose":
        perm = draw(st.permutations(range(rank)))
        state.apply(lambda m: m.transpose(perm), lambda x: x.transpose(perm))
    elif op == "slice" and size:
        start = draw(st.integers(0, size - 1))
        by = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        count = draw(st.integers(1, max(1, len(range(start, size if by > 0 else -1, by)))))
        state.apply(lambda m: m.slice(axis, start, count, by), lambda x: sliced(x, axis, start, count, by))
    elif op == "gather" and size:
        indices = draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=6))
        shape = draw(st.sampled_from([(len(indices),), (len(indices), 1), ()]))
        taken = indices if shape else indices[:1]
        index = np.array(taken).reshape(shape)
        state.apply(lambda m: m.gather(axis, taken, shape), lambda x: np.take(x, index, axis))
    elif op == "expand":
        more = draw(st.lists(st.integers(1, 3), max_size=2))
        numbers = (*more, *(1 if n > 1 else draw(st.integers(1, 3)) for n in a.shape))
        state.apply(
            lambda m: m.expand(numbers), lambda x: np.broadcast_to(x, np.broadcast_shapes(x.shape, numbers))
        )
    elif op == "tile" and a.size < 100:
        numbers = tuple(draw(st.integers(1, 2)) for _ in range(rank))
        state.apply(lambda m: m.tile(numbers), lambda x: np.tile(x, numbers))
    elif op == "pad" and size:
        before, after = ([draw(st.integers(0, 2)) if k == axis else 0 for k in range(rank)] for _ in range(2))
        widths = list(zip(before, after))
        state.apply(lambda m: m.pad(before, after), lambda x: np.pad(x, widths, constant_values=-1))
    elif op == "squeeze":
        axes = tuple(i for i in range(rank) if a.shape[i] == 1 and draw(st.booleans()))
        state.apply(lambda m: m.squeeze(axes), lambda x: x.squeeze(axes))
    elif op == "unsqueeze":
        at = draw(st.integers(0, rank))
        state.apply(lambda m: m.unsqueeze([at]), lambda x: np.expand_dims(x, at))
    elif op == "flatten":
        state.apply(
            lambda m: m.flatten(axis), lambda x: x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))
        )
    elif op == "concat" and size and a.size < 100:
        cut = draw(st.integers(1, size))

        def turned(m: AccessMap) -> AccessMap:
            parts = [m.slice(axis, cut, size - cut, 1)] if cut < size else []
            return AccessMap.concat([*parts, m.slice(axis, 0, cut, 1), m], axis)

        state.apply(
            turned,
            lambda x: np.concatenate(
                [np.take(x, range(cut, size), axis), np.take(x, range(cut), axis), x], axis
            ),
        )
    elif op in ("depth", "space") and rank == 4:
        crd = draw(st.integers(0, 1))
        if op == "depth":
            state.apply(lambda m: m.space_to_depth(2), lambda x: to_depth(x, 2))
        else:
            state.apply(lambda m: m.depth_to_space(2, bool(crd)), lambda x: to_space(x, 2, crd))


def dims(*symbols: str) -> st.SearchStrategy[Shape]:
    one = st.sampled_from([1, 2, 3, 4, 6, *symbols])
    return st.lists(one, max_size=4).map(tuple)


@PROFILE
@given(st.data())
def test_maps_and_plans(data):
    """Random chains: the map is what NumPy computes, and so is every chain that is made from the map."""
    state = Moved(data.draw(dims()))
    for _ in range(data.draw(st.integers(1, 6))):
        move(data.draw, state)
    state.check()
    state.check_plans()


@PROFILE
@given(st.data())
def test_symbolic_dimensions(data):
    """What holds for one binding of the symbols must hold for another."""
    shape = data.draw(dims("N", "M"))
    if len({d for d in shape if isinstance(d, str)}) < sum(isinstance(d, str) for d in shape):
        shape = tuple(d for i, d in enumerate(shape) if isinstance(d, int) or d not in shape[:i])
    state = Moved(shape)
    for _ in range(data.draw(st.integers(1, 5))):
        move(data.draw, state)
    state.check()
    state.check_plans()


@PROFILE
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=24), st.integers(1, 4), st.integers(-40, 40))
def test_factored(values, repeats, step):
    """Digits add up to the very numbers that they were made from."""
    values = [v + i * step for i in range(repeats) for v in values]
    assert offsets_of(factored(values)) == [v - values[0] for v in values]


def test_factored_is_regular_where_it_can_be():
    assert factored(range(12)) == (Digit(12, 1),)
    assert factored([0, 4, 1, 5]) == (Digit(2, 1), Digit(2, 4))
    assert factored([0, 2, 4, 1, 3, 5]) == (Digit(2, 1), Digit(3, 2))
    assert factored([0, 0, 0]) == (Digit(3, 0),)
    assert factored([3, 5, 4]) == (Digit(3, 0, (0, 2, 1)),)
    assert factored([5, 9, 6, 10]) == (Digit(2, 1), Digit(2, 4))


def test_digits():
    assert Digit(3, 2).reach == (0, 4)
    assert Digit(3, -2).reach == (-4, 0)
    assert Digit(1, 2, (), "N").reach == (0, 0)
    assert Digit(4, 0, (0, 1, 5, 6)).split(2) == (Digit(2, 5), Digit(2, 1))
    with pytest.raises(Unmappable):
        Digit(4, 0, (0, 1, 5, 7)).split(2)
    assert AccessMap.source((6,)).slice(0, 5, 6, -1).reach == (0, 5)


def test_irregular_positions_are_cut():
    m = AccessMap.source((6,)).gather(0, [0, 3, 1, 5], (4,)).slice(0, 0, 2, 2)
    assert offsets_of(m.dims[0]) == [0, 1]


def test_symbols_at_the_end_of_a_reshape():
    m = AccessMap.source(("N", 2, "M"))
    assert m.reshape([-1, 1, 0]).dims == (m.dims[0] + m.dims[1], (), m.dims[2])


@pytest.mark.parametrize(
    ("shape", "moves", "price"),
    [
        ((4, 6), lambda m: m, Price()),
        ((4, 6), lambda m: m.reshape([24]), Price()),
        ((4, 6), lambda m: m.transpose([1, 0]), Price(48, 1)),
        ((1, 6), lambda m: m.expand([4, 6]), Price(24, 1)),
        (("N", 6), lambda m: m.slice(1, 0, 3, 1), Price(6, 1)),
        ((6, "N"), lambda m: m.slice(0, 0, 3, 1), Price(6, 1)),
        ((6, "N", 4), lambda m: m.slice(0, 0, 3, 1), Price(24, 1)),
        (("N", 6), lambda m: m.transpose([1, 0]), Price(12, 1)),
        (("N", 6), lambda m: m.slice(1, 0, 3, 1).transpose([1, 0]), Price(6, 2)),
        ((6, "N"), lambda m: m.slice(0, 0, 3, 1).transpose([1, 0]), Price(6, 2)),
        (("N", "M", 6), lambda m: m.slice(2, 0, 3, 1).transpose([1, 0, 2]), Price(6, 2)),
        (("N", 1, 6), lambda m: m.expand([1, 4, 1]).transpose([2, 1, 0]), Price(24, 2)),
        (("N", 1, 6), lambda m: m.expand([1, 4, 1]).transpose([1, 0, 2]), Price(24, 1)),
    ],
)
def test_cheapest(shape, moves, price):
    """So many operators are needed, and do, here."""
    m = moves(AccessMap.source(shape))
    assert cheapest(shape, m) == price
    assert best(shape, core(m), True).price.operators == price.operators


def test_blocks_are_more_than_one():
    """SpaceToDepth of blocks of 1 is nothing, and is not tried."""
    shape: Shape = (1, 4, 2, 2)
    m = AccessMap.source(shape).transpose([0, 1, 3, 2])
    assert {s.op for p in plans(shape, core(m), True) for s in p.steps} <= {"Reshape", "Transpose"}


def test_pads_of_long_dimensions():
    m = AccessMap.source((LONGEST - 100,))
    assert m.pad([60], [40]).volume == LONGEST
    for before, after in ((60, 41), (0, 101), (101, 0), (102, -1)):
        with pytest.raises(Unmappable):
            m.pad([before], [after])
    assert core_of(AccessMap.source((LONGEST + 1, 2)).pad([0, 1], [0, 0])) is not None
    for shape in (("N", 2), (LONGEST, 2)):  # a Pad in the middle of what is symbolic, or long
        assert core_of(AccessMap.source(shape).pad([0, 1], [0, 0]).reshape([-1])) is None


def test_long_dimensions_are_not_put_together():
    m = AccessMap.source((LONGEST // 2,))
    assert AccessMap.concat([m, m], 0).volume == LONGEST
    with pytest.raises(Unmappable):
        AccessMap.concat([m, m, m.slice(0, 0, 1, 1)], 0)


@pytest.mark.parametrize(
    ("shape", "moves"),
    [
        ((4, 2), lambda m: m.reshape([8]).slice(0, 0, 5, 1)),  # to the middle of a row
        ((2, 4), lambda m: m.reshape([8]).gather(0, [2, 4, 3], (3,))),  # from one row to the next
    ],
)
def test_positions_across_dimensions(shape, moves):
    """Every chain that is tried is right."""
    m = moves(AccessMap.source(shape))
    found = list(plans(shape, core(m), True))
    assert found
    for plan in found:
        np.testing.assert_array_equal(execute(elements(shape, SYMBOLS), plan.steps), read(m, shape, SYMBOLS))


def test_neighbours_stay_together_where_others_are_repeated():
    shape = (2, 3)
    m = AccessMap.source(shape).transpose([1, 0]).reshape([6, 1]).expand([6, 4]).reshape([24])
    ops = {s.op: s.numbers for s in best(shape, core(m), True).steps[:-1]}
    assert ops == {"Transpose": ((1, 0),), "Reshape": ((6, 1),), "Expand": ((1, 4),)}


# What has 2 times 3 positions in one order, each with the step that it has in another.
RADIX = [(3, 2, 1), (1, 3, 2)]


@pytest.mark.parametrize(
    ("digit", "radix", "found"),
    [
        (Digit(6, 1), RADIX, [Digit(2, 1), Digit(3, 2)]),
        (Digit(3, 1), RADIX, [Digit(3, 2)]),
        (Digit(2, 3), RADIX, [Digit(2, 1)]),
        (Digit(3, 2), [(2, 6, 5)], [Digit(3, 5)]),
        (Digit(2, 3), [(2, 6, 1)], None),  # a step of 3 is none of 2
        (Digit(3, 2), [(3, 4, 1), (1, 3, 4)], None),  # nor are steps of 2 of 3
        (Digit(5, 1), [(3, 4, 1), (1, 3, 4)], None),  # one is cut
        (Digit(4, 3), RADIX, None),  # there are 2
        (Digit(2, 6), RADIX, None),  # there is none so far apart
        (Digit(3, 0, (0, 2, 1)), RADIX, None),
    ],
)
def test_digits_in_another_order(digit, radix, found):
    if found is None:
        with pytest.raises(Unmappable):
            _translated(digit, radix)
    else:
        assert [d for d in _translated(digit, radix) if d.size > 1] == found


def test_pieces():
    shapes: list[Shape] = [("N", 2, 3)] * 9
    sources = [AccessMap.source(s, i) for i, s in enumerate(shapes)]
    x, y, z, u = sources[:4]
    assert pieces(AccessMap.concat([x, y], 2).reshape([-1, 6])) == (1, [(0, 3, 0), (3, 3, 1)])
    assert pieces(AccessMap.concat([y, z], 2).slice(2, 5, 6, -1)) == (2, [(0, 3, 2), (3, 3, 1)])
    assert pieces(AccessMap.concat([y, z], 2).slice(1, 1, 2, -1)) == (2, [(0, 3, 1), (3, 3, 2)])
    assert pieces(AccessMap.concat([y, z], 2).slice(2, 2, 2, 1)) == (2, [(0, 1, 1), (1, 1, 2)])
    assert pieces(AccessMap.concat(sources[:8], 2)) == (2, [(3 * i, 3, i) for i in range(8)])
    assert pieces(AccessMap.concat(sources, 2)) is None
    assert pieces(x) is None
    grid = AccessMap.concat([AccessMap.concat([x, y], 1), AccessMap.concat([z, u], 1)], 2)
    assert pieces(grid) is None
    assert pieces(AccessMap.concat([x, y], 2).pad([0, 0, 0], [0, 0, 1])) is None


def core(m: AccessMap) -> Core:
    found = core_of(m)
    assert found is not None
    return found


def steps(shape: Shape, m: AccessMap, blocks: bool = True) -> list[str]:
    plan = best(shape, core(m), blocks)
    for sizes in (SYMBOLS, OTHERS):
        np.testing.assert_array_equal(execute(elements(shape, sizes), plan.steps), read(m, shape, sizes))
    return [s.op for s in plan.steps]


@pytest.mark.parametrize(
    ("shape", "moves", "ops"),
    [
        ((2, 3), lambda m: m.transpose([1, 0]).transpose([1, 0]), []),
        ((2, 3, 4), lambda m: m.reshape([6, 4]).reshape([3, 8]), ["Reshape"]),
        (
            ("N", 6, 4),
            lambda m: m.reshape([0, 2, 3, 4]).transpose([0, 3, 1, 2]).reshape([0, 4, 6]),
            ["Transpose"],
        ),
        (("N", 6, 4), lambda m: m.reshape([0, 2, 3, 4]).transpose([0, 2, 1, 3]), ["Reshape", "Transpose"]),
        (("N", 6), lambda m: m.slice(1, 1, 4, 1).slice(1, 1, 2, 2), ["Slice"]),
        (("N", 6), lambda m: m.slice(1, 5, 6, -1).slice(1, 5, 3, -2), ["Slice"]),
        (("N", 2, 3), lambda m: m.reshape([0, 6]).slice(1, 3, 3, 1), ["Pick"]),
        (("N", 2, 3), lambda m: m.slice(1, 1, 1, 1).squeeze([1]), ["Pick"]),
        (("N", 5), lambda m: AccessMap.concat([m.slice(1, 2, 3, 1), m.slice(1, 0, 2, 1)], 1), ["Gather"]),
        (("N", 1, 4), lambda m: m.expand([1, 5, 4]).slice(1, 0, 2, 1), ["Expand"]),
        ((4, 6), lambda m: m.reshape([2, 2, 3, 2]).transpose([0, 2, 1, 3]), ["Reshape", "Transpose"]),
        (("N", 4), lambda m: m.pad([0, 1], [0, 0]).pad([0, 0], [0, 2]), ["Pad"]),
        (("N", 4), lambda m: m.pad([0, 1], [0, 1]).slice(1, 1, 4, 1), []),
        (("N", 8, 2, 3), lambda m: m.depth_to_space(2, True), ["DepthToSpace"]),
        (("N", 8, 2, 3), lambda m: m.depth_to_space(2, False), ["DepthToSpace"]),
        (("N", 1, "M", 1, 2), lambda m: m.squeeze([1]), ["Squeeze"]),
        ((1, "N", "M"), lambda m: m.squeeze([0]).unsqueeze([2]), ["Squeeze", "Unsqueeze"]),
        (("N", "M", 1), lambda m: m.squeeze([2]).unsqueeze([0]), ["Squeeze", "Unsqueeze"]),
        ((1, "N", "M", 2), lambda m: m.squeeze([0]).unsqueeze([2]), ["Squeeze", "Unsqueeze"]),
        ((3, "N", "M", 2), lambda m: m.slice(0, 1, 1, 1).squeeze([0]), ["Pick"]),
        (("N", 2, 4, 6), lambda m: m.space_to_depth(2), ["SpaceToDepth"]),
        ((2, 3, 4, 5), lambda m: m.slice(3, 0, 3, 1).reshape([24, 3]), ["Slice", "Reshape"]),
    ],
)
def test_best(shape, moves, ops):
    m = moves(AccessMap.source(shape))
    assert steps(shape, m) == ops


def test_focus_in_another_order():
    """The space-to-depth of YOLOv5 has width before height."""
    m = AccessMap.source(("N", 3, 640, 640))
    parts = [m.slice(2, i, 320, 2).slice(3, j, 320, 2) for j in (0, 1) for i in (0, 1)]
    whole = AccessMap.concat(parts, 1)
    assert [p.steps[0].op for p in plans(("N", 3, 640, 640), core(whole), True)].count("SpaceToDepth")
    small = AccessMap.source(("N", 3, 4, 6))
    parts = [small.slice(2, i, 2, 2).slice(3, j, 3, 2) for j in (0, 1) for i in (0, 1)]
    for plan in plans(("N", 3, 4, 6), core(AccessMap.concat(parts, 1)), True):
        for sizes in (SYMBOLS, OTHERS):
            np.testing.assert_array_equal(
                execute(elements(("N", 3, 4, 6), sizes), plan.steps),
                read(AccessMap.concat(parts, 1), ("N", 3, 4, 6), sizes),
            )


@pytest.mark.parametrize(
    "moves",
    [
        lambda m: m.reshape([2, 6]),  # fixes N
        lambda m: m.reshape([-1, 4]),  # cuts across 6
        lambda m: m.reshape([0, 7]),
        lambda m: m.reshape([0, -1, -1]),
        lambda m: m.reshape([0, 6, 0]),
        lambda m: m.slice(0, 0, 1, 1),
        lambda m: m.slice(1, 0, 0, 1),
        lambda m: m.slice(1, 3, 4, 1),
        lambda m: m.slice(2, 0, 1, 1),
        lambda m: m.reshape([0, 6, -2]),
        lambda m: AccessMap.source(("N", "M", 6)).reshape([1, 0, -1]),
        lambda m: m.unsqueeze([0]).squeeze([0, 2]),
        lambda m: m.depth_to_space(2, True),
        lambda m: m.unsqueeze([0, 1, 2]).space_to_depth(1),
        lambda m: AccessMap.concat(
            [AccessMap.source((2, 6))] * 2 + [AccessMap.source((2, 6)).slice(1, 5, 6, -1)], 0
        ),
        lambda m: m.gather(1, [6], (1,)),
        lambda m: m.gather(1, [], (0,)),
        lambda m: m.gather(0, [0], ()),
        lambda m: m.squeeze([0]),
        lambda m: m.squeeze(None),
        lambda m: m.expand([3, 6]),
        lambda m: m.expand([1, 3]),
        lambda m: m.expand([1, 0]),
        lambda m: m.reshape([-1]).expand([6]),  # N may be more than 1
        lambda m: m.tile([1, 0]),
        lambda m: m.pad([1, 0], [0, 0]),
        lambda m: m.space_to_depth(2),
        lambda m: m.transpose([0]),
        lambda m: m.transpose([0, 1]).reshape([0, 2, 3]).transpose([0, 2, 1]).reshape([0, 4, -1]),
        lambda m: AccessMap.concat([m, m.slice(1, 5, 6, -1)], 0),
        lambda m: AccessMap.concat([m, m.transpose([1, 0])], 1),
        lambda m: AccessMap.source((2, 0)),
    ],
)
def test_unmappable(moves):
    with pytest.raises(Unmappable):
        moves(AccessMap.source(("N", 6)))


def test_a_copied_dimension_beside_an_inferred_one():
    """Reshape cannot infer a dimension beside one of 0, unless the chain could not have either."""
    shape: Shape = ("N", 2, "M")
    with pytest.raises(Unmappable):
        best(shape, core(AccessMap.source(shape).flatten(1).unsqueeze([1])), True)
    m = AccessMap.source(shape).reshape([0, -1])
    assert m.filled == {0}
    assert steps(shape, m) == ["Reshape"]


def test_sources_apart():
    shapes: list[Shape] = [("N", 2), ("N", 3)]
    x, y = (AccessMap.source(s, i) for i, s in enumerate(shapes))
    both = AccessMap.concat([x, y], 1)
    assert core_of(both) is None
    assert core(both.slice(1, 2, 3, 1)).source == 1
    assert best(("N", 3), core(both.slice(1, 2, 3, 1)), True).steps == ()
    turned = both.transpose([1, 0])
    joined = best_joined(shapes, turned, True)
    assert joined.axis == 0
    assert [(n, [s.op for s in p.steps]) for n, p in joined.parts] == [(0, ["Transpose"]), (1, ["Transpose"])]
    assert joined.steps == ()
    stacked = AccessMap.concat([x.unsqueeze([1]), x.unsqueeze([1])], 1).reshape([-1, 4])
    assert core(stacked).source == 0
    with pytest.raises(Unmappable):
        best_joined(shapes, x, True)


def test_interleaved_sources():
    """A stack that is reshaped: the pieces stand along a dimension that the result does not have."""
    shapes: list[Shape] = [("N", 6), ("N", 6)]
    parts = [AccessMap.source(s, i).unsqueeze([2]) for i, s in enumerate(shapes)]
    m = AccessMap.concat(parts, 2).reshape([0, 12])
    joined = best_joined(shapes, m, True)
    made = [execute(elements(s, SYMBOLS), p.steps) for s, (_, p) in zip(shapes, joined.parts)]
    whole = execute(np.concatenate(made, joined.axis), joined.steps)
    np.testing.assert_array_equal(whole, np.stack([elements(s, SYMBOLS) for s in shapes], 2).reshape(2, 12))


def test_symbols_of_sources_must_agree():
    """Sizes agree where a Concat puts tensors side by side, but a symbol is known by its axis in the source."""
    x, y, z = AccessMap.source(("N", 2), 0), AccessMap.source(("M", 2), 1), AccessMap.source((2, "N"), 2)
    both = AccessMap.concat([x, y], 1)
    plan = best(("M", 2), core(both.slice(1, 2, 2, 1).reshape([-1])), True)
    assert plan.steps == (Step("Reshape", ((-1,),)),)
    with pytest.raises(Unmappable):
        AccessMap.concat([x, z.transpose([1, 0])], 1)
    x, y = AccessMap.source(("N", "M", 2), 0), AccessMap.source(("K", "L", 2), 1)
    with pytest.raises(Unmappable):  # the products agree, the factors need not
        AccessMap.concat([m.transpose([2, 0, 1]).reshape([0, -1]) for m in (x, y)], 0)
