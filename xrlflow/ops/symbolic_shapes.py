"""Finds dimensions that ONNX's inference leaves unknown, as formulas of the inputs' dimensions.

Each function returns the shapes of a node's outputs, as far as they follow from the inputs' shapes and from what is
known of the inputs' elements (`symbolic_values`). Inputs for which an operator fails need not be covered: where the
original fails, nothing has to be equal. Semantics: the ONNX operator documentation, https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xrlflow.ir import Attrs, Dim, TensorType, dims
from xrlflow.ir.dims import Formula
from xrlflow.ops.symbolic_values import Known, fits, numbers

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class _Node:
    """The inputs and attributes of a node, as the functions below read them."""

    op: str
    attrs: Attrs
    types: Sequence[TensorType | None]
    contents: Sequence[Known | None]
    inferred: Sequence[TensorType]

    def shape(self, index: int = 0) -> Shape | None:
        type = self.types[index] if index < len(self.types) else None
        return None if type is None else type.shape

    def has_input(self, index: int) -> bool:
        return index < len(self.types) and self.types[index] is not None

    def elements(self, index: int) -> list[Formula | None] | None:
        """The elements of an input that is a list of integers (None for an unknown element); None if nothing is known
        of them.
        """
        content = self.contents[index] if index < len(self.contents) else None
        return None if content is None else [e if isinstance(e, Formula) else None for e in content.flat]

    def numbers(self, index: int) -> list[int] | None:
        values = numbers(self.contents[index]) if index < len(self.contents) else None
        return None if values is None else [int(n) for n in values.flat]

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self.attrs.get(name)
        return value if isinstance(value, tuple) else None  # type: ignore[return-value]

    def integer(self, name: str, default: int) -> int:
        value = self.attrs.get(name, default)
        assert isinstance(value, int)
        return value


_Function = Callable[[_Node], "Sequence[Shape | None]"]


def refine(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    contents: Sequence[Known | None],
    inferred: Sequence[TensorType],
) -> tuple[TensorType, ...]:
    """The types of a node's outputs, with formulas for dimensions that are unknown in `inferred`.

    `types` are the types of the inputs (None: absent), `contents` the inputs' elements, as far as known.
    """
    function = _FUNCTIONS.get(op)
    if function is None or all(_is_complete(t) for t in inferred):
        return tuple(inferred)
    try:
        shapes = function(_Node(op, attrs, types, contents, inferred))
    except (
        IndexError,
        ZeroDivisionError,
        dims.FormulaTooLarge,
        _Open,
    ):  # the inputs do not fit, so a run will fail; or nothing can be concluded
        return tuple(inferred)
    return tuple(_completed(t, s) for t, s in zip(inferred, (*shapes, *[None] * len(inferred))))


class _Open(Exception):
    """Something on which the result depends is unknown."""


def _is_complete(type: TensorType) -> bool:
    return type.shape is not None and None not in type.shape


def _completed(type: TensorType, shape: Shape | None) -> TensorType:
    if shape is None or type.other is not None or (type.shape is not None and len(type.shape) != len(shape)):
        return type
    own = type.shape or (None,) * len(shape)
    return TensorType(type.dtype, tuple(b if a is None else a for a, b in zip(own, shape)), type.const)


def _dim(formula: Formula | None) -> Dim:
    if formula is None:
        return None
    value = formula.number
    return None if value is not None and value < 0 else dims.dim(formula)


def _formula(dim: Dim) -> Formula:
    if dim is None:
        raise _Open
    return dims.formula(dim)


def _need(shape: Shape | None) -> Shape:
    if shape is None:
        raise _Open
    return shape


def _volume(shape: Sequence[Dim]) -> Formula:
    total = dims.ONE
    for dim in shape:
        total = total * _formula(dim)
    return total


def _try(function: Callable[[], Formula | None]) -> Dim:
    """The dimension that a function returns, or None if something on which it depends is unknown."""
    try:
        return _dim(function())
    except (_Open, dims.FormulaTooLarge):
        return None


# Broadcasting


def join(a: Dim, b: Dim) -> Dim:
    """A dimension after broadcasting; None if either of the two is possible."""
    if a == 1 or (a is not None and a == b):
        return b
    if b == 1 or (isinstance(a, int) and a != 1):
        return a
    if isinstance(b, int):
        return b
    if a is None or b is None:
        return a if dims.at_least(a, 2) else b if dims.at_least(b, 2) else None
    first, second = dims.formula(a), dims.formula(b)
    if len(str(b)) < len(str(a)):
        a, b, first, second = b, a, second, first
    # When the model runs, both are equal or one of them is 1. The result is the first, unless the first can be 1 while
    # the second is not.
    if dims.entails(first, second, 1):
        return a
    return b if dims.entails(second, first, 1) else None


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape after broadcasting."""
    rank = max(map(len, shapes))
    out: list[Dim] = [1] * rank
    for shape in shapes:
        for i, dim in enumerate(shape, rank - len(shape)):
            out[i] = join(out[i], dim)
    return tuple(out)


