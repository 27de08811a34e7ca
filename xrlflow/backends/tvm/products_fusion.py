"""Finds products with constant weights in a Relax function, and replaces them and what follows by one kernel each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.following import Function
from xrlflow.backends.tvm.products import Form, kernel, packed, plan
from xrlflow.backends.tvm.reading import constant, operator, sizes
from xrlflow.backends.tvm.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.target import Machine

# One row is read as fast as memory allows by any kernel. Of more rows than the most, a schedule reads weights often
# enough from the second-level cache.
_ROWS = range(2, 257)
# Smaller weights stay in the first-level cache whatever the kernel does.
_LEAST_WEIGHTS = 128 << 10


def fuse_products(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each product of some rows with constant weights in "main"."""
    return with_kernels(module, _found(Function(module["main"]), machine), "product")


def _found(function: Function, machine: Machine) -> dict[Any, Replacement]:
    """Products, each with as many steps as are read by nothing else. No two share a step."""
    found: dict[Any, Replacement] = {}
    taken: set[Any] = set()
    for variable, call in function.values.items():
        if operator(call) != "relax.matmul" or not _is_product(call, machine):
            continue
        followed = function.followed(variable, taken)
        taken |= followed.inside
        x, out = sizes(call.args[0]), sizes(call)
        assert x is not None
        assert out is not None
        form = Form(x, out, followed.steps)
        found[followed.last] = _replacement(form, call, followed.extras, machine)
    return found


def _replacement(form: Form, call: Any, extras: Sequence[Any], machine: Machine) -> Replacement:
    how = plan(form, machine)
    x, weights = call.args

    def read() -> Sequence[Any]:
        return [x, constant(packed(weights.value.numpy(), how)), *extras]

    return Replacement(form, partial(kernel, form, how), read, form.out)


def _is_product(call: Any, machine: Machine) -> bool:
    """Whether an expression is a product of some rows with constant weights, all of known sizes."""
    from tvm.ir import GenericConst

    x, weights, out = (sizes(each, FLOAT) for each in (*call.args, call))
    if x is None or out is None or weights is None or not isinstance(call.args[1], GenericConst):
        return False
    if len(weights) != 2 or len(x) < 2 or 0 in (*x, *out) or weights[1] < 2 * machine.lanes:
        return False
    return math.prod(x[:-1]) in _ROWS and 4 * math.prod(weights) >= _LEAST_WEIGHTS
