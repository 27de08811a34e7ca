"""Rules for graphs as exporters leave them: arithmetic on shapes, needless reshapes, weights in slow formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rewrite_rules.axes import perm_of, reshape_numbers, same_dims
from rewrite_rules.elementwise import BROADCAST, UNARY, read_once
from rewrite_rules.reshape import maker
from xrlflow.ir import ABSENT, Body, Dim, DType, Node, TensorType, Value, dims
from xrlflow.ir.dims import Formula
from xrlflow.ops.symbolic_shapes import refine
from xrlflow.ops.symbolic_values import Known, of_array, values
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, profitable, require

# Shapes as values


_MOST_STEPS = 24


def shape_of(reader: Reader, value: Value) -> tuple[Dim, ...] | None:
    """The dimensions of a value, with new names for unknown dimensions; None for an unknown rank."""
    shape = reader.type(value).shape
    return None if shape is None else tuple(f"#{value}.{i}" if d is None else d for i, d in enumerate(shape))


def elements(reader: Reader, value: Value) -> Known | None:
    """The elements of a value, as far as known, if a short chain of nodes computes it from dimensions; else None."""
    return _elements(reader, value, _MOST_STEPS, {})


def _elements(
    reader: Reader, value: Value, steps: int, cached: dict[tuple[Value, int], Known | None]
) -> Known | None:
    """See `elements`. `steps`: the longest chain of nodes. `cached`: earlier results, which may be needed again."""
    key = (value, steps)
    if key not in cached:
        cached[key] = _elements_of(reader, value, steps, cached)
    return cached[key]


def _elements_of(
    reader: Reader, value: Value, steps: int, cached: dict[tuple[Value, int], Known | None]
) -> Known | None:
    if value == ABSENT:
        return None
    val = reader.val(value)
    if val.array_or_none is not None:
        return of_array(val.array_or_none)
    node = reader.producer(value) if steps else None
    if node is None or node.outputs[0] != value or any(isinstance(a, Body) for a in node.attrs.values()):
        return None
    if node.op == "Shape":  # its input may be any value
        shape = shape_of(reader, node.inputs[0])
        types = [None if shape is None else TensorType(DType.FLOAT, shape)]
        return values(node.op, node.attrs, types, [None], node.types[0])
    if node.types[0].dtype not in _COMPUTED or node.types[0].rank not in _RANKS:
        return None
    kinds = [None if v == ABSENT else reader.type(v) for v in node.inputs]
    inputs = [_elements(reader, v, steps - 1, cached) for v in node.inputs]
    return values(node.op, node.attrs, kinds, inputs, node.types[0])


# The element types in which models compute shapes.
_COMPUTED = frozenset((DType.INT64, DType.INT32, DType.BOOL, DType.FLOAT, DType.DOUBLE))

_RANKS = (None, 0, 1, 2)


def numbers(reader: Reader, value: Value) -> tuple[Dim, ...] | None:
    """The elements of a list of integers as dimensions, each a number, a formula or None if unknown; None if the list
    is unknown.
    """
    numbers_ = elements(reader, value)
    return (
        None
        if numbers_ is None
        else tuple(dims.dim(e) if isinstance(e, Formula) else None for e in numbers_.flat)
    )


def reshaped(reader: Reader, node: Node) -> tuple[Dim, ...] | None:
    """The dimensions of a Reshape's output, computed from those of its input and from how its shape is computed."""
    dtype = node.types[0].dtype
    before, blank = TensorType(dtype, shape_of(reader, node.inputs[0])), TensorType(dtype, None)
    contents = [None, elements(reader, node.inputs[1])]
    shape = refine("Reshape", node.attrs, [before, reader.type(node.inputs[1])], contents, [blank])[0].shape
    own = node.types[0].shape
    if shape is None or own is None or len(own) != len(shape):
        return own
    return tuple(a if b is None else b for a, b in zip(own, shape))


def _takes(before: Sequence[Dim], constant: Sequence[int]) -> bool:
    """Whether a Reshape of known dimensions to a constant shape keeps the number of elements (True if one is not
    known).
    """
    total = _product(before)
    copied = _product(
        [before[i] if n == 0 and i < len(before) else n for i, n in enumerate(constant) if n != -1]
    )
    if total is None or copied is None:
        return True
    return (copied > 0 and total % copied == 0) if -1 in constant else total == copied


