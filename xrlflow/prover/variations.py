"""Variations: sketches made from a given sketch by one or a few random changes.

A region rule does not declare the form of its left side; it only gives examples. The graphs that its conditions must
refuse are similar to the examples: they have another axis, permutation or operator, or a value that is read twice.
Variations also cover attributes and sizes that no example has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import numpy as np

from xrlflow.ir import FLOATS, Attr, Dim, DType, TensorType
from xrlflow.ir.dims import LARGEST
from xrlflow.ops.schema import defaults, schema
from xrlflow.prover.draw import ATTRIBUTES, Draw, attribute
from xrlflow.prover.sketch import Sketch, SketchConst, SketchNode, ValueRef, with_const, with_node
from xrlflow.prover.thresholds import around

# Groups of operators that can replace each other.
CLASSES: tuple[tuple[str, ...], ...] = (
    ("Relu", "Tanh", "Sigmoid", "Abs", "Neg", "Sqrt", "Exp", "Floor", "Softplus", "Erf", "Identity"),
    ("Add", "Mul", "Sub", "Div", "Max", "Min", "Pow", "Sum"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd"),
    ("Softmax", "LogSoftmax"),
    ("Squeeze", "Unsqueeze"),
    ("MaxPool", "AveragePool"),
    ("And", "Or", "Xor"),
    ("Equal", "Less", "Greater"),
)
# Attributes that runtimes divide by.
_POSITIVE = (
    "group",
    "strides",
    "dilations",
    "kernel_shape",
    "num_groups",
    "num_heads",
    "q_num_heads",
    "kv_num_heads",
)
# The greatest factor by which one number of a shape is divided and another one multiplied.
_GREATEST_FACTOR = 12
# The greatest rank that is tried.
_MOST_RANK = 8
# The numbers of a constant are changed one by one only if it has at most so many.
_MOST_NUMBERS = 8
# The most elements of a constant that a variation makes larger.
_MOST_ELEMENTS = 1 << 16
# The sizes with which each dimension is tried.
_SIZES: tuple[Dim, ...] = (0, 1, "N", None)
# Constants of these types are data, not shapes or axes.
_DATA = FLOATS | {DType.INT8, DType.UINT8}
_LIKE: dict[str, tuple[str, ...]] = {op: group for group in CLASSES for op in group}


def vary(sketch: Sketch, draw: Draw) -> Sketch:
    """Make one to three random changes of a sketch. Some changes may have no effect."""
    sketch = replace(sketch, shown_kinds=frozenset(), dims={})  # the changes may make these untrue
    for _ in range(draw.choice([1, 1, 1, 2, 2, 3])):
        sketch = draw.choice(_CHANGES)(sketch, draw)
    return forget(sketch, draw) if draw.chance(0.06) else sketch  # last: other changes read shapes


def neighbours(sketch: Sketch) -> Iterator[Sketch]:
    """All sketches that differ in one operator, one number of an integer constant, or an input's dimension or rank.

    A dimension gets another size or a name, or becomes unknown to the graph; so may the rank. The input keeps its full
    type.
    """
    sketch = replace(sketch, shown_kinds=frozenset(), dims={})
    for at, node in enumerate(sketch.nodes):
        for op in _LIKE.get(node.op, ()):
            if op != node.op:
                yield with_node(sketch, at, op=op)
    for at, const in enumerate(sketch.consts):
        if const.dtype == DType.INT64 and const.array.size <= _MOST_NUMBERS:
            for index, number in enumerate(const.array.ravel().tolist()):
                for changed in (number - 1, number + 1):
                    if abs(changed) < 2**63:
                        array = const.array.copy()
                        array.reshape(-1)[index] = changed
                        yield with_const(sketch, at, array=array)
    for at, type in enumerate(sketch.inputs):
        if type.shape is None or at in sketch.hidden:
            continue
        yield _with_declared(sketch, at, TensorType(type.dtype, None))
        for index, old in enumerate(type.shape):
            sizes = {*_SIZES, old + 1 if isinstance(old, int) else 2} - {old}
            for new in sorted(sizes, key=str):
                declared = replace_dims(type, (*type.shape[:index], new, *type.shape[index + 1 :]))
                yield (
                    _with_declared(sketch, at, declared) if new is None else _with_input(sketch, at, declared)
                )


def at_number(sketch: Sketch, number: int, attributes: bool = True) -> Iterator[Sketch]:
    """All sketches with `number` as one element of an integer constant, or of an attribute that is no flag."""
    sketch = replace(sketch, shown_kinds=frozenset(), dims={})
    for at, const in enumerate(sketch.consts):
        if const.dtype not in (DType.INT64, DType.INT32) or const.array.size > _MOST_NUMBERS:
            continue
        if number <= np.iinfo(const.array.dtype).max:
            for index in range(const.array.size):
                array = const.array.copy()
                array.reshape(-1)[index] = number
                yield with_const(sketch, at, array=array)
    for at, node in enumerate(sketch.nodes if attributes else ()):
        for name, value in node.attrs.items():
            flag = defaults(node.op).get(name) in (0, 1) and "axis" not in name
            if isinstance(value, int) and not flag and name not in ("to", "dtype"):
                yield with_node(sketch, at, attrs={**node.attrs, name: number})
            elif isinstance(value, tuple) and value and all(isinstance(v, int) for v in value):
                for index in range(len(value)):
                    changed = (*value[:index], number, *value[index + 1 :])
                    yield with_node(sketch, at, attrs={**node.attrs, name: changed})


def at_limit(sketch: Sketch, limit: int, draw: Draw) -> Iterator[Sketch]:
    """Sketches with numbers, sizes and ranks equal to `limit` or off by one; also such numbers and sizes together."""
    for number in around(limit):
        yield from at_number(sketch, number)
    yield from of_sizes(sketch, limit, draw)
    for number in (limit, limit + 1):
        for varied in at_number(sketch, number):
            yield from of_sizes(varied, limit, draw)
    if limit <= _MOST_RANK:
        for rank in around(limit):
            yield of_rank(sketch, rank, draw)


def of_rank(sketch: Sketch, rank: int, draw: Draw) -> Sketch:
    """Add dimensions at the front of all inputs, up to `rank` dimensions."""
    inputs = []
    for at, type in enumerate(sketch.inputs):
        shape = type.shape
        if shape is not None and at not in sketch.hidden:
            type = replace_dims(type, (*(draw.integer(1, 2) for _ in range(rank - len(shape))), *shape))
        inputs.append(type)
    return replace(sketch.with_inputs(inputs), shown_kinds=frozenset(), dims={})


def of_sizes(sketch: Sketch, limit: int, draw: Draw) -> Iterator[Sketch]:
    """All sketches in which one dimension, or all dimensions of one size, have the size `limit`, or one more or
    less.
    """
    sketch = replace(sketch, shown_kinds=frozenset(), dims={})
    for size in (n for n in around(limit) if n <= LARGEST):
        for old in all_sizes(sketch):
            yield resize_to(sketch, old, size, draw)
        for at, type in enumerate(sketch.inputs):
            shape = type.shape if at not in sketch.hidden else None
            for axis in range(len(shape or ())):
                yield with_dimension(sketch, at, axis, size)


def with_dimension(sketch: Sketch, at: int, axis: int, size: int) -> Sketch:
    """The sketch with another size for one dimension of one input."""
    type = sketch.inputs[at]
    dims = type.shape or ()
    return _with_input(sketch, at, replace_dims(type, (*dims[:axis], size, *dims[axis + 1 :])))


def numbers_of(sketch: Sketch) -> set[int]:
    """The integers in a sketch's short integer constants and in its attributes."""
    numbers = set[int]()
    for const in sketch.consts:
        if const.dtype in (DType.INT64, DType.INT32) and const.array.size <= _MOST_NUMBERS:
            numbers.update(const.array.ravel().tolist())
    for node in sketch.nodes:
        for name, value in node.attrs.items():
            if name not in ("to", "dtype"):
                numbers.update(v for v in (value if isinstance(value, tuple) else (value,)) if type(v) is int)
    return numbers


