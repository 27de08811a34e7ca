"""Element-wise operators and norms for which TVM's lowering is slow or inexact."""

from __future__ import annotations

import math
from typing import Any

from xrlflow.backends.tvm.kernels.building import OPAQUE
from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.powers import is_short, multiplied
from xrlflow.backends.tvm.toolchain.reading import constant, sizes
from xrlflow.backends.tvm.toolchain.weights import array_of


def legal_power(builder: Any, call: Any) -> Any | None:
    """A kernel for a power in half or single precision; None for other types.

    Powers that are not computed as products are kernels of their own. Such a power has many variables. If it were fused
    with another function, TVM would substitute each of them, and compilation would take minutes, or fail.
    """
    from tvm import te, tirx, topi

    x, y = call.args
    kind = str(call.ty.dtype)
    if kind not in ("float16", "float32") or str(x.ty.dtype) != kind or str(y.ty.dtype) != kind:
        return None
    exponent = _one_number(y)
    if exponent is None or sizes(x) != sizes(call):
        return builder.call_te(
            topi.power, x, y, primfunc_name_hint="power", primfunc_attrs={"op_pattern": OPAQUE}
        )

    def raised(x: Any) -> Any:
        if exponent in (1.0, 2.0, 3.0):  # TVM warns of the power of 3
            return multiplied(x, int(exponent))
        return tirx.power(x, tirx.const(exponent, kind))

    def power(x: Any) -> Any:
        return te.compute(x.shape, lambda *i: raised(x[i]), name="power")

    attrs = {} if is_short(exponent) else {"op_pattern": OPAQUE}
    return builder.call_te(power, x, primfunc_name_hint="power", primfunc_attrs=attrs)


def _one_number(y: Any) -> float | None:
    """The value of a constant of one element; None for other expressions."""
    from tvm.ir import GenericConst

    if not isinstance(y, GenericConst) or math.prod(sizes(y) or (0,)) != 1:
        return None
    return float(array_of(y).item())


def with_exponent(node: Imported) -> None:
    """Convert a constant exponent to the type of the base: TVM's importer accepts no other."""
    from tvm.ir import GenericConst

    x, y = node.inputs[0], node.inputs[1]
    kind = str(x.ty.dtype)
    if isinstance(y, GenericConst) and kind.startswith("float") and str(y.ty.dtype) != kind:
        node.inputs[1] = constant(array_of(y).astype(kind))


def celu(node: Imported) -> Any:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1))."""
    from tvm import relax

    x, alpha = node.inputs[0], float(node.attributes.get("alpha", 1.0))
    op, kind = relax.op, str(x.ty.dtype)
    power = node.emit(op.exp(x if alpha == 1.0 else node.emit(op.divide(x, relax.const(alpha, kind)))))
    less = node.emit(op.subtract(power, relax.const(1.0, kind)))
    scaled = less if alpha == 1.0 else node.emit(op.multiply(relax.const(alpha, kind), less))
    below = node.emit(op.minimum(relax.const(0.0, kind), scaled))
    return node.emit(op.add(node.emit(op.nn.relu(x)), below))


def normalized(node: Imported) -> Any:
    """LpNormalization: x divided by its norm along an axis. If the norm is zero, the result is zero, as in ONNX
    Runtime."""
    from tvm import relax

    x, axis = node.inputs[0], int(node.attributes.get("axis", -1))
    op, kind = relax.op, str(x.ty.dtype)
    if int(node.attributes.get("p", 2)) == 1:
        norm = node.emit(op.sum(node.emit(op.abs(x)), [axis], keepdims=True))
    else:
        norm = node.emit(op.sqrt(node.emit(op.sum(node.emit(op.multiply(x, x)), [axis], keepdims=True))))
    zero, one = relax.const(0.0, kind), relax.const(1.0, kind)
    divisor = node.emit(op.where(node.emit(op.equal(norm, zero)), one, norm))
    return node.emit(op.divide(x, divisor))
