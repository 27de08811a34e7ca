"""The kinds of values that attributes and index inputs can have. A proof must try one value of each kind.

A *subject* is anything that can have several values: "Conv.strides", "Slice input 4", the dimension "n" of a rule's
declaration, "rank", "size", "type". Its values are sorted into *kinds* (a stride of 1, a larger one, unequal ones). A
value can be of several kinds. Each kind has a function that recognises its values and one that draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xrlflow.ir import ABSENT, FLOATS, Attr, DType, Graph, Node, Value
from xrlflow.ops.schema import defaults, schema
from xrlflow.prover.draw import ATTRIBUTES, Draw, Shapes


class DegenerateSample(Exception):
    """A draw failed: the parts that were drawn do not fit together."""


class UndefinedExpression(DegenerateSample):
    """The subject has no value of this kind for these shapes."""


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """A kind: similar values of one subject."""

    subject: str
    name: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.name}"


@dataclass(frozen=True, slots=True)
class Sort:
    """How to handle one kind of values: `holds` recognises them, `make` draws one (None leaves the attribute out).

    Both take the shapes of the operator's inputs; a shape is None if it is unknown or the input is absent.
    """

    name: str
    holds: Callable[[Any, Shapes], bool]
    make: Callable[[Draw, Shapes], Any]


Family = tuple[Sort, ...]


def _rank(shapes: Shapes) -> int:
    shape = shapes[0] if shapes else None
    if shape is None:
        raise UndefinedExpression("the rank is not known")
    return len(shape)


def _spatial(shapes: Shapes) -> int:
    if (count := _rank(shapes) - 2) < 1:
        raise UndefinedExpression("there are no spatial dimensions")
    return count


def _unequal(draw: Draw, count: int, low: int) -> tuple[int, ...]:
    """`count` numbers from `low` on, of which at least two differ. Raises UndefinedExpression if `count` is
    below two.
    """
    if count < 2:
        raise UndefinedExpression("one number equals itself")
    numbers = [draw.integer(low, low + 2) for _ in range(count)]
    numbers[-1] = numbers[0] + 1
    return tuple(numbers)


_FLAG: Family = (
    Sort("0", lambda v, s: not v, lambda d, s: 0),
    Sort("1", lambda v, s: v == 1, lambda d, s: 1),
)
_WINDOW: Family = (
    Sort("1", lambda v, s: not v or set(v) == {1}, lambda d, s: None),
    Sort("larger", lambda v, s: bool(v) and max(v) > 1, lambda d, s: (d.integer(2, 3),) * _spatial(s)),
    Sort("unequal", lambda v, s: bool(v) and len(set(v)) > 1, lambda d, s: _unequal(d, _spatial(s), 1)),
)
_KERNEL: Family = (
    Sort("1", lambda v, s: bool(v) and set(v) == {1}, lambda d, s: (1,) * _spatial(s)),
    *_WINDOW[1:],
)


def _uneven_pads(draw: Draw, shapes: Shapes) -> Attr:
    count = _spatial(shapes)
    begins = [draw.integer(0, 1) for _ in range(count)]
    return (*begins, begins[0] + 1, *(draw.integer(0, 1) for _ in range(count - 1)))


_PADS: Family = (
    Sort("none", lambda v, s: not v or not any(v), lambda d, s: None),
    Sort("some", lambda v, s: bool(v) and any(v), lambda d, s: (d.integer(1, 2),) * 2 * _spatial(s)),
    Sort(
        "unequal ends",
        lambda v, s: bool(v) and tuple(v[: len(v) // 2]) != tuple(v[len(v) // 2 :]),
        _uneven_pads,
    ),
)


def _channels(shapes: Shapes) -> int | None:
    shape = shapes[0] if shapes else None
    return shape[1] if shape is not None and len(shape) > 1 else None


def _undrawn(draw: Draw, shapes: Shapes) -> Attr:
    raise UndefinedExpression("it follows from the shapes")


_GROUP: Family = (
    Sort("1", lambda v, s: v in (None, 1), _undrawn),
    Sort("several", lambda v, s: (v or 1) > 1, _undrawn),
    Sort("each channel by itself", lambda v, s: (v or 1) > 1 and v == _channels(s), _undrawn),
)


def _axis(value: Any, shapes: Shapes) -> int | None:
    """An axis counted from the front; None if the rank is unknown or too low."""
    shape = shapes[0] if shapes else None
    return None if shape is None or not shape or value is None else int(value) % len(shape)


def _between(draw: Draw, shapes: Shapes) -> Attr:
    if _rank(shapes) < 3:
        raise UndefinedExpression("there is nothing between")
    return draw.integer(1, _rank(shapes) - 2)


_AXIS: Family = (
    Sort("first", lambda v, s: _axis(v, s) == 0, lambda d, s: 0),
    Sort(
        "last",
        lambda v, s: (p := _axis(v, s)) is not None and p == _rank(s) - 1,
        lambda d, s: max(_rank(s) - 1, 0),
    ),
    Sort("between", lambda v, s: (p := _axis(v, s)) is not None and 0 < p < _rank(s) - 1, _between),
)


def _perm(value: Any, shapes: Shapes) -> tuple[int, ...]:
    """The permutation of a Transpose; empty if the rank is not known."""
    if value is None:
        return () if not shapes or shapes[0] is None else tuple(range(len(shapes[0])))[::-1]
    return tuple(value)


def _ordered(perm: tuple[int, ...]) -> bool:
    return perm == tuple(sorted(perm))


def _moving(draw: Draw, shapes: Shapes) -> Attr:
    rank = _rank(shapes)
    if rank < 2:
        raise UndefinedExpression("there is nothing to move")
    while (perm := draw.permutation(rank))[-1] == rank - 1:
        pass
    return perm


def _keeping(draw: Draw, shapes: Shapes) -> Attr:
    rank = _rank(shapes)
    if rank < 3:
        raise UndefinedExpression("there is nothing to move")
    while _ordered(front := draw.permutation(rank - 1)):
        pass
    return (*front, rank - 1)


_PERM: Family = (
    Sort("identity", lambda v, s: _ordered(_perm(v, s)), lambda d, s: tuple(range(_rank(s)))),
    Sort("moves the last", lambda v, s: bool(p := _perm(v, s)) and p[-1] != len(p) - 1, _moving),
    Sort(
        "keeps the last",
        lambda v, s: bool(p := _perm(v, s)) and p[-1] == len(p) - 1 and not _ordered(p),
        _keeping,
    ),
)


def _is_type(*types: DType) -> Callable[[Any, Shapes], bool]:
    return lambda value, shapes: value is not None and DType(value) in types


_INTEGERS = (DType.INT64, DType.INT32, DType.INT8, DType.UINT8)
_TO: Family = (
    Sort("a float", _is_type(*FLOATS), lambda d, s: int(d.choice([DType.FLOAT, DType.DOUBLE]))),
    Sort("an integer", _is_type(*_INTEGERS), lambda d, s: int(d.choice(_INTEGERS))),
    Sort("boolean", _is_type(DType.BOOL), lambda d, s: int(DType.BOOL)),
)


def _options(default: str, *alternatives: str) -> Family:
    def option(text: str) -> Sort:
        return Sort(text, lambda v, s: (v or default) == text, lambda d, s: text)

    return tuple(map(option, (default, *alternatives)))


_BY_NAME: Mapping[str, Family] = {
    "strides": _WINDOW,
    "dilations": _WINDOW,
    "pads": _PADS,
    "group": _GROUP,
    "axis": _AXIS,
    "perm": _PERM,
    "auto_pad": _options("NOTSET", "SAME_UPPER", "SAME_LOWER"),
    "to": _TO,
}
_BY_OPERATOR: Mapping[tuple[str, str], Family] = {
    ("MaxPool", "kernel_shape"): _KERNEL,
    ("AveragePool", "kernel_shape"): _KERNEL,
    ("Pad", "mode"): _options("constant", "edge", "reflect", "wrap"),
    ("Resize", "mode"): _options("nearest", "linear", "cubic"),
    ("Resize", "coordinate_transformation_mode"): _options(
        "half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"
    ),
    ("Resize", "nearest_mode"): _options("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"),
    ("DepthToSpace", "mode"): _options("DCR", "CRD"),
    ("Gelu", "approximate"): _options("none", "tanh"),
    ("LSTM", "direction"): _options("forward", "reverse", "bidirectional"),
    ("GRU", "direction"): _options("forward", "reverse", "bidirectional"),
    ("RNN", "direction"): _options("forward", "reverse", "bidirectional"),
}
# Attributes whose values have no kinds: they do not change what is computed, or follow from shapes.
_SILENT = frozenset(
    {"stash_type", "momentum", "saturate", "seed", "num_outputs", "kernel_shape", "storage_order"}
)


def _number(default: float, step: float) -> Family:
    return (
        Sort("default", lambda v, s: v is None or v == default, lambda d, s: None),
        Sort("another", lambda v, s: v is not None and v != default, lambda d, s: default + step),
    )


@cache
def family(op: str, name: str) -> Family:
    """The kinds of an attribute's values; empty if its values need not be distinguished."""
    special = _BY_OPERATOR.get((op, name))
    if special is not None:
        return special
    if name in _SILENT:
        return ()
    if name in _BY_NAME:
        return _BY_NAME[name]
    default = defaults(op).get(name)
    if isinstance(default, int):
        return _FLAG if default in (0, 1) else _number(default, 1)
    return _number(default, 0.5) if isinstance(default, float) else ()


