"""Evaluates what a model computes from its dimensions, as formulas: shapes, axes and counts before any size is known.

The elements of a value are formulas (integers), calls and numbers (floating point, where only the structure is known,
because rounding has no algebra), booleans, or None if unknown. Integers may overflow when a model runs. The result of
sums and products is the same modulo 2^64, however often they overflow. A division or a comparison becomes a formula
only if its operands are known to fit in their type (`xrlflow.ir.dims.bounds`); otherwise it becomes a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.ir import SMALL, Attrs, DType, TensorType, dims
from xrlflow.ir.dims import Call, Formula
from xrlflow.ops.evaluate import evaluate_node
from xrlflow.ops.field import NotEvaluable

Element = Formula | Call | float | bool | None
Known = npt.NDArray[Any]
"""An array of Elements (dtype object)."""

_RANGES = {
    DType.INT64: (-(2**63), 2**63 - 1),
    DType.INT32: (-(2**31), 2**31 - 1),
    DType.INT16: (-(2**15), 2**15 - 1),
    DType.INT8: (-(2**7), 2**7 - 1),
    DType.UINT64: (0, 2**64 - 1),
    DType.UINT32: (0, 2**32 - 1),
    DType.UINT16: (0, 2**16 - 1),
    DType.UINT8: (0, 2**8 - 1),
}
_FLOATS = frozenset({DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16})


def of_array(array: npt.NDArray[Any]) -> Known | None:
    """The elements of a constant; None for strings and other types without numbers."""
    if array.dtype.kind == "b":
        return _each(bool, array)
    if array.dtype.kind in "iu":
        return _each(lambda n: dims.number(int(n)), array)
    return _each(float, array) if array.dtype.kind == "f" else None


def numbers(elements: Known | None) -> npt.NDArray[np.int64] | None:
    """The elements as integers; None unless all are numbers that fit in 64 bits."""
    if elements is None:
        return None
    integers = [e.number if isinstance(e, Formula) else None for e in elements.flat]
    if any(n is None or not -(2**63) <= n < 2**63 for n in integers):
        return None
    return np.array(integers, np.int64).reshape(elements.shape)


def fits(formula: Formula, dtype: DType = DType.INT64) -> bool:
    """Whether a formula fits in an integer type at all sizes of its symbols."""
    low, high = dims.bounds(formula)
    minimum, maximum = _RANGES[dtype]
    return low >= minimum and high <= maximum


def values(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    inputs: Sequence[Known | None],
    out: TensorType,
) -> Known | None:
    """The elements of the first output of a node; None if none is known, or there are more than SMALL.

    `types` are the types of the inputs (None: absent), `inputs` the inputs' elements, as far as known.
    """
    result = _values(op, attrs, types, inputs, out)
    # If shape and elements disagree, the node does not compute what was assumed here.
    shape = out.shape
    if result is not None and shape is not None and len(shape) != result.ndim:
        return None
    agree = result is None or all(not isinstance(d, int) or d == n for d, n in zip(shape or (), result.shape))
    return result if agree else None


def _values(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    inputs: Sequence[Known | None],
    out: TensorType,
) -> Known | None:
    try:
        if op == "Shape":
            return _shape(attrs, types[0])
        if op == "Size":
            shape = None if types[0] is None else types[0].shape
            return None if shape is None or None in shape else _scalar(_volume(shape))
        if op in _MOVES:
            return _movement(op, attrs, types, inputs)
        if op == "ConstantOfShape":
            return _filled(attrs, inputs, out)
        if op == "Range":
            return _range(inputs)
        if any(x is None for x in inputs):
            return None
        complete = [x for x in inputs if x is not None]
        if op in _REDUCTIONS:
            return _reduced(op, attrs, complete, out.dtype)
        if op in _ELEMENTWISE:
            kind = types[0].dtype if types[0] is not None else out.dtype
            return _elementwise(op, attrs, complete, kind, out.dtype)
    except (ValueError, IndexError, ZeroDivisionError, NotEvaluable):  # the inputs do not fit
        return None
    except dims.FormulaTooLarge:
        return None
    return None


def _volume(shape: Sequence[int | str | None]) -> Formula:
    total = dims.ONE
    for dim in shape:
        assert dim is not None
        total = total * dims.formula(dim)
    return total


def _each(function: Callable[..., Element], *arrays: npt.NDArray[Any]) -> Known:
    """Apply a function to the elements of arrays, with broadcasting."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    out = np.empty(shape, object)
    broadcast = [np.broadcast_to(a, shape).flat for a in arrays]
    for index, elements in zip(np.ndindex(shape), zip(*broadcast)):
        out[index] = function(*elements)
    return out