def _broadcasting(node: _Node) -> Sequence[Shape | None]:
    return [broadcast([_need(t.shape) for t in node.types if t is not None])]


def _matmul(node: _Node) -> Sequence[Shape | None]:
    second = 3 if node.op == "QLinearMatMul" else 1
    a, b = _need(node.shape(0)), _need(node.shape(second))
    if len(a) < 2 or len(b) < 2:
        return [None]
    return [(*broadcast([a[:-2], b[:-2]]), a[-2], b[-1])]


def _expand(node: _Node) -> Sequence[Shape | None]:
    target = node.elements(1)
    if target is None:
        raise _Open
    return [broadcast([_need(node.shape()), tuple(_dim(_sure(e)) for e in target)])]


def _sure(element: Formula | None) -> Formula | None:
    """An element that is used as a size. If its computation may overflow, the overflow is part of the formula."""
    return element if element is None or fits(element) else dims.call("wrap.int64", element)


# Windows


def _window(node: _Node, data: int, weight: int | None) -> Sequence[Shape | None]:
    """The shapes of convolutions and pools: one spatial dimension after the other."""
    shape = _need(node.shape(data))
    rank = len(shape) - 2
    kernel: Sequence[Dim] = node.integers("kernel_shape") or ()
    channels: Dim = shape[1]
    if weight is not None:
        weights = _need(node.shape(weight))
        kernel, channels = kernel or weights[2:], weights[0]
    strides = node.integers("strides") or (1,) * rank
    dilations = node.integers("dilations") or (1,) * rank
    pads = node.integers("pads") or (0,) * (2 * rank)
    auto = node.attrs.get("auto_pad", "NOTSET")
    spatial = [
        _try(
            lambda i=i: _window_size(  # type: ignore[misc]
                _formula(shape[2 + i]),
                (_formula(kernel[i]) - 1) * dilations[i] + 1,
                strides[i],
                (pads[i], pads[rank + i]),
                str(auto),
                None if weight is not None else bool(node.integer("ceil_mode", 0)),
                dilations[i] > 1,
            )
        )
        for i in range(rank)
    ]
    return [(shape[0], channels, *spatial)] * len(node.inferred)


def _window_size(
    size: Formula,
    extent: Formula,
    stride: int,
    pads: tuple[int, int],
    auto: str,
    ceil_mode: bool | None,
    dilated: bool,
) -> Formula | None:
    """How many windows fit. `extent`: the size of a window, with dilation. `ceil_mode` None: for a convolution."""
    if auto.startswith("SAME"):
        return dims.ceil_div(size, stride) if not dilated or ceil_mode is None else None
    begin, end = (0, 0) if auto == "VALID" else pads
    room = size + begin + end - extent
    if ceil_mode is None or (not ceil_mode and dims.not_less(begin + end + 1 - extent, dims.ZERO)):
        return (
            dims.floor_div(room, stride) + 1
        )  # a window that does not fit is an error; so is an image of size 0
    if not ceil_mode:  # a pool rounds towards zero
        outside = dims.floor_div(dims.maximum(-room, 0), stride)
        return dims.floor_div(dims.maximum(room, 0), stride) - outside + 1
    if extent.number is None:
        return None
    # The last window may have to begin inside the image or its padding. Runtimes and versions differ about that.
    return dims.call("ceil_window", size, extent, *map(dims.number, (stride, begin, end)))


def _transposed(node: _Node) -> Sequence[Shape | None]:
    """ConvTranspose."""
    shape, weights = _need(node.shape(0)), _need(node.shape(1))
    rank = len(shape) - 2
    channels = weights[1]
    strides = node.integers("strides") or (1,) * rank
    dilations = node.integers("dilations") or (1,) * rank
    pads = node.integers("pads") or (0,) * (2 * rank)
    more = node.integers("output_padding") or (0,) * rank
    if node.integers("output_shape") or str(node.attrs.get("auto_pad", "NOTSET")) not in ("NOTSET", "VALID"):
        return [None]
    kernel: Sequence[Dim] = node.integers("kernel_shape") or weights[2:]

    def size(i: int) -> Formula:
        extent = (_formula(kernel[i]) - 1) * dilations[i] + 1
        return (_formula(shape[2 + i]) - 1) * strides[i] + more[i] + extent - pads[i] - pads[rank + i]

    groups = node.integer("group", 1)
    out = _try(lambda: _formula(channels) * groups)
    return [(shape[0], out, *(_try(lambda i=i: size(i)) for i in range(rank)))]  # type: ignore[misc]