@cache
def attribute_names(op: str) -> tuple[str, ...]:
    """The names of all attributes that an operator can have."""
    defined = schema(op)
    return tuple(sorted({*(() if defined is None else defined.attributes), *ATTRIBUTES.get(op, {})}))


# Index inputs


def _ints(make: Callable[[Draw, int], Sequence[int]]) -> Callable[[Draw, Shapes], Any]:
    def draw_ints(draw: Draw, shapes: Shapes) -> Any:
        rank = _rank(shapes)
        if not rank:
            raise UndefinedExpression("there is no axis")
        return np.array(make(draw, rank), np.int64)

    return draw_ints


_AXES: Family = (
    Sort(
        "from the front", lambda v, s: v.size > 0 and v.min() >= 0, _ints(lambda d, r: [d.integer(0, r - 1)])
    ),
    Sort("from the back", lambda v, s: v.size > 0 and v.min() < 0, _ints(lambda d, r: [d.integer(-r, -1)])),
    Sort("several", lambda v, s: v.size > 1, _ints(lambda d, r: d.permutation(r)[: max(r - 1, 2)])),
)


def _ones(several: bool, back: bool) -> Callable[[Draw, Shapes], Any]:
    """A function that draws axes of size 1, for a Squeeze."""

    def draw_axes(draw: Draw, shapes: Shapes) -> Any:
        shape = shapes[0] if shapes and shapes[0] is not None else ()
        ones = [i for i, d in enumerate(shape) if d == 1]
        if len(ones) < 1 + several:
            raise UndefinedExpression("there is nothing to squeeze")
        axes = ones if several else [draw.choice(ones)]
        return np.array([i - len(shape) for i in axes] if back else axes, np.int64)

    return draw_axes


