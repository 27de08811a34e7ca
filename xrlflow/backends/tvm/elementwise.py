"""Element-wise operators that are lowered here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xrlflow.backends.tvm.powers import multiplied
from xrlflow.backends.tvm.reading import constant, sizes

if TYPE_CHECKING:
    from xrlflow.backends.tvm.operators import Imported


def legal_power(builder: Any, call: Any) -> Any | None:
    """A power whose exponent is one constant; None for others."""
    from tvm import te, tirx
    from tvm.ir import GenericConst

    x, y = call.args
    kind = str(call.ty.dtype)
    if not isinstance(y, GenericConst) or kind not in ("float16", "float32") or sizes(x) != sizes(call):
        return None
    if str(y.ty.dtype) != kind or y.value.numpy().size != 1:
        return None
    exponent = float(y.value.numpy().item())

    def raised(x: Any) -> Any:
        if exponent in (1.0, 2.0, 3.0):  # TVM warns of the power of 3
            return multiplied(x, int(exponent))
        return tirx.power(x, tirx.const(exponent, kind))

    def power(x: Any) -> Any:
        return te.compute(x.shape, lambda *i: raised(x[i]), name="power")

    return builder.call_te(power, x, primfunc_name_hint="power")


def with_exponent(node: Imported) -> None:
    """The exponent gets the type of the number, where it is a constant: TVM's importer takes no others."""
    from tvm.ir import GenericConst

    x, y = node.inputs[0], node.inputs[1]
    kind = str(x.ty.dtype)
    if isinstance(y, GenericConst) and kind.startswith("float") and str(y.ty.dtype) != kind:
        node.inputs[1] = constant(y.value.numpy().astype(kind))