# Reshaping


def _reshape(node: _Node) -> Sequence[Shape | None]:
    before, target = _need(node.shape()), node.elements(1)
    if target is None:
        raise _Open
    total = None if None in before else _volume(before)
    copies = not node.integer("allowzero", 0)
    out: list[Formula | None] = []
    for i, element in enumerate(target):
        if element is None or element.number is not None:
            out.append(element)
        elif not dims.not_less(element, dims.ZERO):
            out.append(None)  # this element may be -1
        else:
            sure = element if total is None or _is_part(element, total) else _sure(element)
            out.append(_or_copied(sure, i, before, target, total) if copies and sure is not None else sure)
    if copies:
        out = [_maybe(before[i]) if e == dims.ZERO and i < len(before) else e for i, e in enumerate(out)]
    holes = [i for i, e in enumerate(out) if e is not None and e.number == -1]
    for hole in holes[:1]:
        sizes = [e for i, e in enumerate(out) if i != hole]
        out[hole] = None
        numbers_ = [e for e in sizes if e is not None]
        if total is not None and len(numbers_) == len(sizes):
            if copies or _are_filled(numbers_):
                out[hole] = dims.floor_div(total, _product(numbers_))
            else:
                out[hole] = _left_over(before, numbers_)
    return [tuple(_dim(e) for e in out)]


def _left_over(before: Shape, sizes: Sequence[Formula]) -> Formula | None:
    """The dimension that a Reshape with `allowzero` infers if other dimensions may be 0.

    ONNX calls such a Reshape an error. ONNX Runtime leaves zeros out of both products; the inferred dimension must not
    be 0.
    """
    unmatched, more = [dims.formula(d) for d in before if d is not None], []
    for part in sizes:
        if part in unmatched:
            unmatched.remove(part)
        else:
            more.append(part)
    if not _are_filled(unmatched) or not _are_filled(more):
        return None
    return dims.floor_div(_product(unmatched), _product(more))


def _are_filled(parts: Sequence[Formula]) -> bool:
    """Whether none of the dimensions can be 0."""
    return all(dims.not_less(part, dims.ONE) for part in parts)


def _maybe(dim: Dim) -> Formula | None:
    return None if dim is None else dims.formula(dim)


def _product(parts: Sequence[Formula]) -> Formula:
    total = dims.ONE
    for part in parts:
        total = total * part
    return total


def _or_copied(
    element: Formula, at: int, before: Shape, target: Sequence[Formula | None], total: Formula | None
) -> Formula | None:
    """A dimension of a Reshape's result. If the wanted size is 0, the input's dimension is copied."""
    if at >= len(before):
        return element  # the input has no dimension to copy, so a 0 is an error
    own = _maybe(before[at])
    if own is None:
        return element if dims.not_less(element, dims.ONE) else None
    if dims.not_less(element, dims.ONE) or dims.entails(element, own, 0) or _vanishes_with(own, element):
        return element
    # If this size were 0, the number of elements would be 0. Without another 0, the copied dimension must then be 0,
    # too.
    sizes = [e for i, e in enumerate(target) if i != at]
    formulas = [e for e in sizes if e is not None]
    filled = len(formulas) == len(sizes) and _are_filled(formulas)
    if filled and total is not None and _vanishes_with(total, element):
        return element
    return element + own * dims.maximum(dims.ONE - element, 0)


def _vanishes_with(own: Formula, element: Formula) -> bool:
    """Whether a product is 0 whenever another product is 0."""
    if len(own.terms) != 1 or len(element.terms) != 1:
        return False
    return set(element.terms[0][0]) <= set(own.terms[0][0])


def _is_part(part: Formula, product: Formula) -> bool:
    """Whether one product is a factor of another one that is a number of elements, so that neither can overflow."""
    if len(part.terms) != 1 or len(product.terms) != 1:
        return False
    (atoms, factor), (all_atoms, all_factor) = part.terms[0], product.terms[0]
    return 0 < factor <= all_factor and not Counter(atoms) - Counter(all_atoms)


