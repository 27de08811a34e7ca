"""Draws random sizes, permutations, attributes and index inputs of operators, for sketches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from xrlflow.ir import Attr, DType
from xrlflow.ops.schema import defaults, schema

T = TypeVar("T")


Weighted = tuple[tuple[int, ...], tuple[float, ...]]


def weights(shares: Mapping[int, float]) -> Weighted:
    """The numbers, and the probability of each, as `weighted` needs them. The shares add up to 1."""
    sums = np.cumsum(list(shares.values()))
    return tuple(shares), tuple((sums / sums[-1]).tolist())


def weighted(rng: np.random.Generator, options: Weighted) -> int:
    """Draw a number with these probabilities, as `rng.choice` would. It takes a tenth of the time, because `rng.choice`
    checks the probabilities in each call.
    """
    numbers, sums = options
    return numbers[bisect_right(sums, rng.random())]


_SIZES = weights({1: 0.22, 2: 0.26, 3: 0.22, 4: 0.16, 5: 0.05, 6: 0.06, 0: 0.03})


class Draw:
    """Random choices. The same `seed` gives the same choices."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        """A random integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def permutation(self, n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self.rng.permutation(n))

    def subset(self, n: int) -> tuple[int, ...]:
        """A random subset of 0 ... n - 1 with at least one element, in ascending order."""
        indices = tuple(i for i in range(n) if self.chance(0.5))
        return indices or (self.integer(0, n - 1),)

    def dim(self) -> int:
        """A random size of a dimension: mostly 1 to 4, seldom 5, 6 or 0."""
        return weighted(self.rng, _SIZES)

    def normals(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """Standard normal float32 numbers."""
        return self.rng.standard_normal(tuple(shape)).astype(np.float32)

    def eighths(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """Float32 multiples of 1/8, with magnitudes from 1/8 to 4. Sums and products of a few of them are exact in
        float32.
        """
        size = self.rng.integers(1, 33, tuple(shape)) / 8.0
        signed: np.ndarray[Any, Any] = (size * self.rng.choice([-1.0, 1.0], tuple(shape))).astype(np.float32)
        return signed

    def axis(self, rank: int) -> int:
        return self.integer(-rank, rank - 1) if rank else 0


# Functions that draw attributes, by operator and attribute. Each gets the shapes of the inputs; if it returns None, the
# attribute is left out.
Shapes = Sequence[tuple[int, ...] | None]
DrawAttr = Callable[[Draw, Shapes], Attr | None]


def _axis(draw: Draw, shapes: Shapes) -> Attr | None:
    return draw.axis(len(shapes[0] or ()))


def _perm(draw: Draw, shapes: Shapes) -> Attr | None:
    return draw.permutation(len(shapes[0] or ()))


def _spatial(shapes: Shapes) -> int:
    return max(len(shapes[0] or ()) - 2, 0)


def _each(low: int, high: int, twice: bool = False, often: float = 0.4) -> DrawAttr:
    """A function that draws one number for each spatial dimension (with `twice` two), with probability `often`;
    otherwise the attribute is left out.
    """

    def draw_each(draw: Draw, shapes: Shapes) -> Attr | None:
        if not draw.chance(often):
            return None
        return tuple(draw.integer(low, high) for _ in range(_spatial(shapes) * (2 if twice else 1)))

    return draw_each


def _kernel(draw: Draw, shapes: Shapes) -> Attr | None:
    return tuple(draw.integer(1, 3) for _ in range(_spatial(shapes)))


def _flag(draw: Draw, shapes: Shapes) -> Attr | None:
    return draw.integer(0, 1)


def _epsilon(draw: Draw, shapes: Shapes) -> Attr | None:
    return float(np.float32(draw.choice([1e-5, 1e-3, 0.125])))


def _factor(draw: Draw, shapes: Shapes) -> Attr | None:
    return draw.choice([None, 0.5, 2.0, -1.5, 0.25])


def _mode(*options: str) -> DrawAttr:
    def draw_mode(draw: Draw, shapes: Shapes) -> Attr | None:
        return draw.choice(options) if draw.chance(0.3) else None

    return draw_mode


def _group(draw: Draw, shapes: Shapes) -> Attr | None:
    """A number of groups g for which x[N,C,...] and w[M,C/g,...] fit, or None."""
    x, w = shapes[0], shapes[1]
    if x is None or w is None or len(x) < 2 or len(w) < 2 or not w[1]:
        return None
    return max(x[1] // w[1], 1)


def _transposed_group(draw: Draw, shapes: Shapes) -> Attr | None:
    """A number of groups for x[N,C,...] and w[C,M/g,...]: a divisor of the channels C."""
    channels = (shapes[0] or (1, 1))[1]
    return draw.choice([g for g in (1, 2, 3, 4) if channels % g == 0])


def _to(draw: Draw, shapes: Shapes) -> Attr | None:
    options = (
        DType.FLOAT,
        DType.DOUBLE,
        DType.INT64,
        DType.INT32,
        DType.FLOAT16,
        DType.BOOL,
        DType.INT8,
        DType.UINT8,
    )
    return int(draw.choice(options))


_WINDOW: dict[str, DrawAttr] = {
    "strides": _each(1, 3),
    "dilations": _each(1, 2, often=0.25),
    "pads": _each(0, 2, twice=True),
}

ATTRIBUTES: dict[str, dict[str, DrawAttr]] = {
    "Conv": {**_WINDOW, "group": _group, "auto_pad": _mode("SAME_UPPER", "SAME_LOWER", "VALID")},
    "ConvTranspose": {
        **_WINDOW,
        "group": _transposed_group,
        "auto_pad": _mode("SAME_UPPER", "SAME_LOWER", "VALID"),
        "output_padding": _each(0, 1, often=0.15),
    },
    "MaxPool": {**_WINDOW, "kernel_shape": _kernel, "ceil_mode": _flag},
    "AveragePool": {**_WINDOW, "kernel_shape": _kernel, "ceil_mode": _flag, "count_include_pad": _flag},
    "Gemm": {"alpha": _factor, "beta": _factor, "transA": _flag, "transB": _flag},
    "BatchNormalization": {"epsilon": _epsilon, "momentum": _factor},
    "Pad": {"mode": _mode("constant", "edge", "reflect", "wrap")},
    "Cast": {"to": _to},
    "Transpose": {"perm": _perm},
    "Dropout": {"seed": _flag},
    "Reshape": {"allowzero": lambda draw, shapes: 1 if draw.chance(0.1) else None},
}


def attribute(draw: Draw, op: str, name: str, shapes: Shapes) -> Attr | None:
    """Draw a value for one attribute of an operator. None: the attribute is left out."""
    special = ATTRIBUTES.get(op, {}).get(name)
    if special is not None:
        return special(draw, shapes)
    if name == "axis":
        return _axis(draw, shapes)
    if name == "epsilon":
        return _epsilon(draw, shapes)
    default = defaults(op).get(name)
    if isinstance(default, bool | int):
        return draw.choice([default, 1 - default] if default in (0, 1) else [default, default + 1])
    if isinstance(default, float):
        return draw.choice([default, 0.5, 0.25, 2.0])
    return None


def attributes(draw: Draw, op: str, shapes: Shapes) -> dict[str, Attr]:
    """Draw values for the attributes of an operator. Some attributes are left out."""
    defined = schema(op)
    names = [*ATTRIBUTES.get(op, {})] or ([] if defined is None else [*defined.attributes])
    out: dict[str, Attr] = {}
    for name in names:
        value = attribute(draw, op, name, shapes)
        if value is not None:
            out[name] = value
    if "auto_pad" in out and out["auto_pad"] != "NOTSET":
        if draw.chance(0.6):
            del out["auto_pad"]
        else:
            out.pop("pads", None)
            out.pop("output_padding", None)
    return out


# Index inputs: sizes, axes and indices, not data.


def factors(draw: Draw, size: int, parts: int) -> list[int]:
    """`parts` random factors whose product is `size`."""
    out = []
    for _ in range(parts - 1):
        options = [d for d in range(1, size + 1) if size % d == 0] if size > 0 else [1]
        out.append(draw.choice(options))
        size //= out[-1]
    return [*out, size]


def target_shape(draw: Draw, shape: tuple[int, ...]) -> list[int]:
    """A random target of Reshape: dimensions merged, split, flattened or unchanged; sometimes with a -1 or with 0s."""
    if 0 in shape:
        return list(shape)
    kind = draw.integer(0, 3)
    out: list[int]
    if kind == 0 or not shape:
        out = factors(draw, prod(shape), draw.integer(1, 4))
    elif kind == 1:  # neighbouring dimensions are merged
        at = draw.integer(0, len(shape) - 1)
        out = [*shape[:at], prod(shape[at : at + 2]), *shape[at + 2 :]]
    elif kind == 2:  # one dimension is split in two
        at = draw.integer(0, len(shape) - 1)
        out = [*shape[:at], *factors(draw, shape[at], 2), *shape[at + 1 :]]
    else:
        out = list(shape)
    if draw.chance(0.3):
        out[draw.integer(0, len(out) - 1)] = -1
    elif draw.chance(0.3):
        out = [0 if i < len(shape) and d == shape[i] and draw.chance(0.5) else d for i, d in enumerate(out)]
    return out


# A function index(draw, shape, given) draws the numbers of an index input. `shape` is the shape of the operator's first
# input, `given` the numbers of its earlier index inputs, by position. None stands for an input that is data.
DrawIndex = Callable[[Draw, tuple[int, ...], Mapping[int, Any]], Any | None]


def _expanded(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    lead = [draw.dim() for _ in range(draw.integer(0, 1))]
    own = [draw.choice([d, 1]) if d != 1 else draw.integer(1, 3) for d in shape]
    return np.array([*lead, *own], np.int64)


def _repeats(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    return np.array([draw.choice([1, 1, 2]) for _ in shape], np.int64)


def _starts(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    count = draw.integer(1, max(len(shape), 1))
    return np.array([draw.choice([0, 0, 1, -2, -1]) for _ in range(count)], np.int64)


def _ends(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    return np.array([draw.choice([2**31 - 1, 2**63 - 1, 1, 2, 3, -1]) for _ in constants[1]], np.int64)


def _sliced_axes(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    rank = len(shape)
    axes = draw.permutation(rank)[: len(constants[1])]
    return np.array([a - rank if draw.chance(0.3) else a for a in axes], np.int64)


def _steps(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    return np.array([draw.choice([1, 1, 1, 2]) for _ in constants[1]], np.int64)


def _squeezed_axes(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    ones = [i for i, d in enumerate(shape) if d == 1] or [0]
    return np.array([ones[i] for i in draw.subset(len(ones))], np.int64)


def _unsqueezed_axes(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    count = draw.integer(1, 2)
    rank = len(shape) + count
    axes = sorted(draw.permutation(rank)[:count])
    return np.array([a - rank if draw.chance(0.3) else a for a in axes], np.int64)


def _pads(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    rank = len(shape)
    pads = np.array([draw.choice([0, 0, 1, 2]) for _ in range(2 * rank)], np.int64)
    kind = draw.integer(0, 9)
    if kind < 3:
        pads[:] = 0
    elif kind < 7:  # the spatial dimensions, not the channels or the batch
        pads.reshape(2, rank)[:, :2] = 0
    return pads


def _gathered(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    last = max((shape[0] if shape else 1) - 1, 0)
    return np.array([draw.integer(0, last) for _ in range(draw.integer(1, 3))], np.int64)


def _reduced_axes(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any:
    return np.array(draw.subset(len(shape)) if shape else (), np.int64)


def _parts(draw: Draw, shape: tuple[int, ...], constants: Mapping[int, Any]) -> Any | None:
    if not shape:
        return None
    first = draw.integer(0, shape[0])
    return np.array([first, shape[0] - first], np.int64)


def _one_of(*options: float) -> DrawIndex:
    return lambda draw, shape, constants: np.float32(draw.choice(options))


# The functions that draw index inputs, by operator and index of the input.
_INDICES: dict[tuple[str, int], DrawIndex] = {
    ("Reshape", 1): lambda draw, shape, constants: np.array(target_shape(draw, shape), np.int64),
    ("Expand", 1): _expanded,
    ("Tile", 1): _repeats,
    ("Slice", 1): _starts,
    ("Slice", 2): _ends,
    ("Slice", 3): _sliced_axes,
    ("Slice", 4): _steps,
    ("Squeeze", 1): _squeezed_axes,
    ("Unsqueeze", 1): _unsqueezed_axes,
    ("Pad", 1): _pads,
    ("Pad", 2): _one_of(0.0, 0.0, 0.0, 1.5),
    ("Pad", 3): lambda draw, shape, constants: np.arange(len(shape)),
    ("Gather", 1): _gathered,
    ("Split", 1): _parts,
    ("Clip", 1): _one_of(-1.0, 0.0, 0.5, 1.0, 6.0, -0.25),
    ("Clip", 2): _one_of(0.0, 0.5, 1.0, 3.0, 6.0),
    ("Dropout", 1): lambda draw, shape, constants: np.float32(0.5),
    ("Dropout", 2): lambda draw, shape, constants: np.bool_(draw.chance(0.2)),
}


def index_input(draw: Draw, op: str, index: int, shapes: Shapes, constants: Mapping[int, Any]) -> Any | None:
    """Draw the numbers of an index input of an operator; None if this input is data.

    `constants` holds the numbers of the operator's earlier index inputs, by position.
    """
    function = _reduced_axes if op.startswith("Reduce") and index == 1 else _INDICES.get((op, index))
    return None if function is None else function(draw, shapes[0] or (), constants)
