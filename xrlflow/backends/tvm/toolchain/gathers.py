"""Gathers without a warning.

For each `take` that it lowers, TVM writes a line to standard error, which says that indices are not checked.
`lowering.bounds` checks all indices of a model. The loops of this module are the same as TVM's.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Lower `take` as this module does, also when constants are folded."""
    from tvm.ir import Op, register_op_attr

    theirs = Op.get("relax.take").get_attr("FLegalize")

    def legal(builder: Any, call: Any) -> Any:
        axis = call.attrs.axis
        if axis is None or str(call.attrs.mode) != "fast":
            return theirs(builder, call)
        table, indices = call.args
        return builder.call_te(take, table, indices, int(axis) % len(table.ty.shape))

    register_op_attr("relax.take", "FLegalize", legal, level=11)


def take(table: Any, indices: Any, axis: int) -> Any:
    """The parts of a table at these indices along an axis."""
    from tvm import te

    end = axis + len(indices.shape)
    shape = (*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])
    return te.compute(
        shape, lambda *i: table(*i[:axis], indices(*i[axis:end]), *i[end:]), name="T_take", tag="injective"
    )
