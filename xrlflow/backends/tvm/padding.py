"""Weights with a number of columns that vectors do not divide get columns of zeros, and the result is cropped.

A product with 50,257 columns, or a convolution to 255 or 1,000 channels, would be computed element by element
otherwise, up to eighteen times more slowly. Only constants are padded, when the model is compiled.
"""

from __future__ import annotations

from typing import Any

from xrlflow.backends.tvm.load import tvm
from xrlflow.backends.tvm.target import Machine

# What is computed in vain may be so much more than what filling whole vectors takes.
_MORE = 1.05
_ELEMENTWISE = 0  # relax's OpPatternKind: it may follow a product in one function
_CHANNELS_LAST = "HWIO"


def pad_columns(module: Any, machine: Machine) -> Any:
    """The module with the constant weights of "main" padded: of products, and of convolutions with channels last."""
    tvm()
    from tvm import relax
    from tvm.ir import GenericConst

    @relax.expr_functor.mutator
    class Padder(relax.PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            weights = call.args[1] if len(call.args) == 2 and _has_columns(call) else None
            if not isinstance(weights, GenericConst):
                return call
            columns = int(weights.ty.shape[-1])
            width = padded(columns, machine.lanes)
            if width == columns:
                return call
            wide = self.builder_.normalize(
                relax.Call(call.op, [call.args[0], _widened(weights, width)], call.attrs, call.ty_args)
            )
            return self.builder_.call_te(
                crop, self.builder_.emit(wide), columns,
                primfunc_name_hint="crop", primfunc_attrs={"op_pattern": _ELEMENTWISE},
            )  # fmt: skip

    padder = Padder(module)
    main = padder.visit_expr(module["main"])
    done = padder.builder_.get()
    done.update_func(done.get_global_var("main"), main)
    return done


def padded(columns: int, lanes: int) -> int:
    """The number of columns to compute: a multiple of several vectors, where that is hardly more than of one."""
    if columns % lanes == 0 or columns == 1:
        return columns
    least = -(-columns // lanes) * lanes
    for vectors in (4, 3, 2):
        width = -(-columns // (vectors * lanes)) * vectors * lanes
        if width <= _MORE * least:
            return width
    return least


def crop(x: Any, columns: int) -> Any:
    """The first columns."""
    from tvm import te

    return te.compute([*x.shape[:-1], columns], lambda *i: x[i], name="crop")


def _has_columns(call: Any) -> bool:
    """Whether the second operand's last dimension is the result's last dimension, and no other one's."""
    name = str(getattr(call.op, "name", ""))
    if name == "relax.matmul":
        return len(call.args[1].ty.shape) == 2
    return (
        name == "relax.nn.conv2d"
        and call.attrs.kernel_layout == _CHANNELS_LAST
        and int(call.attrs.groups) == 1
    )


def _widened(weights: Any, width: int) -> Any:
    import numpy as np
    from tvm import relax

    array = weights.value.numpy()
    missing = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    return relax.const(np.pad(array, missing), str(array.dtype))
