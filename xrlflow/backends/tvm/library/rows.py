"""Which nodes compute each row of their results from the same row of their operands.

The dimensions of a tensor up to its last open one are its *row dimensions*, and their product is its number of rows: a
text of shape [batch, length, 384] has batch * length rows of 384 numbers. A region of nodes that treat each row alone
is compiled for a few numbers of rows, and runs for any number of them, block by block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto

from xrlflow.backends.tvm.library.code_generation import RowPort
from xrlflow.ir import TensorType, dims
from xrlflow.onnxio.regions import Region, made_of_weights
from xrlflow.onnxio.versions import opset_of


@dataclass(frozen=True, slots=True)
class Rows:
    """The row dimensions of a tensor, and their product, as a formula. Equal formulas have equal texts."""

    sizes: tuple[dims.Dim, ...]
    count: dims.Dim

    @property
    def dimensions(self) -> int:
        return len(self.sizes)


def rows_of(kind: TensorType) -> Rows | None:
    """The rows of a tensor. None if it has no open dimension, or one of unknown size, or a number other than 1 before
    its last open dimension."""
    shape = kind.shape
    if shape is None or None in shape:
        return None
    last = max((i for i, d in enumerate(shape) if isinstance(d, str)), default=-1)
    sizes = shape[: last + 1]
    if last < 0 or any(isinstance(d, int) and d != 1 for d in sizes):
        return None
    try:
        count = functools.reduce(lambda a, b: a * b, (dims.formula(d) for d in sizes if d is not None))
    except dims.FormulaTooLarge:
        return None
    return Rows(sizes, dims.dim(count))


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand or a result of a node. `rows`: None for a constant. `value`: the numbers of a small constant."""

    shape: tuple[dims.Dim, ...]
    rows: Rows | None = None
    value: npt.NDArray[Any] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class RowNode:
    """A node with its operands (None: absent) and results. `leading`: the number of row dimensions of its results,
    which those of its operands that are no constants share, unless it only changes shapes."""

    op: str
    attributes: Mapping[str, Any]
    operands: tuple[Operand | None, ...]
    results: tuple[Operand, ...]
    leading: int

    @property
    def rank(self) -> int:
        return self.results[0].rank

    def has_rows(self, index: int) -> bool:
        """Whether an operand is there and has rows."""
        operand = self.operand(index)
        return operand is not None and operand.rows is not None

    def operand(self, index: int) -> Operand | None:
        return self.operands[index] if 0 <= index < len(self.operands) else None

    def numbers(self, name: str, index: int) -> list[int] | None:
        """Integers that are an attribute, or a constant operand; None if they are absent or unknown."""
        given = self.attributes.get(name)
        if given is None:
            operand = self.operand(index)
            given = None if operand is None else operand.value
        return None if given is None else [int(n) for n in np.atleast_1d(given)]


_Check = Callable[[RowNode], bool]


def _behind(node: RowNode, axes: Sequence[int] | None, rank: int) -> bool:
    """Whether all of these axes come after the row dimensions."""
    return axes is not None and all((a + rank if a < 0 else a) >= node.leading for a in axes)


def _spares(shape: Sequence[dims.Dim], rank: int, leading: int) -> bool:
    """Whether a constant that is broadcast to this rank is the same for all rows."""
    first = len(shape) - (rank - leading)
    return len(shape) <= rank and all(d == 1 for d in shape[: max(first, 0)])


def _elementwise(node: RowNode) -> bool:
    return all(
        operand.rank == node.rank
        if operand.rows is not None
        else _spares(operand.shape, node.rank, node.leading)
        for operand in node.operands
        if operand is not None
    )


def _along(name: str = "axis", at: int = -1, of: int = 0) -> _Check:
    """Operators along axes, of which operand `of` has rows and the others are constants that are the same for all of
    them. `name`, `at`: the attribute or the operand with the axes."""

    def check(node: RowNode) -> bool:
        first = node.operand(of)
        if first is None or first.rows is None or not _behind(node, node.numbers(name, at), first.rank):
            return False
        others = [x for i, x in enumerate(node.operands) if x is not None and i not in (of, at)]
        return all(x.rows is None and x.rank <= first.rank - node.leading for x in others)

    return check


def _concat(node: RowNode) -> bool:
    rows = all(node.has_rows(i) for i in range(len(node.operands)))
    return rows and _behind(node, node.numbers("axis", -1), node.rank)


def _matmul(node: RowNode) -> bool:
    a, b = node.operands
    assert a is not None
    assert b is not None
    k = node.leading
    if a.rows is not None and b.rows is not None:  # one product for each row
        return a.rank == b.rank == node.rank >= k + 2
    if a.rows is not None:
        if b.rank <= 2:
            return a.rank > k
        return a.rank == node.rank >= max(b.rank, k + 2) and _spares(b.shape[:-2], a.rank - 2, k)
    return b.rank == node.rank >= k + 2 and a.rank >= 2 and _spares(a.shape[:-2], b.rank - 2, k)