def _with_declared(sketch: Sketch, at: int, declared: TensorType) -> Sketch:
    """Give an input the less precise type `declared`, and keep its full type in `hidden`."""
    hidden = {**sketch.hidden, at: sketch.inputs[at]}
    return replace(_with_input(sketch, at, declared), hidden=hidden)


def replace_dims(type: TensorType, dims: tuple[Dim, ...]) -> TensorType:
    return TensorType(type.dtype, dims, type.const)


def forget(sketch: Sketch, draw: Draw) -> Sketch:
    """Make a dimension or the rank of one input unknown to the graph."""
    ranked = [i for i, t in enumerate(sketch.inputs) if t.shape is not None and i not in sketch.hidden]
    if not ranked:
        return sketch
    at = draw.choice(ranked)
    type = sketch.inputs[at]
    shape = type.shape or ()
    if not shape or draw.chance(0.5):
        declared = TensorType(type.dtype, None)
    else:
        axis = draw.integer(0, len(shape) - 1)
        declared = replace_dims(type, (*shape[:axis], None, *shape[axis + 1 :]))
    return _with_declared(sketch, at, declared)


def resize(sketch: Sketch, draw: Draw) -> Sketch:
    """Replace one size by another one everywhere, in constant shapes, too. The structure stays the same."""
    numbers = all_sizes(sketch)
    return resize_to(sketch, draw.choice(numbers), draw.integer(1, 5), draw) if numbers else sketch


