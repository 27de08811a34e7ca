"""Gathers without a warning.

TVM writes a line to standard error for each `take` that it makes loops for: that nobody looks for indices outside the
table. `lowering.bounds` does that, for all indices of a model. The loops here are the same.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make the loops of `take` here, also where constants are folded."""
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