def _scalar(element: Element) -> Known:
    out = np.empty((), object)
    out[()] = element
    return out


def _shape(attrs: Attrs, type: TensorType | None) -> Known | None:
    if type is None or type.shape is None:
        return None
    start, end = attrs.get("start", 0), attrs.get("end", len(type.shape))
    assert isinstance(start, int)
    assert isinstance(end, int)
    selected = type.shape[start:end]
    out = np.empty(len(selected), object)
    for i, dim in enumerate(selected):
        out[i] = None if dim is None else dims.formula(dim)
    return out


# Operators that only move elements, with the indices of the inputs that they move: the first; all of Concat; two of the
# scatters.
_MOVES: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(
        ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Split", "Slice", "Gather"),
        (0,),
    ),
    **dict.fromkeys(("GatherElements", "GatherND", "Tile", "Expand"), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Concat": range(1 << 30),
}


def _movement(
    op: str, attrs: Attrs, types: Sequence[TensorType | None], inputs: Sequence[Known | None]
) -> Known | None:
    if attrs.get("reduction", "none") != "none":
        return None
    arguments: list[npt.NDArray[Any] | None] = []
    carried = _MOVES[op]
    for i, x in enumerate(inputs):
        arguments.append(x if i in carried else numbers(x))
        if arguments[-1] is None and types[i] is not None:
            return None
    if op == "Expand" and arguments[1] is not None and np.prod(arguments[1].clip(1)) > SMALL:
        return None
    if op == "Tile" and arguments[1] is not None and np.prod(arguments[1]) > SMALL:
        return None
    result = evaluate_node(op, attrs, arguments, 1)[0]
    return result if result.size <= SMALL else None


def _filled(attrs: Attrs, inputs: Sequence[Known | None], out: TensorType) -> Known | None:
    shape = numbers(inputs[0])
    if shape is None or (shape < 0).any() or np.prod(shape.astype(object), initial=1) > SMALL:
        return None
    empty = evaluate_node("ConstantOfShape", attrs, [np.array([1], np.int64)], 1)[0]
    if out.dtype in _RANGES:
        empty = empty.astype(np.int64)
    one = of_array(empty)
    return None if one is None else np.broadcast_to(one, tuple(shape.tolist())).copy()


def _range(inputs: Sequence[Known | None]) -> Known | None:
    ends = [numbers(x) for x in inputs]
    if any(e is None or e.size != 1 for e in ends):
        return None
    start, stop, step = (int(e.item()) for e in ends if e is not None)
    numbers_ = range(start, stop, step)
    return None if len(numbers_) > SMALL else of_array(np.array(numbers_, np.int64))


# Arithmetic


def _wrapped(value: Formula, dtype: DType) -> Element:
    """The result of sums and products. 64 bits may overflow; results of narrower types must be known to fit."""
    if dtype == DType.INT64 or fits(value, dtype):
        return value
    return dims.call(f"wrap.{dtype.name.lower()}", value)


def _ring(function: Callable[[Formula, Formula], Formula], dtype: DType) -> Callable[..., Element]:
    return lambda a, b: _wrapped(function(a, b), dtype)


def _quotient(a: Formula, b: Formula) -> Formula:
    """ONNX's integer division: rounded towards zero."""
    if dims.not_less(a, dims.ZERO) and dims.not_less(b, dims.ZERO):
        return dims.floor_div(a, b)
    if b.number is not None and b.number > 0:
        up = dims.floor_div(dims.maximum(a, 0), b)
        return up - dims.floor_div(dims.maximum(-a, 0), b)
    return dims.call("div", a, b)


def _remainder(attrs: Attrs) -> Callable[[Formula, Formula], Formula]:
    if attrs.get("fmod", 0):
        return lambda a, b: a - _quotient(a, b) * b
    return dims.modulo


def _is_less(a: Formula, b: Formula) -> bool | None:
    if dims.not_less(b, a + 1):
        return True
    return False if dims.not_less(a, b) else None


