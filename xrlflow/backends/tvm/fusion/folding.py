"""Folds reshaped and transposed constants with NumPy. TVM's own folding compiles a kernel for each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from xrlflow.backends.tvm.fusion.layouts import axes_of
from xrlflow.backends.tvm.toolchain.reading import operator, sizes, with_calls
from xrlflow.backends.tvm.toolchain.weights import moved

_VIEWS = frozenset({"relax.expand_dims", "relax.reshape", "relax.squeeze"})
_KINDS = frozenset({"bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"})


def fold_moves(module: Any) -> Any:
    """The module in which constants replace those expressions of "main" that only reshape or transpose constants."""
    return with_calls(module, _folded)


def _folded(call: Any, builder: Any) -> Any | None:
    name = operator(call)
    if name not in _VIEWS and name != "relax.permute_dims":
        return None
    operand = _constant(call.args[0], builder)
    shape = sizes(call)
    if operand is None or shape is None or str(operand.ty.dtype) not in _KINDS:
        return None
    if name == "relax.permute_dims":
        return moved(operand, np.transpose, tuple(axes_of(call)))
    return moved(operand, np.reshape, shape)


def _constant(expression: Any, builder: Any) -> Any | None:
    """A constant, directly or through variables; None for other expressions."""
    from tvm import relax
    from tvm.ir import GenericConst

    while isinstance(expression, relax.Var):
        expression = builder.lookup_binding(expression)
    return expression if isinstance(expression, GenericConst) else None