def _new_axes(several: bool, back: bool) -> Callable[[Draw, Shapes], Any]:
    """A function that draws the axes of new dimensions, for an Unsqueeze."""

    def draw_axes(draw: Draw, shapes: Shapes) -> Any:
        count = 1 + several
        rank = _rank(shapes) + count
        axes = sorted(draw.permutation(rank)[:count])
        return np.array([i - rank for i in axes] if back else axes, np.int64)

    return draw_axes


def _shaped(make: Callable[[Draw, list[int]], None]) -> Callable[[Draw, Shapes], Any]:
    """A function that draws a target of Reshape: the input's own shape with one change, which `make` makes."""

    def draw_shape(draw: Draw, shapes: Shapes) -> Any:
        shape = [*(shapes[0] or ())] if shapes else []
        if not shape:
            raise UndefinedExpression("there is no dimension")
        make(draw, shape)
        return np.array(shape, np.int64)

    return draw_shape


def _replace_one(number: int) -> Callable[[Draw, list[int]], None]:
    def replace(draw: Draw, shape: list[int]) -> None:
        shape[draw.integer(0, len(shape) - 1)] = number

    return replace


def _copies(value: Any, shapes: Shapes) -> bool:
    """Whether a target of Reshape has a 0 that copies a dimension whose size is not 0."""
    shape = shapes[0] if shapes else None
    zeros = np.flatnonzero(value == 0).tolist()
    return any(shape is None or (i < len(shape) and shape[i] != 0) for i in zeros)