def _is_equal(a: Formula, b: Formula) -> bool | None:
    if dims.same(a, b):
        return True
    apart = dims.not_less(a, b + 1) or dims.not_less(b, a + 1)
    return False if apart else None


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _of_integers(op: str, attrs: Attrs, dtype: DType) -> Callable[..., Element] | None:
    """The function with which an operator computes on formulas that fit in their type; None if there is none."""
    rings: dict[str, Callable[..., Formula]] = {
        "Add": lambda a, b: a + b,
        "Sub": lambda a, b: a - b,
        "Mul": lambda a, b: a * b,
        "Neg": lambda a: -a,
        "Abs": lambda a: dims.maximum(a, -a),
        "Div": _quotient,
        "Mod": _remainder(attrs),
        "Min": dims.minimum,
        "Max": dims.maximum,
        "Sum": lambda *parts: sum(parts, dims.ZERO),
    }
    if (ring := rings.get(op)) is not None:
        return lambda *parts: _wrapped(ring(*parts), dtype)
    decided: dict[str, Callable[..., bool | None]] = {
        "Equal": _is_equal,
        "Less": _is_less,
        "Greater": lambda a, b: _is_less(b, a),
        "LessOrEqual": lambda a, b: _negated(_is_less(b, a)),
        "GreaterOrEqual": lambda a, b: _negated(_is_less(a, b)),
    }
    return decided.get(op)


_RINGS = frozenset({"Add", "Sub", "Mul", "Neg", "Sum"})
_COMPARISONS = frozenset({"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"})
_LOGIC: Mapping[str, Callable[..., bool | None]] = {
    "Not": _negated,
    "And": lambda a, b: False if a is False or b is False else (None if None in (a, b) else True),
    "Or": lambda a, b: True if a is True or b is True else (None if None in (a, b) else False),
}
_FLOATING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Floor", "Ceil", "Round", "Sqrt", "Neg", "Min", "Max", "Pow"}
)
_ELEMENTWISE = frozenset(
    {"Cast", "Where", "Abs", "Div", "Mod", "Min", "Max"} | _RINGS | _COMPARISONS | _LOGIC.keys() | _FLOATING
)
_REDUCTIONS: Mapping[str, str] = {
    "ReduceProd": "Mul",
    "ReduceSum": "Add",
    "ReduceMax": "Max",
    "ReduceMin": "Min",
}


def _elementwise(op: str, attrs: Attrs, inputs: Sequence[Known], kind: DType, dtype: DType) -> Known | None:
    """The elements of an elementwise operator's output. `kind`: the first input's element type; `dtype`: the
    output's.
    """
    if sum(x.size for x in inputs) > 4 * SMALL:
        return None
    if op in _LOGIC:
        return _each(lambda *e: _LOGIC[op](*(x if isinstance(x, bool) else None for x in e)), *inputs)
    if op == "Where":
        return _each(
            lambda c, a, b: (a if c else b) if isinstance(c, bool) else a if a == b else None, *inputs
        )
    if op == "Cast":
        return _each(lambda e: _cast(e, kind, dtype), inputs[0])
    if kind in _FLOATS:
        return _each(lambda *e: _floating(op, e, kind), *inputs) if op in _FLOATING else None
    if kind not in _RANGES:
        return None
    function = _of_integers(op, attrs, dtype)
    if function is None:
        return None
    free = op in _RINGS and dtype == DType.INT64

    def one(*elements: Element) -> Element:
        parts = [e for e in elements if isinstance(e, Formula)]
        if len(parts) < len(elements):
            return None
        if free or all(fits(p, kind) for p in parts):
            return function(*parts)
        return None if op in _COMPARISONS else dims.call(f"{op.lower()}.{kind.name.lower()}", *parts)

    return _each(one, *inputs)