def _gemm(node: RowNode) -> bool:
    a, b, c = (*node.operands, None)[:3]
    assert a is not None
    assert b is not None
    plain = a.rows is not None and not node.attributes.get("transA", 0) and node.leading == 1
    return plain and b.rows is None and (c is None or (c.rows is None and _spares(c.shape, 2, 1)))


def _gather(node: RowNode) -> bool:
    data, indices = node.operands
    assert data is not None
    assert indices is not None
    axis = int(node.attributes.get("axis", 0))
    if data.rows is None:
        return axis in (0, -data.rank)
    return indices.rows is None and _behind(node, [axis], data.rank)


def _transpose(node: RowNode) -> bool:
    perm = node.attributes.get("perm")
    return perm is not None and list(perm[: node.leading]) == list(range(node.leading))


def _reshaped(node: RowNode) -> bool:
    """Elements keep their order and rows their number, so each row keeps its elements."""
    return all(operand is None or operand.rows is None for operand in node.operands[1:])


def _slice(node: RowNode) -> bool:
    axes = node.numbers("axes", 3)
    return _rest_constant(node) and _behind(node, axes, node.rank)


def _pad(node: RowNode) -> bool:
    pads = node.numbers("pads", 1)
    if pads is None or node.operand(3) is not None or len(pads) != 2 * node.rank:
        return False
    return _rest_constant(node) and not any((*pads[: node.leading], *pads[node.rank :][: node.leading]))


def _ones_first(at: int) -> _Check:
    """Operators whose operand `at` has a number for each dimension, which is 1 for those of rows."""

    def check(node: RowNode) -> bool:
        first, given = node.operand(0), node.operand(at)
        if first is None or given is None or given.value is None or first.rank != node.rank:
            return False
        numbers = given.value.ravel()
        before = numbers[: max(0, len(numbers) - (node.rank - node.leading))]
        return _rest_constant(node) and all(n == 1 for n in before)

    return check


def _rest_constant(node: RowNode) -> bool:
    first, *rest = node.operands
    return first is not None and first.rows is not None and all(x is None or x.rows is None for x in rest)


def _images(node: RowNode) -> bool:
    """Operators on images, whose first dimension counts images. (A second result of MaxPool counts them, too.)"""
    return node.leading == len(node.results) == 1 and _rest_constant(node)


def _quantised(node: RowNode) -> bool:
    scale = node.operand(1)
    if not _rest_constant(node) or scale is None or node.attributes.get("block_size", 0):
        return False
    return math.prod(d for d in scale.shape if isinstance(d, int)) == 1 or _behind(
        node, node.numbers("axis", -1), node.rank
    )


_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
_ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor",
    "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow", "PRelu", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh",
    "ThresholdedRelu", "Where", "Xor",
)  # fmt: skip
_ON_IMAGES = (
    "AveragePool", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "InstanceNormalization", "LRN", "LpPool", "MaxPool", "SpaceToDepth",
)  # fmt: skip
_CHECKS: Mapping[str, _Check] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _along("axes", 1)),
    **dict.fromkeys(
        ("Hardmax", "LayerNormalization", "LogSoftmax", "LpNormalization", "RMSNormalization"), _along()
    ),
    **dict.fromkeys(("Softmax", "Split"), _along()),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _reshaped),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _quantised),
    **dict.fromkeys(_ON_IMAGES, _images),
    "BatchNormalization": lambda node: _images(node) and not node.attributes.get("training_mode", 0),
    "Concat": _concat,
    "CumSum": _along("axis", 1),
    "Expand": _ones_first(1),
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Pad": _pad,
    "Resize": lambda node: node.leading == 1 and node.operand(1) is None and _ones_first(2)(node),
    "Slice": _slice,
    "Tile": _ones_first(1),
    "Transpose": _transpose,
}
"""For each operator, whether a node of it computes each row of its results from the same row of its operands."""

# Operators whose operands may have other row dimensions than their results, with the same product.
_RESHAPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# Constants with more elements are not read.
_SMALL = 64


