"""Finds products with constant weights in a Relax function, and replaces them and what follows by one kernel each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.following import Followed, Function
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.products import Form, kernel, packed, plan
from xrlflow.backends.tvm.reading import constant, operator, sizes, with_main
from xrlflow.backends.tvm.target import Machine

# One row is read as fast as memory allows by any kernel. Of more rows than the most, a schedule reads weights often
# enough from the second-level cache.
_ROWS = range(2, 257)
# Smaller weights stay in the first-level cache whatever the kernel does.
_LEAST_WEIGHTS = 128 << 10


@dataclass(frozen=True, slots=True)
class _Match:
    """A product and the steps after it."""

    form: Form
    x: Any
    weights: Any
    followed: Followed


def fuse_products(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each product of some rows with constant weights in "main"."""
    tvm()
    from tvm import relax

    found = {match.followed.last: match for match in _matches(Function(module["main"]), machine)}
    if not found:
        return module
    functions: dict[Form, Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in found:
                super().visit_var_binding_(binding)
                return
            match = found[binding.var]
            form, how = match.form, plan(match.form, machine)
            if form not in functions:
                functions[form] = self.builder_.add_func(kernel(form, how), "product")
            panels = constant(packed(match.weights.value.numpy(), how))
            read = [self.visit_expr(match.x), panels, *map(self.visit_expr, match.followed.extras)]
            call = relax.call_tir(functions[form], read, relax.TensorType(form.out, FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))


def _matches(function: Function, machine: Machine) -> list[_Match]:
    """Products, each with as many steps as are read by nothing else. No two matches share a step."""
    found = []
    taken: set[Any] = set()
    for variable, call in function.values.items():
        if operator(call) != "relax.matmul" or not _is_product(call, machine):
            continue
        followed = function.followed(variable, taken)
        taken |= followed.inside
        x, out = sizes(call.args[0]), sizes(call)
        assert x is not None
        assert out is not None
        found.append(_Match(Form(x, out, followed.steps), call.args[0], call.args[1], followed))
    return found


def _is_product(call: Any, machine: Machine) -> bool:
    """Whether an expression is a product of some rows with constant weights, all of known sizes."""
    from tvm.ir import GenericConst

    x, weights, out = (sizes(each, FLOAT) for each in (*call.args, call))
    if x is None or out is None or weights is None or not isinstance(call.args[1], GenericConst):
        return False
    if len(weights) != 2 or len(x) < 2 or 0 in (*x, *out) or weights[1] < 2 * machine.lanes:
        return False
    return math.prod(x[:-1]) in _ROWS and 4 * math.prod(weights) >= _LEAST_WEIGHTS