def _cast(element: Element, kind: DType, dtype: DType) -> Element:
    """An element converted to another type. Integers wrap around. Floats become calls, since rounding depends on the
    machine.
    """
    if kind == dtype:
        return element
    if isinstance(element, Formula):
        if not fits(element, kind):
            return None
        if dtype in _RANGES:
            return element if fits(element, dtype) else dims.call(f"wrap.{dtype.name.lower()}", element)
        if dtype not in _FLOATS:
            return None
        value = element.number
        if value is not None and abs(value) <= _EXACT:
            return float(value)
        return dims.make_call(f"to.{dtype.name.lower()}", element)
    if isinstance(element, bool):
        return dims.number(int(element)) if dtype in _RANGES else None
    if isinstance(element, float) and dtype in _RANGES and abs(element) <= _EXACT and element == int(element):
        integer = dims.number(int(element))
        return integer if fits(integer, dtype) else None
    if isinstance(element, float | Call):
        name = f"to.{dtype.name.lower()}"
        if dtype in _FLOATS:
            return dims.make_call(name, element)
        return dims.call(name, element) if dtype in _RANGES else None
    return None


# Integers of at most this magnitude are exact in every floating type.
_EXACT = 256


def _floating(op: str, elements: Sequence[Element], kind: DType) -> Element:
    parts = [e for e in elements if isinstance(e, float | Call) and not isinstance(e, bool)]
    return (
        dims.make_call(f"{op.lower()}.{kind.name.lower()}", *parts) if len(parts) == len(elements) else None
    )


def _reduced(op: str, attrs: Attrs, inputs: Sequence[Known], dtype: DType) -> Known | None:
    x = inputs[0]
    axes = numbers(inputs[1]) if len(inputs) > 1 else None
    if (len(inputs) > 1 and axes is None) or attrs.get("noop_with_empty_axes", 0):
        return None
    if dtype not in _RANGES or x.size == 0 or (axes is not None and axes.size == 0):
        return None
    reduced = tuple(range(x.ndim)) if axes is None else tuple(int(a) % x.ndim for a in axes.flat)
    remaining = [i for i in range(x.ndim) if i not in reduced]
    transposed = x.transpose([*remaining, *reduced]).reshape([x.shape[i] for i in remaining] + [-1])
    total = transposed[..., 0]
    step = _REDUCTIONS[op]
    for i in range(1, transposed.shape[-1]):
        result = _elementwise(
            step, Attrs(), [np.asarray(total), np.asarray(transposed[..., i])], dtype, dtype
        )
        if result is None:
            return None
        total = result
    out = np.empty(np.shape(total), object)
    out[...] = total
    if attrs.get("keepdims", 1):
        return out.reshape([1 if i in reduced else n for i, n in enumerate(x.shape)])
    return out


# The values of calls when the sizes are known


def evaluate_call(name: str, arguments: Sequence[float]) -> float | None:
    """The value of a call that this module makes, computed by NumPy in the call's type; None for other calls."""
    if name == "ceil_window":
        size, extent, stride, begin, end = (int(a) for a in arguments)
        count = -((extent - size - begin - end) // stride) + 1
        return count - 1 if (count - 1) * stride >= size + begin else count
    if name == "scale.float":
        scaled = np.float32(arguments[0]) * np.float32(arguments[1])
        return int(scaled) if np.isfinite(scaled) else None
    op, _, kind = name.partition(".")
    if not kind:
        return _truncated(arguments) if op == "div" else None
    if kind not in _NAMES:
        return None
    dtype = np.dtype(_NAMES[kind])
    if dtype.kind in "iu":  # a formula does not overflow, but the numbers of a runtime do
        arguments = [a if isinstance(a, float) else _wrapped_number(a, dtype) for a in arguments]
    with np.errstate(all="ignore"):
        if op == "wrap":
            return int(arguments[0])
        if op == "to":
            number_: float = np.array(arguments[0], type(arguments[0])).astype(dtype).item()
            return number_
        if dtype.kind in "iu" and op == "div":
            return _truncated(arguments)
        function = _NUMPY.get(op)
        if function is None:
            return None
        result: float = function(*(np.array(a).astype(dtype) for a in arguments)).item()
        return result


_NAMES = {"float": "float32", "double": "float64", "float16": "float16"} | {
    t.name.lower(): t.name.lower() for t in _RANGES
}


def _wrapped_number(value: int, dtype: np.dtype[Any]) -> int:
    return int(np.array(int(value) % 2**64, np.uint64).astype(dtype))


def _truncated(arguments: Sequence[float]) -> int | None:
    a, b = (int(x) for x in arguments)
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_NUMPY: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "mod": np.mod,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "sum": lambda *parts: sum(parts),
}