class RowStructure:
    """The rows of the values of a model with open dimensions. `kinds`: the types of its values."""

    def __init__(self, model: ModelProto, kinds: Mapping[str, TensorType]) -> None:
        graph = model.graph
        self._opset = opset_of(model) or 1
        self._kinds = kinds
        self._constants = _constants(graph, kinds)
        self._values = {
            tensor.name: onnx.numpy_helper.to_array(tensor)
            for tensor in graph.initializer
            if tensor.name in self._constants and math.prod(tensor.dims) <= _SMALL
        }
        self.rows: dict[str, Rows] = {}
        for name, kind in kinds.items():
            rows = None if name in self._constants else rows_of(kind)
            if rows is not None:
                self.rows[name] = rows

    def fits(self, node: NodeProto) -> bool:
        """Whether a node computes each row of its results from the same row of its operands, or constants of
        constants."""
        if node.output and all(name in self._constants for name in node.output if name):
            return True
        check = _CHECKS.get(node.op_type)
        if check is None or node.domain not in ("", "ai.onnx"):
            return False
        results = [self._operand(name) for name in node.output if name]
        operands = [self._operand(name) for name in node.input]
        if any(x is None for x in results) or any(
            name and x is None for name, x in zip(node.input, operands)
        ):
            return False
        made = tuple(x for x in results if x is not None)
        with_rows = [x.rows for x in (*operands, *made) if x is not None and x.rows is not None]
        if any(x.rows is None for x in made) or len({rows.count for rows in with_rows}) != 1:
            return False
        if len(with_rows) == len(made):  # all operands are constants
            return False
        if node.op_type not in _RESHAPING and len({rows.sizes for rows in with_rows}) != 1:
            return False
        return check(
            RowNode(node.op_type, self._attributes(node), tuple(operands), made, with_rows[-1].dimensions)
        )

    def types(self, count: int, names: Iterable[str] | None = None) -> dict[str, TypeProto]:
        """The types of constants, and of values with rows if there are `count` rows. `names`: by default all."""
        types = {}
        for name in self._kinds if names is None else names:
            rows = self.rows.get(name)
            if rows is None and name not in self._constants:
                continue
            kind = self._kinds[name]
            shape = list(kind.shape or ())
            if rows is not None:
                shape[: rows.dimensions] = [1] * (rows.dimensions - 1) + [count]
            types[name] = onnx.helper.make_tensor_type_proto(int(kind.dtype), shape)
        return types

    def ports(self, region: Region) -> tuple[RowPort, ...] | None:
        """The inputs of a region, then its outputs. None if a value has no rows, or if an output has several row
        dimensions that no input has."""
        given = [self.rows.get(name) for name in region.inputs]
        sizes = [None if rows is None else rows.sizes for rows in given]
        ports = []
        for name in (*region.inputs, *region.outputs):
            rows = self.rows.get(name)
            if rows is None or (rows.sizes not in sizes and any(d != 1 for d in rows.sizes[:-1])):
                return None
            like = sizes.index(rows.sizes) if rows.sizes in sizes else -1
            ports.append(RowPort(rows.dimensions, like))
        return tuple(ports)

    def reuse(self, graph: GraphProto, region: Region) -> float | None:
        """How often a row uses each weight of a region's products, on average. None if it has no products with
        weights."""
        weights = uses = 0
        for node in (graph.node[i] for i in region.nodes):
            known = [name for name in node.input if name in self._constants]
            if node.op_type not in _PRODUCTS or not known:
                continue
            size = max(self._elements(name) for name in known)
            result = node.output[0]
            shape = self._kinds[result].shape or ()
            channels = shape[-1 if node.op_type in ("Gemm", "MatMul") else 1]
            weights += size
            uses += size * self._elements(result) // max(1, channels if isinstance(channels, int) else 1)
        return uses / weights if weights else None

    def _elements(self, name: str) -> int:
        """The number of elements of a constant, or of a row of a value."""
        shape = self._kinds[name].shape or ()
        return math.prod(d for d in shape if isinstance(d, int))

    def _operand(self, name: str) -> Operand | None:
        kind = self._kinds.get(name)
        if kind is None or kind.shape is None:
            return None
        if name in self._constants:
            return Operand(kind.shape, value=self._values.get(name))
        rows = self.rows.get(name)
        return None if rows is None else Operand(kind.shape, rows)

    def _attributes(self, node: NodeProto) -> dict[str, Any]:
        """The attributes of a node, with the defaults of its operator."""
        declared = onnx.defs.get_schema(node.op_type, self._opset).attributes
        values = {
            name: onnx.helper.get_attribute_value(attribute.default_value)
            for name, attribute in declared.items()
            if attribute.default_value.type != onnx.AttributeProto.UNDEFINED
        }
        values.update((a.name, onnx.helper.get_attribute_value(a)) for a in node.attribute)
        return values


def _constants(graph: GraphProto, kinds: Mapping[str, TensorType]) -> AbstractSet[str]:
    """The names of initializers that no caller replaces, and of what is made of them alone, if their sizes are
    fixed."""
    given = {value.name for value in graph.input}
    names = {tensor.name for tensor in graph.initializer} - given
    names.update(name for i in made_of_weights(graph) for name in graph.node[i].output)
    return {name for name in names if name in kinds and kinds[name].is_static}