def all_sizes(sketch: Sketch) -> list[int]:
    """The sizes above 1 of the dimensions of inputs and float constants."""
    of_inputs = (d for t in sketch.inputs for d in t.shape or () if isinstance(d, int))
    of_consts = (d for c in sketch.consts if c.dtype in FLOATS for d in c.array.shape)
    return sorted({d for d in (*of_inputs, *of_consts) if d > 1})


def square(sketch: Sketch, draw: Draw) -> Sketch:
    """Make all sizes above 1 equal, so that axes and operands can be exchanged and the graph stays valid."""
    size = draw.integer(2, 4)
    for old in all_sizes(sketch):
        sketch = resize_to(sketch, old, size, draw)
    return sketch


def resize_to(sketch: Sketch, old: int, new: int, draw: Draw) -> Sketch:
    """Replace the size `old` by `new` in all inputs and float constants, and in each integer constant with probability
    0.8.
    """

    def changed(dims: tuple[int | str | None, ...]) -> tuple[int | str | None, ...]:
        return tuple(new if d == old else d for d in dims)

    def resized(type: TensorType) -> TensorType:
        return type if type.shape is None else replace_dims(type, changed(type.shape))

    hidden = {at: resized(type) for at, type in sketch.hidden.items()}
    consts = []
    for const in sketch.consts:
        if const.dtype in _DATA and old in const.array.shape:
            shape = tuple(new if d == old else d for d in const.array.shape)
            fits = prod(shape) <= _MOST_ELEMENTS  # otherwise the constant keeps its size
            consts.append(replace(const, array=np.resize(const.array, shape)) if fits else const)
        elif (
            const.dtype == DType.INT64
            and const.array.size
            and (const.array == old).any()
            and draw.chance(0.8)
        ):
            consts.append(replace(const, array=np.where(const.array == old, new, const.array)))
        else:
            consts.append(const)
    return replace(sketch, inputs=tuple(map(resized, sketch.inputs)), consts=tuple(consts), hidden=hidden)


def _change_size(sketch: Sketch, draw: Draw) -> Sketch:
    """Change the size of one dimension of one input."""
    ranked = [i for i, t in enumerate(sketch.inputs) if t.shape]
    if not ranked:
        return sketch
    at = draw.choice(ranked)
    shape = list(sketch.inputs[at].shape or ())
    shape[draw.integer(0, len(shape) - 1)] = draw.dim()
    return _with_input(sketch, at, TensorType(sketch.inputs[at].dtype, tuple(shape)))