def _flatten(node: _Node) -> Sequence[Shape | None]:
    shape = _need(node.shape())
    axis = node.integer("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return [(_try(lambda: _volume(shape[:axis])), _try(lambda: _volume(shape[axis:])))]


def _unsqueeze(node: _Node) -> Sequence[Shape | None]:
    shape, axes = _need(node.shape()), node.numbers(1)
    if axes is None:
        raise _Open
    rank = len(shape) + len(axes)
    new = {a % rank for a in axes}
    sizes = iter(shape)
    return [tuple(1 if i in new else next(sizes) for i in range(rank))]


def _squeeze(node: _Node) -> Sequence[Shape | None]:
    shape, axes = _need(node.shape()), node.numbers(1)
    if axes is None:
        raise _Open
    dropped = {a % len(shape) for a in axes}
    return [tuple(d for i, d in enumerate(shape) if i not in dropped)]


# Slicing and concatenating


def _slice(node: _Node) -> Sequence[Shape | None]:
    shape = list(_need(node.shape()))
    starts, ends = node.elements(1), node.elements(2)
    bounds = starts if starts is not None else ends  # one per axis; without axes, for the first axes
    axes = node.numbers(3) if node.has_input(3) else None if bounds is None else list(range(len(bounds)))
    if axes is None:
        raise _Open
    steps = node.elements(4) if node.has_input(4) else [dims.ONE] * len(axes)
    for at, axis in enumerate(axes):
        index = axis + len(shape) if axis < 0 else axis
        parts = [None if p is None else p[at] for p in (starts, ends, steps)]
        shape[index] = _try(lambda p=index, e=parts: _cut(_formula(shape[p]), *e))  # type: ignore[misc]
    return [tuple(shape)]


def _cut(size: Formula, start: Formula | None, end: Formula | None, step: Formula | None) -> Formula | None:
    """The number of positions that a Slice takes."""
    if start is None or end is None or step is None or step.number in (None, 0):
        return None
    if not fits(start) or not fits(end):
        return None
    by = step.number or 1
    if by < 0 and end.number in (2**31 - 1, 2**63 - 1):
        end = dims.number(-(2**63))  # the largest numbers, as ONNX Runtime reads them (ends_of_slice)
    elif by < 0 and not dims.not_less(dims.number(dims.LARGEST - 1), end):
        return None  # the end may be one of the largest numbers
    first = _position(size, start, 0, by < 0)
    last = _position(size, end, -1, by < 0)
    if first is None or last is None:
        return None
    length = last - first if by > 0 else first - last
    return dims.maximum(dims.ceil_div(length, abs(by)), 0)


def _position(size: Formula, at: Formula, minimum: int, backwards: bool) -> Formula | None:
    """A bound of a Slice, counted from the front and clamped; None if its sign is unknown.

    `minimum`: the least position for a negative step.
    """
    if dims.not_less(dims.number(-1), at):
        at = at + size
    elif not dims.not_less(at, dims.ZERO):
        return None
    if backwards:
        return dims.minimum(dims.maximum(at, minimum), size - 1)
    return dims.minimum(dims.maximum(at, 0), size)


def _concat(node: _Node) -> Sequence[Shape | None]:
    shapes = [_need(t.shape) for t in node.types if t is not None]
    axis = node.integer("axis", 0) % len(shapes[0])
    out: list[Dim] = []
    for i in range(len(shapes[0])):
        if i == axis:
            out.append(_try(lambda i=i: sum((_formula(s[i]) for s in shapes), dims.ZERO)))  # type: ignore[misc]
        else:
            out.append(next((s[i] for s in shapes if s[i] is not None), None))
    return [tuple(out)]


def _split(node: _Node) -> Sequence[Shape | None]:
    shape = _need(node.shape())
    axis = node.integer("axis", 0) % len(shape)
    sizes: Sequence[Dim]
    if node.has_input(1):
        parts = node.elements(1)
        if parts is None:
            raise _Open
        sizes = [_dim(_sure(p)) for p in parts]
    else:
        count = node.integer("num_outputs", len(node.inferred))
        total = _formula(shape[axis])
        chunk = dims.ceil_div(total, count)
        sizes = [*[_dim(chunk)] * (count - 1), _dim(total - chunk * (count - 1))]
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def _pad(node: _Node) -> Sequence[Shape | None]:
    shape, pads = list(_need(node.shape())), node.elements(1)
    axes = node.numbers(3) if node.has_input(3) else list(range(len(shape)))
    if pads is None or axes is None:
        raise _Open
    for at, axis in enumerate(axes):
        begin, end = pads[at], pads[at + len(axes)]
        if begin is None or end is None:
            shape[axis] = None
        else:
            shape[axis] = _try(lambda a=axis, p=(begin, end): _sure(_formula(shape[a]) + p[0] + p[1]))  # type: ignore[misc]
    return [tuple(shape)]


def _tile(node: _Node) -> Sequence[Shape | None]:
    shape, repeats = _need(node.shape()), node.elements(1)
    if repeats is None:
        raise _Open
    return [tuple(_try(lambda d=d, r=r: r and _sure(_formula(d) * r)) for d, r in zip(shape, repeats))]  # type: ignore[misc]


# Other operators


def _listed(index: int) -> _Function:
    """A function for operators whose output shape is given by the elements of an input."""

    def function(node: _Node) -> Sequence[Shape | None]:
        elements = node.elements(index)
        if elements is None:
            raise _Open
        return [tuple(_dim(_sure(e)) for e in elements)]

    return function


def _range(node: _Node) -> Sequence[Shape | None]:
    first, last, by = ((node.elements(i) or [None])[0] for i in range(3))
    if first is None or last is None or by is None:
        raise _Open
    if by.number in (None, 0) or not fits(first) or not fits(last):
        raise _Open
    count = dims.ceil_div(last - first, by) if (by.number or 0) > 0 else dims.ceil_div(first - last, -by)
    return [(_dim(dims.maximum(count, 0)),)]


def _resize(node: _Node) -> Sequence[Shape | None]:
    shape = _need(node.shape())
    axes = node.integers("axes") or tuple(range(len(shape)))
    out = list(shape)
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return [None]
    if node.has_input(3):
        sizes = node.elements(3)
        if sizes is None:
            raise _Open
        for axis, size in zip(axes, sizes):
            out[axis] = _dim(_sure(size))
        return [tuple(out)]
    scales = node.contents[2] if node.has_input(2) else None
    if scales is None or node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise _Open
    for axis, scale in zip(axes, scales.flat):
        out[axis] = _scaled(out[axis], scale)
    return [tuple(out)]


def _scaled(dim: Dim, scale: object) -> Dim:
    """A dimension times a number, computed in single precision and rounded down."""
    if scale == 1.0 or dim is None or not isinstance(scale, float):
        return dim if scale == 1.0 else None
    return dims.dim(dims.call("scale.float", dims.formula(dim), scale))


def _blocks(node: _Node) -> Sequence[Shape | None]:
    """DepthToSpace and SpaceToDepth."""
    n, c, h, w = _need(node.shape())
    size = node.integer("blocksize", 1)
    if node.op == "DepthToSpace":
        out = [
            lambda: dims.floor_div(_formula(c), size**2),
            lambda: _formula(h) * size,
            lambda: _formula(w) * size,
        ]
    else:
        out = [
            lambda: _formula(c) * size**2,
            lambda: dims.floor_div(_formula(h), size),
            lambda: dims.floor_div(_formula(w), size),
        ]
    return [(n, *map(_try, out))]


def _top(node: _Node) -> Sequence[Shape | None]:
    shape, count = list(_need(node.shape())), node.elements(1)
    if not count:
        raise _Open
    shape[node.integer("axis", -1)] = _dim(_sure(count[0]))
    return [tuple(shape)] * 2


def _one_hot(node: _Node) -> Sequence[Shape | None]:
    shape, depth = _need(node.shape()), node.elements(1)
    if not depth:
        raise _Open
    axis = node.integer("axis", -1)
    axis += len(shape) + 1 if axis < 0 else 0
    return [(*shape[:axis], _dim(_sure(depth[0])), *shape[axis:])]


def _einsum(node: _Node) -> Sequence[Shape | None]:
    equation = str(node.attrs.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        return [None]
    letters: dict[str, Dim] = {}
    for term, type in zip(left.split(","), node.types):
        shape = _need(None if type is None else type.shape)
        for letter, dim in zip(term, shape):
            letters[letter] = join(letters.get(letter, 1), dim)
    return [tuple(letters[letter] for letter in right)]


_BROADCASTING = (
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual",
    "GreaterOrEqual", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "PRelu", "Where", "Sum", "Mean", "Max",
    "Min",
)  # fmt: skip

_FUNCTIONS: Mapping[str, _Function] = {
    **dict.fromkeys(_BROADCASTING, _broadcasting),
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    "Conv": lambda node: _window(node, 0, 1),
    "ConvInteger": lambda node: _window(node, 0, 1),
    "QLinearConv": lambda node: _window(node, 0, 3),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), lambda node: _window(node, 0, None)),
    "ConvTranspose": _transposed,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "ConstantOfShape": _listed(0),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), lambda node: [node.integers("shape")]),
    "Slice": _slice,
    "Concat": _concat,
    "Split": _split,
    "Pad": _pad,
    "Tile": _tile,
    "Range": _range,
    "Resize": _resize,
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _blocks),
    "TopK": _top,
    "OneHot": _one_hot,
    "Einsum": _einsum,
}
