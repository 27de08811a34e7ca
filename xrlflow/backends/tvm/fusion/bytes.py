"""Makes quantisation and dequantisation faster.

A quantised image enters a region with channels first and is dequantised, and kernels read it with channels last: as
bytes it is a quarter of the size, and a kernel of ours transposes it. Sums of products are quantised by a factor: a
division takes as long as ten other operators of a kernel's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrlflow.backends.tvm.fusion.layouts import ELEMENTWISE, axes_of
from xrlflow.backends.tvm.kernels.byte_moves import BLOCK, transposition
from xrlflow.backends.tvm.kernels.extremes import WIDTH, extremes
from xrlflow.backends.tvm.toolchain.reading import bound, constant, known_value, operator, sizes, with_calls

_BYTES = ("int8", "uint8")
_ARITHMETIC = ("relax.subtract", "relax.multiply")
_SUMS = frozenset(f"relax.{name}" for name in ("matmul", "nn.conv1d", "nn.conv2d", "nn.conv3d"))


def handle_bytes(module: Any) -> Any:
    """The module in which "main" transposes bytes before it dequantises them, transposes them with a kernel of ours
    where they are large enough for it, quantises sums of products without divisions, and finds the least and the
    greatest number of a tensor in one pass."""
    from tvm import relax

    for replace in (_before_dequantising, _by_kernel, _by_factor, _by_channel, _Extremes().replace):
        module = with_calls(module, replace)
    return relax.transform.DeadCodeElimination()(module)


def _by_channel(call: Any, builder: Any) -> Any | None:
    """A sum of products times a computed tensor of one element, with that element for each channel: kernels take this
    as a step."""
    from tvm import relax

    shape = sizes(call, "float32")
    if operator(call) != "relax.multiply" or not shape or len(shape) < 2:
        return None
    x, operand = call.args
    if sizes(x) != shape:  # an operand with more dimensions adds them to the result
        return None
    single = sizes(operand, "float32")
    if single is None or math.prod(single) != 1 or known_value(operand) is not None:
        return None
    total = _sum_in(x, builder)
    if total is None or not str(getattr(total.attrs, "data_layout", "C")).endswith("C"):
        return None
    one = builder.emit(relax.op.reshape(operand, ())) if single else operand
    channels = builder.emit(relax.op.broadcast_to(one, shape[-1:]))
    return relax.Call(call.op, [x, channels])


def _by_factor(call: Any, builder: Any) -> Any | None:
    """`round(x / scale)` as `round(x * (1 / scale))` for a sum of products.

    The quotient changes by up to 1.5 units in the last place, below 1e-4 of a step. That is less than sums of products
    are uncertain by; but of two bytes the mean, for example, is often a tie, and stays one if it is divided.
    """
    from tvm import relax

    if (
        operator(call) != "relax.round"
        or operator(quotient := bound(call.args[0], builder)) != "relax.divide"
    ):
        return None
    scale = known_value(quotient.args[1])
    if scale is None or _sum_in(quotient.args[0], builder) is None:
        return None
    with np.errstate(all="ignore"):
        factor = np.float32(1) / scale
    if not (np.isfinite(factor) & (np.abs(factor) >= np.finfo(np.float32).tiny)).all():
        return None
    shape = sizes(call)
    if factor.size == 1 and shape:  # as an operand, so that the kernels of layers with other scales are equal
        factor = np.full(shape[-1:], factor.item(), np.float32)
    return relax.op.round(builder.emit(relax.op.multiply(quotient.args[0], constant(factor))))


def _sum_in(expression: Any, builder: Any) -> Any | None:
    """The sum of products from which operators on single elements compute an expression."""
    pending, seen = [expression], set[Any]()
    while pending:
        each = pending.pop()
        value = bound(each, builder)
        if operator(value) in _SUMS:
            return value
        if operator(value) in ELEMENTWISE and each not in seen:
            seen.add(each)
            pending.extend(value.args)
    return None


def _before_dequantising(call: Any, builder: Any) -> Any | None:
    """`transpose((astype(x) - zero) * scale)` as `(astype(transpose(x)) - zero) * scale`."""
    from tvm import relax

    if operator(call) != "relax.permute_dims":
        return None
    axes, shape = axes_of(call), sizes(call.args[0])
    steps = []
    x = bound(call.args[0], builder)
    while operator(x) in _ARITHMETIC and (operand := _turned(x.args[1], shape, axes)) is not None:
        steps.append((x.op, operand))
        x = bound(x.args[0], builder)
    if operator(x) != "relax.astype" or str(x.args[0].ty.dtype) not in _BYTES or sizes(x) != shape:
        return None
    moved = builder.emit(relax.op.permute_dims(x.args[0], list(axes)))
    result = relax.op.astype(moved, str(x.ty.dtype))
    for op, operand in reversed(steps):
        result = relax.Call(op, [builder.emit(result), operand])
    return result


def _turned(operand: Any, shape: Sequence[int] | None, axes: Sequence[int]) -> Any | None:
    """A constant operand as it is broadcast to the transposed result; None for operands that are not constant."""
    array = known_value(operand)
    if array is None or shape is None or array.ndim > len(shape):
        return None
    if array.size == 1:
        return constant(array.reshape(()))
    return constant(array.reshape((1,) * (len(shape) - array.ndim) + array.shape).transpose(axes))


def _by_kernel(call: Any, builder: Any) -> Any | None:
    """The kernel's call for a transposition of bytes that swaps two neighbouring groups of dimensions."""
    from tvm import relax

    if operator(call) != "relax.permute_dims":
        return None
    kind, shape = str(call.ty.dtype), sizes(call.args[0])
    if kind not in _BYTES or shape is None:
        return None
    axes = axes_of(call)
    first = next((at for at, axis in enumerate(axes) if axis != at), len(axes))
    middle = axes[first] if first < len(axes) else first
    if axes[first:] != (*range(middle, len(axes)), *range(first, middle)):
        return None
    batch, rows, columns = (math.prod(part) for part in (shape[:first], shape[first:middle], shape[middle:]))
    if min(rows, columns) < BLOCK or not batch:
        return None
    result = sizes(call)
    assert result is not None
    kernel = builder.add_func(transposition((batch, rows, columns), shape, result, kind), "transposed_bytes")
    return relax.call_tir(kernel, [call.args[0]], relax.TensorType(result, kind))


class _Extremes:
    """Replaces the least and the greatest number of a whole tensor by the results of one kernel."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def replace(self, call: Any, builder: Any) -> Any | None:
        from tvm import relax

        if operator(call) not in ("relax.min", "relax.max"):
            return None
        x, shape, axes = call.args[0], sizes(call.args[0], "float32"), call.attrs.axis
        if shape is None or math.prod(shape) < WIDTH or call.attrs.keepdims:
            return None
        if axes is not None and len(axes) < len(shape):
            return None
        if x not in self._found:
            kernel = builder.add_func(extremes(shape), "extremes")
            kinds = [relax.TensorType((), "float32")] * 2
            self._found[x] = builder.emit(relax.call_tir(kernel, [x], kinds))
        return relax.TupleGetItem(self._found[x], int(operator(call) == "relax.max"))
