"""Reads Relax expressions, and replaces calls in a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xrlflow.backends.placement import last_level
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.weights import array_of


def operator(value: Any) -> str:
    """The name of the called operator; "" if the expression is no call of an operator."""
    return str(getattr(getattr(value, "op", None), "name", ""))


def sizes(expression: Any, dtype: str | None = None) -> tuple[int, ...] | None:
    """The shape of a tensor (of this type); None for other expressions, or if a dimension is unknown."""
    from tvm import relax

    kind = expression.ty
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        return None
    if dtype is not None and str(kind.dtype) != dtype:
        return None
    extents = list(kind.shape)
    return tuple(int(n) for n in extents) if all(hasattr(n, "value") for n in extents) else None


def numbers(values: Any) -> list[int]:
    """An attribute that is a list of numbers."""
    return [int(v) for v in list(values)]


def with_calls(module: Any, replace: Callable[[Any, Any], Any | None]) -> Any:
    """The module in which calls of "main" are replaced. `replace(call, builder)` returns the expression that replaces
    the call, or None if the call remains."""
    tvm()
    from tvm import relax

    @relax.expr_functor.mutator
    class Replacer(relax.PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            better = replace(call, self.builder_)
            return call if better is None else better

    return with_main(module, Replacer(module))


def with_main(module: Any, mutator: Any) -> Any:
    """The module that a mutator returns after it has visited "main", with all functions that it added."""
    main = mutator.visit_expr(module["main"])
    result = mutator.builder_.get()
    result.update_func(result.get_global_var("main"), main)
    return result


def bound(expression: Any, builder: Any) -> Any:
    """The value of a variable of the function that a builder writes; other expressions as they are."""
    from tvm import relax

    value = builder.lookup_binding(expression) if isinstance(expression, relax.Var) else expression
    return expression if value is None else value


def constant(array: Any) -> Any:
    """A constant of the array's own type."""
    from tvm import relax

    return relax.const(array, str(array.dtype))


def known_value(tensor: Any) -> Any | None:
    """The numbers of a constant, or of a shape whose dimensions are all numbers, as an array; None for other
    expressions."""
    from tvm import relax, tirx
    from tvm.ir import GenericConst

    if isinstance(tensor, GenericConst):
        return array_of(tensor)
    if isinstance(tensor, tirx.IntImm):
        return np.asarray(int(tensor), np.int64)
    if isinstance(tensor, relax.ShapeExpr) and all(isinstance(n, tirx.IntImm) for n in tensor.values):
        return np.asarray([int(n) for n in tensor.values], np.int64)
    return None


def weights_from_memory(function: Any) -> bool:
    """Whether the weights of a function come from memory at each call, because the caches cannot hold all of them.
    (Transformed weights, which are 1.8 to 4 times as large, are not taken into account.)"""
    from tvm.ir import GenericConst

    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    operands = [x for value in values for x in getattr(value, "args", ())]
    # The operands of generated kernels are in a tuple.
    operands += [part for x in operands for part in getattr(x, "fields", ())]
    constants = {x for x in operands if isinstance(x, GenericConst)}
    size = sum(math.prod(shape) * 4 for c in constants if (shape := sizes(c)) is not None)
    return size > last_level() // 2