def _change_rank(sketch: Sketch, draw: Draw) -> Sketch:
    """Add or remove one dimension, in one input or in all inputs."""
    selected = (
        range(len(sketch.inputs)) if draw.chance(0.4) else [draw.integer(0, max(len(sketch.inputs) - 1, 0))]
    )
    more, at_front = draw.chance(0.6), draw.chance(0.7)
    for i in selected:
        if i >= len(sketch.inputs) or sketch.inputs[i].shape is None:
            continue
        shape = sketch.inputs[i].shape or ()
        if more:
            shape = (draw.choice([1, 2]), *shape) if at_front else (*shape, draw.choice([1, 2]))
        else:
            shape = shape[1:] if at_front else shape[:-1]
        sketch = _with_input(sketch, i, TensorType(sketch.inputs[i].dtype, shape))
    return sketch


def _name_dimension(sketch: Sketch, draw: Draw) -> Sketch:
    """Replace a size by a symbol, or a symbol by a size, in all inputs."""
    dims = sorted({d for t in sketch.inputs for d in t.shape or () if d is not None}, key=str)
    if not dims:
        return sketch
    old = draw.choice(dims)
    new: int | str = draw.choice(["N", "M", "K"]) if isinstance(old, int) else draw.integer(1, 4)
    return sketch.with_inputs(
        TensorType(t.dtype, tuple(new if d == old else d for d in t.shape)) if t.shape is not None else t
        for t in sketch.inputs
    )


def _change_attribute(sketch: Sketch, draw: Draw) -> Sketch:
    at = draw.integer(0, len(sketch.nodes) - 1)
    node = sketch.nodes[at]
    defined = schema(node.op)
    names = sorted(
        {*node.attrs, *(() if defined is None else defined.attributes), *ATTRIBUTES.get(node.op, {})}
    )
    if not names:
        return sketch
    name = draw.choice(names)
    attrs = dict(node.attrs)
    value = attrs.get(name)
    if value is not None:
        flag = defaults(node.op).get(name) in (0, 1) and value in (0, 1) and "axis" not in name
        new = 1 - value if flag and isinstance(value, int) else _near(value, draw)
        if name in _POSITIVE and new is not None:
            new = max(new, 1) if isinstance(new, int) else tuple(max(v, 1) for v in new)  # type: ignore
    else:
        rank = 3 + draw.integer(-1, 1)
        new = attribute(draw, node.op, name, [(2,) * rank, (2,) * rank])
        if new is None:
            default = defaults(node.op).get(name)
            flag = default in (0, 1) and isinstance(default, int) and "axis" not in name
            new = None if default is None else int(not default) if flag else _near(default, draw)
    if new is None or draw.chance(0.15):
        attrs.pop(name, None)
    else:
        attrs[name] = new
    return with_node(sketch, at, attrs=attrs)


def _near(value: Attr, draw: Draw) -> Attr | None:
    """A different value of the same type as an attribute's value."""
    if isinstance(value, int):
        return value + draw.choice([-1, 1, -2, 2])
    if isinstance(value, float):
        return value * draw.choice([0.5, 2.0, -1.0]) or 0.5
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        numbers = [int(v) for v in value]
        if sorted(numbers) == list(range(len(numbers))):
            return draw.permutation(len(numbers))
        numbers[draw.integer(0, len(numbers) - 1)] += draw.choice([-1, 1])
        return tuple(numbers)
    return value


def _change_number(sketch: Sketch, draw: Draw) -> Sketch:
    """Change one number of a constant, or permute an integer constant."""
    if not sketch.consts:
        return sketch
    at = draw.integer(0, len(sketch.consts) - 1)
    array = sketch.consts[at].array.copy()
    if not array.size:
        return sketch
    index = draw.integer(0, array.size - 1)
    flat = array.reshape(-1)
    if array.dtype.kind in "iu":
        if array.size > 1 and draw.chance(0.3):
            flat[:] = draw.rng.permutation(flat)
        else:
            limits = np.iinfo(array.dtype)
            changed = int(flat[index]) + draw.choice([-1, 1, -2, 2])
            flat[index] = min(max(changed, limits.min), limits.max)
    elif array.dtype.kind == "b":
        flat[index] = not flat[index]
    else:
        flat[index] = flat[index] * draw.choice([0.5, 2.0, -1.0]) + draw.choice([0.0, 0.0, 1.0])
    return with_const(sketch, at, array=array)


