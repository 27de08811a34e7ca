"""Generated kernels in the place of expressions of a Relax function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import with_main


@dataclass(frozen=True, slots=True)
class Replacement:
    """A kernel that computes a variable. Kernels of one `form` are one function, which `make` makes and `name` names.
    `read` gives the expressions that it reads; `shape` is that of its result."""

    name: str
    workload: Hashable
    make: Callable[[], Any]
    read: Callable[[], Sequence[Any]]
    shape: Sequence[int]


def with_kernels(module: Any, found: Mapping[Any, Replacement]) -> Any:
    """The module with kernels in the place of variables of "main". What nobody reads any more is left out."""
    if not found:
        return module
    tvm()
    from tvm import relax

    functions: dict[Hashable, Any] = {}

    @relax.expr_functor.mutator
    class Replacer(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            replacement = found.get(binding.var)
            if replacement is None:
                super().visit_var_binding_(binding)
                return
            if replacement.workload not in functions:
                functions[replacement.workload] = self.builder_.add_func(replacement.make(), replacement.name)
            read = [self.visit_expr(x) for x in replacement.read()]
            kind = relax.TensorType(replacement.shape, FLOAT)
            call = relax.call_tir(functions[replacement.workload], read, kind)
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Replacer(module)))
