"""Dimensions that must be at least 1 for ONNX Runtime, although ONNX also defines a result for the size 0.

They were found with ONNX Runtime 1.31.1 on the CPU: each operator ran in a process of its own, with one dimension of 0
after the other. For these dimensions its kernel crashes the process, never ends, fails, or (products) returns
uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from xrlflow.ir import ABSENT, Attrs, Dim, Graph, Node, TensorType, Value

Types = Sequence[TensorType | None]
InputAxis = tuple[int, int]
"""An input and one of its axes."""
Size = Dim | tuple[Value, int]
"""A dimension, or a value and its axis if the dimension is unknown."""


def needed(op: str, attrs: Attrs, types: Types, surely: bool = False) -> Iterator[InputAxis]:
    """The axes of an operator's inputs, which have these types (None: absent), whose sizes must be at least 1. For an
    input of unknown rank none are returned. `surely`: only axes whose size is at least 1 whenever the operator runs at
    all.
    """
    need = (_FAILS if surely else _NEEDS).get(op)
    return iter(()) if need is None else need(attrs, types)


def sizes_needed(
    graph: Graph, nodes: Iterable[Node], new_types: Mapping[Value, TensorType] | None = None
) -> Iterator[Size]:
    """The dimensions that must be at least 1 for these nodes to run; nodes that get a branch need none (`where_empty`).
    `new_types`: types of values that the graph lacks; if it is given, also dimensions that may have to be.
    """
    surely = new_types is None
    types_of = {} if new_types is None else new_types
    for node in nodes:
        if node.op in NEEDING:
            types = [None if v == ABSENT else types_of.get(v) or graph.type(v) for v in node.explicit_inputs]
            if where_empty(node.op, types, node.types) is not None:
                continue
            for index, axis in needed(node.op, node.attrs, types, surely):
                shape = None if (type := types[index]) is None else type.shape
                size = None if shape is None else shape[axis]
                yield (node.inputs[index], axis) if size is None else size


def where_empty(op: str, types: Types, results: Sequence[TensorType]) -> list[list[int | InputAxis]] | None:
    """The shapes of an operator's results where a size that it needs is 0, if these results are zeros then, or have no
    elements: numbers, and axes of inputs. The exporter writes a branch around such an operator, so it needs no sizes.
    None for other operators. `results`: the types of its outputs.

    Attention to no keys is a sum over nothing (but without a depth it is the mean of the values). A recurrent network
    of an empty batch has no results.
    """
    if op == "Attention":
        plain = len(results) == 1 and len(types) <= 4 and all(t and t.rank == 4 for t in types[:3])
        query = types[0].shape if plain and types[0] is not None else None
        plain = query is not None and _some(query[3])
        return [[(0, 0), (0, 1), (0, 2), (2, 3)]] if plain else None
    x = types[0].shape if op in ("LSTM", "GRU") and types[0] is not None else None
    if x is None or len(x) != 3 or not isinstance(x[1], str) or not (_some(x[0]) and _some(x[2])):
        return None
    shapes: list[list[int | InputAxis]] = []
    for type in results:
        if type.shape is None or x[1] not in type.shape:  # a result with elements
            return None
        if not all(isinstance(d, int) or d == x[1] for d in type.shape):
            return None
        shapes.append([d if isinstance(d, int) else (0, 1) for d in type.shape])
    return shapes


def _some(size: Dim) -> bool:
    return isinstance(size, int) and size > 0


def _axes(types: Types, index: int, start: int = 0) -> Iterator[InputAxis]:
    """The axes of an input from `start` on (negative: from the end)."""
    type = types[index] if index < len(types) else None
    rank = 0 if type is None or type.rank is None else type.rank
    return ((index, axis) for axis in range(start % rank if rank else 0, rank))


def _data(start: int) -> Callable[[Attrs, Types], Iterator[InputAxis]]:
    """A function for an operator whose first input must not be empty along the axes from `start` on."""
    return lambda attrs, types: _axes(types, 0, start)


def _normalised(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    axis = attrs.get("axis", -1)
    assert isinstance(axis, int)
    return _axes(types, 0, axis)


def _attention(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    return (place for index in range(3) for place in _axes(types, index))


def _unmatched_batches(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    """The batch axes of one factor of a product along which the other factor has size 1. If the right factor has no
    batch axes, none are returned: all rows are then multiplied at once.
    """
    a, b = types[:2]
    if (
        a is None
        or b is None
        or a.shape is None
        or b.shape is None
        or all(size == 1 for size in b.shape[:-2])
    ):
        return
    shapes = (a.shape, b.shape)
    rank = max(map(len, shapes))
    batches = [((1,) * (rank - len(shape)) + shape)[:-2] for shape in shapes]
    for index, (own, partner) in enumerate((batches, batches[::-1])):
        absent = rank - len(shapes[index])
        yield from ((index, axis - absent) for axis, n in enumerate(own) if n != 1 == partner[axis])


def _product(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    """For a product whose left factor has no batches and whose right factor has some, also the summed axis: the result
    of an empty sum is undefined, too.
    """
    alone = list(_unmatched_batches(attrs, types))
    yield from alone
    left, right = (0 if type is None else type.rank or 0 for type in types[:2])
    if alone or (left and right > max(left, 2)):
        yield from _axes(types, 0, -1)


def _summed(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    """For a product, the summed axis: the result of an empty sum is undefined. FusedMatMul may transpose its
    factors.
    """
    yield from _unmatched_batches(attrs, types)
    yield from (place for index in range(2) for place in _axes(types, index, -2))


def _image(attrs: Attrs, types: Types) -> Iterator[InputAxis]:
    """The spatial axes of a convolution whose padding alone is smaller than its kernel."""
    weight = types[1].shape if types[1] is not None else None
    if weight is None or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return
    kernel = weight[2:]
    pads, dilations = attrs.get("pads"), attrs.get("dilations")
    ends = pads if isinstance(pads, tuple) else (0,) * (2 * len(kernel))
    steps = dilations if isinstance(dilations, tuple) else (1,) * len(kernel)
    for axis, size in enumerate(kernel):
        reach = (size - 1) * int(steps[axis]) + 1 if isinstance(size, int) else 0
        if int(ends[axis]) + int(ends[axis + len(kernel)]) < reach:
            yield 0, axis + 2


_NEEDS: Mapping[str, Callable[[Attrs, Types], Iterator[InputAxis]]] = {
    "LSTM": _data(0),
    "GRU": _data(0),
    "Attention": _attention,
    "MatMul": _product,
    "MatMulInteger": _summed,
    "com.microsoft::FusedMatMul": _summed,
    "com.microsoft::MatMulIntegerToFloat": _summed,
    "com.microsoft::DynamicQuantizeMatMul": _summed,
    "Conv": _data(1),
    "ConvInteger": _data(1),
    "ConvTranspose": _data(1),
    "MaxPool": _data(1),
    "AveragePool": _data(1),
    "LpPool": _data(1),
    "GlobalMaxPool": _data(1),
    "GlobalAveragePool": _data(1),
    "GlobalLpPool": _data(1),
    "InstanceNormalization": _data(2),
    "GroupNormalization": _data(0),
    "LayerNormalization": _normalised,
    "RMSNormalization": _normalised,
    "com.microsoft::SkipLayerNormalization": _data(-1),
}
_FAILS: Mapping[str, Callable[[Attrs, Types], Iterator[InputAxis]]] = {
    **{op: need for op, need in _NEEDS.items() if "Pool" in op or "Layer" in op or op == "RMSNormalization"},
    "LSTM": lambda attrs, types: iter([(0, 1)]),
    "GRU": _data(0),
    "Attention": _attention,
    "MatMul": _unmatched_batches,
    "Conv": _image,
    "GroupNormalization": _data(2),
}

NEEDING = frozenset(_NEEDS)
"""The operators that need such sizes."""