def _move_factor(sketch: Sketch, draw: Draw) -> Sketch:
    """Divide one number of a constant vector by a factor and multiply another one by it. As a shape it then has the
    same number of elements.
    """
    lists = [i for i, c in enumerate(sketch.consts) if c.dtype == DType.INT64 and c.array.ndim == 1]
    lists = [i for i in lists if sketch.consts[i].array.size > 1]
    if not lists:
        return sketch
    at = draw.choice(lists)
    array = sketch.consts[at].array.copy()
    source, target = draw.permutation(array.size)[:2]
    size = int(array[source])
    factors = [f for f in range(2, min(size, _GREATEST_FACTOR) + 1) if size % f == 0]
    if not factors:
        return sketch
    factor = draw.choice(factors)
    if abs(int(array[target])) > LARGEST:
        return sketch
    array[source] //= factor
    array[target] *= factor
    return with_const(sketch, at, array=array)


def _change_length(sketch: Sketch, draw: Draw) -> Sketch:
    """Add or remove the last element of a constant integer vector."""
    lists = [
        i
        for i, c in enumerate(sketch.consts)
        if c.dtype == DType.INT64 and c.array.ndim == 1 and c.array.size
    ]
    if not lists:
        return sketch
    at = draw.choice(lists)
    array = sketch.consts[at].array
    more = np.append(array, array[-1]) if draw.chance(0.5) else array[:-1]
    return with_const(sketch, at, array=more)


def _change_operator(sketch: Sketch, draw: Draw) -> Sketch:
    options = [i for i, n in enumerate(sketch.nodes) if n.op in _LIKE]
    if not options:
        return sketch
    at = draw.choice(options)
    return with_node(sketch, at, op=draw.choice(_LIKE[sketch.nodes[at].op]))


def _swap_inputs(sketch: Sketch, draw: Draw) -> Sketch:
    several = [i for i, n in enumerate(sketch.nodes) if len(n.inputs) > 1]
    if not several:
        return sketch
    at = draw.choice(several)
    inputs = list(sketch.nodes[at].inputs)
    i, j = draw.permutation(len(inputs))[:2]
    inputs[i], inputs[j] = inputs[j], inputs[i]
    return with_node(sketch, at, inputs=tuple(inputs))


def _rewire(sketch: Sketch, draw: Draw) -> Sketch:
    """Let an input of a node read another value of the sketch."""
    at = draw.integer(0, len(sketch.nodes) - 1)
    node = sketch.nodes[at]
    if not node.inputs:
        return sketch
    options = [ValueRef("input", i) for i in range(len(sketch.inputs))]
    options += [ValueRef("const", i) for i in range(len(sketch.consts))]
    options += [ValueRef("node", i, k) for i in range(at) for k in range(sketch.nodes[i].outputs)]
    inputs = list(node.inputs)
    inputs[draw.integer(0, len(inputs) - 1)] = draw.choice(options)
    return with_node(sketch, at, inputs=tuple(inputs))


def _give_out(sketch: Sketch, draw: Draw) -> Sketch:
    """Make an inner value an output of the graph, too."""
    at = draw.integer(0, len(sketch.nodes) - 1)
    ref = ValueRef("node", at, draw.integer(0, sketch.nodes[at].outputs - 1))
    return sketch if ref in sketch.outputs else replace(sketch, outputs=(*sketch.outputs, ref))


def _read_again(sketch: Sketch, draw: Draw) -> Sketch:
    """Add an operator that reads an inner value."""
    at = draw.integer(0, len(sketch.nodes) - 1)
    ref = ValueRef("node", at, draw.integer(0, sketch.nodes[at].outputs - 1))
    extra = SketchNode("Neg", (ref,))
    last = ValueRef("node", len(sketch.nodes))
    return replace(sketch, nodes=(*sketch.nodes, extra), outputs=(*sketch.outputs, last))