def _indices(rank: int, back: bool = False) -> Callable[[Draw, Shapes], Any]:
    def draw_indices(draw: Draw, shapes: Shapes) -> Any:
        shape = shapes[0] if shapes else None
        if not shape or not min(shape):
            raise UndefinedExpression("there is nothing to gather")
        size = draw.choice([(), (1,), (2,)]) if back else (2,) * rank
        smallest = min(shape)
        return np.asarray(
            draw.rng.integers(-smallest if back else 0, 0 if back else smallest, size), np.int64
        )

    return draw_indices


def _parts(draw: Draw, shapes: Shapes) -> Any:
    size = (shapes[0] or (0,))[0] if shapes else 0
    if size < 3:
        raise UndefinedExpression("it is too small")
    return np.array([1, size - 1], np.int64)


_INDICES: Mapping[tuple[str, int], Family] = {
    ("Slice", 1): _AXES[:2],
    ("Slice", 2): (
        Sort(
            "a place",
            lambda v, s: v.size > 0 and 0 <= v.max() < 2**31 - 1,
            lambda d, s: _like(s, d.integer(1, 3)),
        ),
        Sort("the end", lambda v, s: v.size > 0 and v.max() >= 2**31 - 1, lambda d, s: _like(s, 2**63 - 1)),
        Sort("from the back", lambda v, s: v.size > 0 and v.min() < 0, lambda d, s: _like(s, -1)),
    ),
    ("Slice", 3): _AXES[:2],
    ("Slice", 4): (
        Sort("1", lambda v, s: v.size > 0 and set(v.tolist()) == {1}, lambda d, s: _like(s, 1)),
        Sort("larger", lambda v, s: v.size > 0 and v.max() > 1, lambda d, s: _like(s, 2)),
        Sort("backwards", lambda v, s: v.size > 0 and v.min() < 0, lambda d, s: _like(s, -1)),
    ),
    ("Squeeze", 1): (
        Sort("from the front", _AXES[0].holds, _ones(False, False)),
        Sort("from the back", _AXES[1].holds, _ones(False, True)),
        Sort("several", _AXES[2].holds, _ones(True, False)),
    ),
    ("Unsqueeze", 1): (
        Sort("from the front", _AXES[0].holds, _new_axes(False, False)),
        Sort("from the back", _AXES[1].holds, _new_axes(False, True)),
        Sort("several", _AXES[2].holds, _new_axes(True, False)),
    ),
    ("Reshape", 1): (
        Sort("numbers", lambda v, s: v.size > 0 and v.min() > 0, _shaped(lambda d, s: None)),
        Sort("with a -1", lambda v, s: v.size > 0 and v.min() < 0, _shaped(_replace_one(-1))),
        Sort("with a 0", _copies, _shaped(_replace_one(0))),
    ),
    ("Gather", 1): (
        Sort("a number", lambda v, s: v.ndim == 0, _indices(0)),
        Sort("a list", lambda v, s: v.ndim == 1, _indices(1)),
        Sort("a matrix", lambda v, s: v.ndim == 2, _indices(2)),
        Sort("from the back", lambda v, s: v.size > 0 and v.min() < 0, _indices(0, back=True)),
    ),
    ("Pad", 1): (
        Sort("none", lambda v, s: not v.any(), _ints(lambda d, r: [0] * 2 * r)),
        Sort(
            "some",
            lambda v, s: v.size > 0 and v.max() > 0,
            _ints(lambda d, r: [d.integer(0, 1) for _ in range(2 * r - 1)] + [1]),
        ),
        Sort("cuts", lambda v, s: v.size > 0 and v.min() < 0, _ints(lambda d, r: [0] * (2 * r - 1) + [-1])),
    ),
    ("Split", 1): (Sort("unequal", lambda v, s: len(set(v.ravel().tolist())) > 1, _parts),),
}
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def _like(shapes: Shapes, number: int) -> Any:
    """The number, repeated as often as a Slice has starts."""
    starts = shapes[1] if len(shapes) > 1 else None
    return np.full(starts or (1,), number, np.int64)