def _product(sizes: Sequence[Dim]) -> int | None:
    """The product of numbers; None if one of them is no number."""
    numbers_ = [d for d in sizes if isinstance(d, int)]
    return math.prod(numbers_) if len(numbers_) == len(sizes) else None


class FoldComputedShape(RegionRule, family="exports"):
    """reshape(x, s) -> reshape(x, constant)  for an s that is computed from dimensions, or whose result is known.

    The rule also replaces the shape of an Expand, and removes an Expand without effect. It follows names of dimensions
    through operators where ONNX's own inference gives up: casts, negative indices, and the -1 of a Reshape.
    """

    may_lose_errors = ("sizes",)
    canonicalises = True
    anchors = ("Reshape", "Expand")
    examples = (
        "agraph (float[N,3,4] x) => (float[A,12] y) <int64[1] t = {12}, int64[1] i = {-3}> { s = Shape(x) "
        "g = Gather(s, i) c = Cast<to = 6>(g) d = Cast<to = 7>(c) f = Concat<axis = 0>(d, t) y = Reshape(x, f) }",
        "agraph (float[N,6] x) => (float[A,B,C] y) <int64[3] r = {-1, 2, 3}, int64[1] t = {2}, int64[1] u = {1}, "
        "int64[1] v = {0}, int64[1] w = {3}> { a = Reshape(x, r) s = Shape(x) g = Slice(s, v, u, v) "
        "h = Cast<to = 6>(g) k = Cast<to = 7>(h) f = Concat<axis = 0>(k, t, w) y = Expand(a, f) }",
        "agraph (float[N,M,4] x) => (float[A,B,C] y) <int64 i = {-2}, int64 j = {0}, int64[1] z = {0}, "
        "int64[2] o = {2, 2}> { s = Shape(x) g = Gather(s, i) h = Gather(s, j) k = Unsqueeze(g, z) "
        "l = Unsqueeze(h, z) k2 = Cast<to = 6>(k) k3 = Cast<to = 7>(k2) f = Concat<axis = 0>(l, k3, o) "
        "y = Reshape(x, f) }",
        "agraph (float[N,1,4] x) => (float[A,B,C] y) { s = Shape(x) c = Cast<to = 6>(s) d = Cast<to = 7>(c)"
        " y = Expand(x, d) }",
        "agraph (float[N,3,4] x, float[N,12] z) => (float[N,12] y) <int64[2] o = {0, 0}> {"
        " t = Shape(z) s = Add(t, o) y = Reshape(x, s) }",
        "agraph (float[N,1] x, float[N,3] z) => (float[N,3] y) <int64[2] o = {0, 0}> {"
        " t = Shape(z) s = Add(t, o) y = Expand(x, s) }",
        "agraph (float[N,3,1] x, float[N] z) => (float[N,3,2] y) <int64[2] t = {1, 2}> {"
        " s = Shape(z) c = Cast<to = 6>(s) d = Cast<to = 7>(c) f = Concat<axis = 0>(d, t) y = Expand(x, f) }",
        *(f"agraph (float[N,4] x) => (float[{size},N,4] y) <int64[1] t = {{{size}}}> {{ s = Shape(x)"
          " c = Cast<to = 6>(s) d = Cast<to = 7>(c) f = Concat<axis = 0>(t, d) y = Expand(x, f) }"
          for size in (3, 1)),
    )  # fmt: skip
    near_misses = (
        "agraph (float[N,3,0] x) => (float[A,B] y) <int64[1] z = {0}, int64[1] o = {1}> {"
        " s = Shape(x) g = Slice(s, z, o) f = Concat<axis = 0>(g, z) y = Reshape<allowzero = 1>(x, f) }",
        # No runtime takes this model.
        "agraph (float[N,3,1] x, float[N] z) => (float[A,B,C] y) <int64[2] t = {4, 2}> {"
        " s = Shape(z) c = Cast<to = 6>(s) d = Cast<to = 7>(c) f = Concat<axis = 0>(d, t) y = Expand(x, f) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        source, shape = node.inputs
        before = shape_of(reader, source)
        if reader.is_const(shape) or node.const or before is None:
            return None
        if node.op == "Reshape":
            after = reshaped(reader, node)
            if after is None:
                return None
            constant = reshape_numbers(before, after)
            profitable(_takes(before, constant), "no runtime takes the model")
            return Region(node.outputs, (source,), (node,), constant)
        target = numbers(reader, shape)
        if target is None or None in target:  # the shape is computed from something other than dimensions
            target = node.types[0].shape
            if target is None:
                return None
        before = (1,) * (len(target) - len(before)) + before
        own = before[len(before) - len(target) :]
        unchanged = all(d == 1 or dims.equal(d, b) for d, b in zip(target, own))
        if unchanged and reader.type(source).rank == len(before):
            return Region(node.outputs, (source,), (node,), None)
        static = all(isinstance(d, int) or dims.equal(d, b) for d, b in zip(target, own))
        require(static, "a dimension is not known")
        joined = (
            d == 1 or b in (1, d) for d, b in zip(target, own) if isinstance(d, int) and isinstance(b, int)
        )
        profitable(all(joined), "no runtime takes the model")
        return Region(node.outputs, (source,), (node,), [d if isinstance(d, int) else 1 for d in target])

    def target(self, op: Op, region: Region, x: Val) -> Any:
        if region.data is None:
            return x
        return op[region.nodes[0].op](x, list(region.data))


def _flattened(leading: str) -> str:
    """The text of an example: a transpose of the last two dimensions, for which the leading ones are merged and split
    again.
    """
    return (
        f"agraph (float[{leading},M,4] x) => (float[{','.join('ABCDE'[: leading.count(',') + 3])}] y) {{"
        " all = Constant<value_ints = [-1]>() two = Constant<value_ints = [-2]>() low = Constant<value_ints = [0]>()"
        " end = Constant<value_ints = [100]>() s = Shape(x) m = Slice(s, two, all) n = Slice(s, all, end)"
        " lead = Slice(s, low, two) f = Concat<axis = 0>(all, m, n) a = Reshape(x, f)"
        " b = Transpose<perm = [0, 2, 1]>(a) g = Concat<axis = 0>(lead, n, m) y = Reshape(b, g) }"
    )


class MergeFlattenedTranspose(RegionRule, family="exports"):
    """reshape(transpose(reshape(x, [-1, m, n])), [..., n, m]) -> transpose(x)  of the last dimensions of x.

    Reshapes to computed shapes merge the leading dimensions before the transpose, and split them afterwards.
    """

    may_lose_errors = ("sizes",)
    canonicalises = True
    anchors = ("Reshape",)
    reads_from = ("Transpose",)
    examples = tuple(map(_flattened, ("N,3", "N,5", "N,2,3", "2,3", "5", "3,1", "N", "2,3,4")))
    near_misses = (
        *map(_flattened, ("2,N", "N,K")),
        _flattened("N,3").replace("y = Reshape(", "y = Reshape<allowzero = 1>("),
        # If M and N are 0, the second Reshape copies the 100.
        "agraph (float[N,M,4] x) => (float[A,B,C] y) <int64[1] h = {100}, int64[1] z = {0}, int64[1] k = {-2}, "
        "int64[1] l = {-1}, int64[1] e = {9}> { s = Shape(x) m = Slice(s, k, l) n = Slice(s, l, e) "
        "t = Concat<axis=0>(h, m, n) a = Reshape(x, t) b = Transpose<perm=[0,2,1]>(a) i = Slice(s, z, k) "
        "u = Concat<axis=0>(i, n, m) y = Reshape(b, u) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        transpose = maker(reader, node.inputs[0], ("Transpose",))
        flat = None if transpose is None else maker(reader, transpose.inputs[0], ("Reshape",))
        if transpose is None or flat is None:
            return None
        if node.attrs.get("allowzero") or flat.attrs.get("allowzero"):
            return None
        before, first = shape_of(reader, flat.inputs[0]), numbers(reader, flat.inputs[1])
        second = numbers(reader, node.inputs[1])
        if before is None or first is None or second is None or None in before or len(before) != len(second):
            return None
        perm = perm_of(transpose, len(first))
        behind = len(first) - 1
        leading = len(before) - behind
        require(perm[0] == 0, "the leading dimensions move")
        own = [before[i] if d == 0 and i < len(before) else d for i, d in enumerate(first)]
        require(same_dims(own[1:], before[leading:]), "the last dimensions are not those of x")
        full_perm = (*range(leading), *(p - 1 + leading for p in perm[1:]))
        after = [before[p] for p in full_perm]
        require(same_dims(after, second), "the dimensions are not those of x")
        sure = all(isinstance(d, int) and d > 0 for d in before[leading:])
        require(sure or own[0] == -1 or [own[0]] == [*before[:leading]], "another number may lead")
        # A 0 in a shape copies the input's dimension. (The first dimension merges all leading ones, and is 0 if one of
        # them is.)
        transposed = [own[p] for p in perm]
        fits = ((isinstance(d, int) and d > 0) or d == t for d, t in zip(second[1:], transposed[1:]))
        require(all(fits), "a dimension may be 0, and another be copied")
        return Region(node.outputs, (flat.inputs[0],), (node, transpose, flat), full_perm)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Transpose(x, perm=list(region.data))


_Chain = list[tuple[Node, int]]


def _chain(reader: Reader, value: Value, ranks: tuple[int, ...]) -> _Chain | None:
    """The element-wise nodes above a value, nearest first, each with the index of the operand that leads further up.

    The other operands have one of these ranks. None if a value on the way has other readers.
    """
    chain: _Chain = []
    while True:
        node = reader.producer(value)
        if node is None or node.const or (node.op not in BROADCAST and node.op not in UNARY):
            return chain
        operands = [i for i, v in enumerate(node.inputs) if v != ABSENT and reader.type(v).rank not in ranks]
        if len(operands) != 1:
            return chain
        if not read_once(reader, value):
            return None
        chain.append((node, operands[0]))
        value = node.inputs[operands[0]]


def _end(node: Node, chain: _Chain) -> Value:
    """The value at the upper end of the chain above a node."""
    return chain[-1][0].inputs[chain[-1][1]] if chain else node.inputs[0]


def _other_operands(chain: _Chain) -> list[Value]:
    """The operands of a chain's nodes that do not lead further up, nearest node first."""
    return [v for node, at in chain for i, v in enumerate(node.inputs) if i != at]


def _replayed(op: Op, chain: _Chain, value: Any, operands_: Sequence[Val | None]) -> Any:
    """The same chain of operators applied to another value."""
    remaining = list(operands_)
    for node, at in reversed(chain):
        count = len(node.inputs) - 1
        operands, remaining = remaining[len(remaining) - count :], remaining[: len(remaining) - count]
        operands.insert(at, value)
        value = op[node.op](*operands, attrs=node.attrs)
    return value


class MoveReshapeIntoConstant(RegionRule, family="exports"):
    """reshape(f(c, s, ...)) -> f(reshape(c), s, ...)  for a constant c, scalars s, and f element by element.

    An example: c is a bias, and f divides it by a scale that is known only at run time.
    """

    anchors = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")
    reads_from = (*UNARY, *BROADCAST)
    examples = tuple(
        f"agraph (float s) => ({result} y) <float[{shape}] b = {{1, -2, 3, 5}}> {{ d = {first} f = Floor(d)"
        f" i = Constant<value_ints = [{axes}]>() y = {op}(f, i) }}"
        for result, shape, axes, op in (
            ("float[1,4,1,1]", "4", "1, -1, 1, 1", "Reshape"),
            ("float[4,1]", "4", "1", "Unsqueeze"),
            ("float[4]", "1,4", "0", "Squeeze"),
        )
        for first in ("Div(b, s)", "Sub(s, b)")
    ) + (
        "agraph (float s) => (float[1,4] y) <float[4] b = {1, -2, 3, 5}> { d = Div(b, s) y = Flatten<axis = 0>(d) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        chain = _chain(reader, node.inputs[0], (0,))
        if not chain or not reader.is_const(_end(node, chain)):
            return None
        shape_inputs = node.inputs[1:]
        profitable(all(map(reader.is_const, shape_inputs)), "the shape is computed")
        inputs = (_end(node, chain), *shape_inputs, *_other_operands(chain))
        nodes = (node, *(n for n, _ in chain))
        return Region(node.outputs, inputs, nodes, (node.op, node.attrs, len(shape_inputs), tuple(chain)))

    def target(self, op: Op, region: Region, c: Val, *more: Val | None) -> Any:
        name, attrs, shape_inputs, chain = region.data
        return _replayed(op, list(chain), op[name](c, *more[:shape_inputs], attrs=attrs), more[shape_inputs:])


class KeepRowsInQuantizedProduct(RegionRule, family="exports"):
    """reshape(f(q(reshape(x, [r, k])) w), [..., n]) -> f(q(reshape(x, [..., k])) w)  for f element by element.

    q is DynamicQuantizeLinear, and the product is MatMulInteger.
    """

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "the range that DynamicQuantizeLinear finds is that of all elements, wherever they stand"
    anchors = ("Reshape",)
    reads_from = ("Add", "Mul", "Cast", "MatMulInteger")
    examples = tuple(
        f"agraph (float[{before}] x) => (float[{after}] y) <uint8[4,2] w = {{0, 255, 7, 128, 127, 30, 9, 200}},"
        " uint8 v = {120}, float[2] b = {0.5, -1.25}, float c = {0.25}> {"
        f" k = Constant<value_ints = [{flat}]>() r = Reshape(x, k) q, s, z = DynamicQuantizeLinear(r)"
        " m = MatMulInteger(q, w, z, v) f = Cast<to = 1>(m) t = Mul(s, c) g = Mul(f, t) h = Add(g, b)"
        f" l = Constant<value_ints = [{out}]>() y = Reshape(h, l) }}"
        for before, after, flat, out in (
            ("3,2,4", "3,2,2", "-1, 4", "3, 2, 2"),
            ("N,2,2", "N,1,2", "0, 4", "0, 1, 2"),
            ("2,3,2,2", "2,3,2", "6, 4", "2, -1, 2"),
        )
    ) + (
        "agraph (float[3,2,4] x) => (int32[3,2,2] y) <uint8[4,2] w = {0, 255, 7, 128, 127, 30, 9, 200},"
        " uint8 v = {120}, int64[2] k = {-1, 4}, int64[3] l = {3, 2, 2}> {"
        " r = Reshape(x, k) q, s, z = DynamicQuantizeLinear(r) m = MatMulInteger(q, w, z, v) y = Reshape(m, l) }",
    )
    near_misses = (
        examples[0].replace("x) =>", "x, uint8 t0) =>").replace("(q, w, z, v)", "(q, w, t0, v)"),
        # The rows are already separate in this graph.
        examples[0].replace("float[3,2,4] x", "float[6,4] r").replace("r = Reshape(x, k)", ""),
        examples[0].replace("3,2,4", "6,4").replace("Reshape(x, k)", "Neg(x)"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        chain = _chain(reader, node.inputs[0], (0, 1))
        product = None if chain is None else reader.producer(_end(node, chain))
        if chain is None or product is None or product.op != "MatMulInteger":
            return None
        quantize = reader.producer(product.inputs[0])
        if quantize is None or quantize.op != "DynamicQuantizeLinear" or len(product.inputs) != 4:
            return None
        flat = maker(reader, quantize.inputs[0], ("Reshape",))
        if flat is None or not read_once(reader, quantize.outputs[0]):
            return None
        profitable(read_once(reader, quantize.inputs[0]), "the rows are read elsewhere")
        require(product.inputs[2] == quantize.outputs[2], "another zero point is taken")
        rows, columns = shape_of(reader, quantize.inputs[0]), reader.type(product.inputs[1]).shape
        source, after = shape_of(reader, flat.inputs[0]), reshaped(reader, node)
        if rows is None or source is None or after is None or columns is None:
            return None
        if len(rows) != 2 or len(columns) != 2 or len(after) < 2:
            return None
        require(after[-1] == columns[1] != 0 and rows[-1] == columns[0] != 0, "the rows are cut")
        shape = reshape_numbers(source, [*after[:-1], rows[-1]])
        weights = product.inputs[1], product.inputs[3]
        inputs = (flat.inputs[0], *weights, *_other_operands(chain))
        nodes = (node, *(n for n, _ in chain), product, quantize, flat)
        return Region((node.outputs[0], *quantize.outputs[1:]), inputs, nodes, (tuple(shape), tuple(chain)))

    def target(self, op: Op, region: Region, x: Val, w: Val, v: Val, *more: Val | None) -> Any:
        shape, chain = region.data
        quantized, scale, zero = op.DynamicQuantizeLinear(op.Reshape(x, list(shape)), outputs=3)
        value = _replayed(op, list(chain), op.MatMulInteger(quantized, w, zero, v), more)
        return [value, scale, zero]
