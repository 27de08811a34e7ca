"""Estimates of the memory and time that evaluating an operator takes, so that a small file cannot ask for too much.

Operators are evaluated with NumPy, mostly in float64. The estimates of memory and time use only types; they are rough,
and rather too large than too small. An operator whose evaluation would take too much is left to the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from xrlflow.ir import Attrs, DType, Node, TensorType, Value
from xrlflow.ops.schema import split_op
from xrlflow.ops.work import OpKind, work

# The bytes that an element takes during evaluation.
_ELEMENT = 8
# Operations per second: of matrix products, of other operators, and of ONNX's reference implementation in Python.
_PRODUCTS, _OTHERS, _REFERENCE = 1e10, 5e8, 5e5

# Operators whose number of results depends on the values of their input. They give at most this many times as many
# elements as the input has.
_RESULTS_PER_ELEMENT = {"NonZero": 1, "Compress": 1, "Unique": 3}

# Operators that slide a window over a padded input.
_WINDOWS = frozenset(
    {"Conv", "ConvInteger", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "QLinearConv"}
)


@dataclass(frozen=True, slots=True)
class Effort:
    """What an evaluation takes: `bytes` of memory in addition to the inputs, and `seconds` of time."""

    bytes: float
    seconds: float


IMPOSSIBLE = Effort(inf, inf)


def effort(
    op: str,
    attrs: Attrs,
    in_types: Sequence[TensorType | None],
    types: Sequence[TensorType],
    *,
    by_reference: bool = False,
) -> Effort:
    """An estimate of what evaluating one node takes. IMPOSSIBLE if the sizes of its outputs are not known, or if it
    makes strings.

    `by_reference`: whether ONNX's reference implementation evaluates the node, element by element.
    """
    try:
        return _effort(op, attrs, in_types, types, by_reference)
    except (ArithmeticError, IndexError, TypeError, ValueError):  # the inputs do not fit the operator
        return IMPOSSIBLE


def _effort(
    op: str,
    attrs: Attrs,
    in_types: Sequence[TensorType | None],
    types: Sequence[TensorType],
    by_reference: bool,
) -> Effort:
    if any(t.dtype == DType.STRING for t in types) and split_op(op)[1] not in _PASSES_STRINGS:
        return IMPOSSIBLE
    inputs_size = sum(_elements(t) for t in in_types if t is not None)
    outputs_size = sum(_elements(t) for t in types)
    if outputs_size == inf and op in _RESULTS_PER_ELEMENT:
        outputs_size = (
            _RESULTS_PER_ELEMENT[op]
            * max(1, max((t.rank or 1) for t in in_types if t is not None))
            * inputs_size
        )
    if inputs_size == inf or outputs_size == inf:
        return IMPOSSIBLE
    node = Node(
        op, tuple(Value(i + 1) for i in range(len(in_types))), (Value(-1),) * len(types), tuple(types), attrs
    )
    cost = work(node, in_types, {})
    room = _room(op, attrs, in_types, types)
    speed = _REFERENCE if by_reference else _PRODUCTS if cost.kind is OpKind.GEMM else _OTHERS
    seconds = cost.flops / speed + (inputs_size + outputs_size + room) / (
        _REFERENCE if by_reference else _OTHERS
    )
    return Effort((outputs_size + room) * _ELEMENT, seconds)


# Operators that pass strings from an input to an output.
_PASSES_STRINGS = frozenset(
    [
        "Concat",
        "ConstantOfShape",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Reshape",
    ]
    + [
        "ScatterElements",
        "ScatterND",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unique",
        "Unsqueeze",
        "Where",
    ]
)


def _elements(type: TensorType) -> float:
    return inf if type.size is None else float(type.size)


def _room(op: str, attrs: Attrs, in_types: Sequence[TensorType | None], types: Sequence[TensorType]) -> float:
    """The number of elements of intermediate arrays, which exist only during evaluation."""
    shapes = [() if t is None else tuple(d for d in t.shape or () if isinstance(d, int)) for t in in_types]
    if op in _WINDOWS and shapes:
        return _window_room(attrs, shapes, types)
    if op == "Einsum":  # no intermediate array has more elements than all labels give
        equation = attrs.get("equation", "")
        terms = str(equation).partition("->")[0].replace(" ", "").split(",")
        sizes = {
            label: size
            for term, shape in zip(terms, shapes)
            for label, size in zip(term.replace("...", ""), shape)
        }
        return float(prod(sizes.values())) if len(shapes) > 2 else 0.0
    if op in ("GatherND", "Gather", "ReverseSequence", "Resize", "GridSample", "TopK", "Softmax"):
        return 2.0 * sum(_elements(t) for t in types)
    return 0.0


def _window_room(attrs: Attrs, shapes: Sequence[tuple[int, ...]], types: Sequence[TensorType]) -> float:
    """The number of elements of the padded input, and of a window for each position of the output."""
    kernel = _numbers(attrs, "kernel_shape")
    pads = _numbers(attrs, "pads")
    dilations = _numbers(attrs, "dilations")
    space = shapes[0][2:]
    if not kernel and len(shapes) > 1:
        kernel = max((s[2:] for s in shapes[1:]), key=len)
    rank = len(space)
    before, after = pads[:rank] or (0,) * rank, pads[rank:] or (0,) * rank
    reach = tuple(abs(k * d) for k, d in zip(kernel, dilations or (1,) * len(kernel)))
    padded = prod(shapes[0][:2]) * prod(
        n + abs(b) + abs(a) + r for n, b, a, r in zip(space, before, after, reach or (0,) * rank)
    )
    positions = max((prod(d for d in (t.shape or ())[2:] if isinstance(d, int)) for t in types), default=0)
    return float(padded + prod(shapes[0][:2]) * positions * prod(kernel))


def _numbers(attrs: Attrs, name: str) -> tuple[int, ...]:
    value = attrs.get(name, ())
    return tuple(int(v) for v in value) if isinstance(value, tuple) else ()