def _insert(sketch: Sketch, draw: Draw) -> Sketch:
    """Insert an operator between a value and one of the nodes that read it."""
    at = draw.integer(0, len(sketch.nodes) - 1)
    node = sketch.nodes[at]
    positions = [i for i, p in enumerate(node.inputs) if p is not None]
    if not positions:
        return sketch
    position = draw.choice(positions)
    inserted = SketchNode(draw.choice(["Neg", "Relu", "Tanh"]), (node.inputs[position],))

    def shifted(ref: ValueRef | None) -> ValueRef | None:
        later = ref is not None and ref.kind == "node" and ref.index >= at
        return replace(ref, index=ref.index + 1) if later and ref is not None else ref

    nodes = list(sketch.nodes[:at])
    nodes.append(inserted)
    for n in sketch.nodes[at:]:
        inputs = [shifted(p) for p in n.inputs]
        if n is node:
            inputs[position] = ValueRef("node", at)
        nodes.append(replace(n, inputs=tuple(inputs)))
    outputs = tuple(p for o in sketch.outputs if (p := shifted(o)) is not None)
    return replace(sketch, nodes=tuple(nodes), outputs=outputs)


def _make_constant(sketch: Sketch, draw: Draw) -> Sketch:
    """Replace a float input by a constant. The input stays in the sketch, but nothing reads it."""
    static = [
        i
        for i, t in enumerate(sketch.inputs)
        if t.dtype in FLOATS and t.size is not None and t.size <= _MOST_ELEMENTS
    ]
    if not static:
        return sketch
    at = draw.choice(static)
    shape = tuple(d for d in sketch.inputs[at].shape or () if isinstance(d, int))
    opaque = draw.chance(0.5)
    array = draw.normals(shape) if opaque else draw.eighths(shape)
    const = SketchConst(array, sketch.inputs[at].dtype, opaque)
    return _replaced(
        sketch, ValueRef("input", at), ValueRef("const", len(sketch.consts)), (*sketch.consts, const)
    )


def _make_input(sketch: Sketch, draw: Draw) -> Sketch:
    """Replace a constant by an input."""
    if not sketch.consts:
        return sketch
    at = draw.integer(0, len(sketch.consts) - 1)
    const = sketch.consts[at]
    sketch = replace(sketch, inputs=(*sketch.inputs, TensorType(const.dtype, tuple(const.array.shape))))
    return _replaced(sketch, ValueRef("const", at), ValueRef("input", len(sketch.inputs) - 1), sketch.consts)


def _hide(sketch: Sketch, draw: Draw) -> Sketch:
    """Make float constants opaque, each with probability 0.7, so that rules cannot read their numbers."""
    consts = tuple(replace(c, opaque=c.dtype in FLOATS and draw.chance(0.7)) for c in sketch.consts)
    return replace(sketch, consts=consts)


def _replaced(sketch: Sketch, old: ValueRef, new: ValueRef, consts: tuple[SketchConst, ...]) -> Sketch:
    nodes = tuple(replace(n, inputs=tuple(new if p == old else p for p in n.inputs)) for n in sketch.nodes)
    outputs = tuple(new if p == old else p for p in sketch.outputs)
    return replace(sketch, nodes=nodes, consts=consts, outputs=outputs)


def _with_input(sketch: Sketch, index: int, type: TensorType) -> Sketch:
    inputs = list(sketch.inputs)
    inputs[index] = type
    return sketch.with_inputs(inputs)


_CHANGES: tuple[Callable[[Sketch, Draw], Sketch], ...] = (
    resize,
    resize,
    _change_size,
    _change_rank,
    _name_dimension,
    _change_attribute,
    _change_attribute,
    _change_attribute,
    _change_number,
    _change_number,
    _change_length,
    _move_factor,
    _change_operator,
    _swap_inputs,
    _rewire,
    _give_out,
    _read_again,
    _insert,
    _make_constant,
    _make_input,
    _hide,
)