@cache
def index_family(op: str, index: int) -> Family:
    """The kinds of an index input's numbers; empty if the input is data or its numbers need not be distinguished."""
    if index == 1 and op in {f"Reduce{name}" for name in _REDUCTIONS}:
        return _AXES
    return _INDICES.get((op, index), ())


# Kinds that a graph shows


def shown(graph: Graph, subjects: Container[str]) -> Iterator[Kind]:
    """The kinds that a graph shows: of the attributes and index inputs that are among `subjects`, and of sizes and
    types.
    """
    for node in graph.nodes():
        yield from _shown_by(graph, node, subjects)
    for value in graph.inputs:
        type = graph.type(value)
        yield Kind("type", type.dtype.name.lower())
        if type.shape is None:
            yield Kind("size", "not known")
            continue
        for dim in type.shape:
            if dim in (0, 1):
                yield Kind("size", str(dim))
            elif not isinstance(dim, int):
                yield Kind("size", "not known" if dim is None else "a name")


def _shown_by(graph: Graph, node: Node, subjects: Container[str]) -> Iterator[Kind]:
    op, shapes = node.op, list[tuple[int, ...] | None]()
    for subject, name, index in _subjects(op, len(node.inputs)):
        if subject not in subjects:
            continue
        shapes = shapes or [_sizes(graph, v) for v in node.inputs]
        if name:
            value: Any = node.attrs.get(name, defaults(op).get(name))
            sorts = family(op, name)
        else:
            const = graph.const(node.inputs[index]) if node.inputs[index] != ABSENT else None
            if const is None or const.array is None:
                continue
            value = const.array
            sorts = index_family(op, index)
        for sort in sorts:
            if sort.holds(value, shapes):
                yield Kind(subject, sort.name)


def attribute_subject(op: str, name: str) -> str:
    return f"{op}.{name}"


def index_subject(op: str, index: int) -> str:
    return f"{op} input {index}"


@cache
def _subjects(op: str, inputs: int) -> tuple[tuple[str, str, int], ...]:
    """Each subject of an operator, with the name of its attribute or the index of its input."""
    attributes = [(attribute_subject(op, n), n, 0) for n in attribute_names(op) if family(op, n)]
    index_inputs = [(index_subject(op, i), "", i) for i in range(1, inputs) if index_family(op, i)]
    return (*attributes, *index_inputs)


def _sizes(graph: Graph, value: Value) -> tuple[int, ...] | None:
    """The shape of a value, with -1 for dimensions that are not numbers; None if it is unknown."""
    shape = None if value == ABSENT else graph.type(value).shape
    return None if shape is None else tuple(d if isinstance(d, int) else -1 for d in shape)
