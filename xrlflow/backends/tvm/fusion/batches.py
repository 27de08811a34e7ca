"""Finds batches of many small matrix products in a Relax function, and replaces each batch, with the element-wise steps
that follow it, by one kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from xrlflow.backends.tvm.fusion.following import Function
from xrlflow.backends.tvm.fusion.layouts import ELEMENTWISE
from xrlflow.backends.tvm.fusion.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.kernels.batches import BatchedProduct, best_blocking, kernel
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.toolchain.reading import operator, sizes
from xrlflow.backends.tvm.toolchain.target import Machine

# The second matrix of a product may have at most this many bytes: rows of the first matrix also have to fit in a
# first-level cache of 32 KB.
_BYTES = 16 << 10
# A sum may have at most this many terms. More terms would have to be summed in chunks, which this kernel does not do.
_TERMS = 128
# A batch has at least this many products for each core, so that cores finish together, and at least this many rows in a
# product.
_PRODUCTS, _ROWS = 4, 4


def fuse_batches(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each batch of small products in "main"."""
    return with_kernels(module, _replacements(Function(module["main"]), machine))


def _replacements(function: Function, machine: Machine) -> dict[Any, Replacement]:
    """The kernels of the batches of small products, by the variable that each computes. A batch stays with TVM if it is
    followed by an operator that only TVM can fuse with it."""
    replacements: dict[Any, Replacement] = {}
    used: set[Any] = set()
    for variable, call in function.values.items():
        if operator(call) != "relax.matmul" or (workload := _workload(call, machine)) is None:
            continue
        followed = function.followed(variable, used)
        reader = function.reader(followed.last)
        if reader is not None and operator(function.values[reader]) in ELEMENTWISE:
            continue
        used |= followed.inside
        workload = replace(workload, steps=followed.steps)
        read = [*call.args, *followed.extras]
        make = partial(kernel, workload, best_blocking(workload, machine))
        replacements[followed.last] = Replacement(
            "batches", workload, make, partial(list, read), workload.out
        )
    return replacements


def _workload(call: Any, machine: Machine) -> BatchedProduct | None:
    """The workload (dimensions and steps) of a batch of small products; None for any other product."""
    x, z = (sizes(each, FLOAT) for each in call.args)
    if x is None or z is None or min(len(x), len(z)) < 3 or x[:-2] != z[:-2] or 0 in (*x, *z):
        return None
    workload = BatchedProduct(x[:-2], x[-2], x[-1], z[-1])
    if (
        math.prod(workload.batch) < _PRODUCTS * machine.cores
        or workload.rows < _ROWS
        or workload.depth > _TERMS
    ):
        return None
    if workload.columns < machine.lanes or 4 * workload.depth * workload.columns > _BYTES:
        return None
    return workload
